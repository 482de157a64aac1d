// Asks the router: one request at a time, a second apart, none while nobody sees the page.

const EVERY_MS = 1000;
const SLOWEST_MS = 5000;
const PATIENCE_MS = 5000;
const KEY = "kvrelay-key";

export class NeedsKey extends Error {}

export async function ask(path, etags) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (etags?.has(path)) headers["if-none-match"] = etags.get(path);
  const answer = await fetch(`/dashboard/api/${path}`, {
    headers,
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (answer.status === 401) throw new NeedsKey();
  if (answer.status === 304) return undefined;
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`it answers ${answer.status}`);
  const page = await answer.json();
  if (etags && answer.headers.has("etag")) etags.set(path, answer.headers.get("etag"));
  return page;
}

export function remember(key) {
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function forget() {
  sessionStorage.removeItem(KEY);
}

// Calls `look` again and again. It slows down while `look` fails, and rests while the page is hidden.
export function every(look) {
  let timer;
  let busy = false;
  let wait = EVERY_MS;
  async function turn() {
    clearTimeout(timer);
    if (busy || document.hidden) return;
    busy = true;
    wait = (await look()) ? EVERY_MS : Math.min(wait * 1.5, SLOWEST_MS);
    busy = false;
    timer = setTimeout(turn, wait);
  }
  document.addEventListener("visibilitychange", turn);
  turn();
  return turn;
}
