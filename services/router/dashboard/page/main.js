// The page put together: what is asked for each second, and what is done with the answers.

import { showPairs, showTotals, showWorkers } from "./cluster.js";
import { RequestList } from "./requests.js";
import { put } from "./show.js";
import { ask, every, forget, hasKey, NeedsKey, remember } from "./source.js";
import { Waterfall } from "./waterfall.js";

const SHOWN = 100;
const at = (id) => document.getElementById(id);
const etags = new Map();
const waterfall = new Waterfall(at("detail"));
const list = new RequestList(at("requests"), choose);
let paused = false;
let chosen = "";
let settled = false; // the chosen request has ended and was shown so
let heardAt = 0;

async function look() {
  if (paused && heardAt) return true;
  try {
    const page = await ask(`cluster?requests=${SHOWN}`, etags);
    if (page) show(page);
    if (chosen && !settled) await lookAt(chosen);
    heard();
    return true;
  } catch (error) {
    if (error instanceof NeedsKey) wantKey();
    else silent(error);
    return false;
  }
}

async function lookAt(id) {
  const request = await ask(`requests/${encodeURIComponent(id)}`);
  if (id !== chosen) return;
  if (request === null) {
    settled = true;
    waterfall.clear("This request is no longer remembered: newer ones took its place.");
    return;
  }
  waterfall.show(request);
  settled = request.outcome !== null;
}

function show(page) {
  put(at("model"), page.model);
  put(at("version"), page.version);
  pill(page);
  showTotals(document, page.totals);
  list.show(page.requests);
  at("no-requests").hidden = page.requests.length > 0;
  at("requests").tHead.hidden = page.requests.length === 0;
  if (!page.requests.length) example(page);
  showWorkers(document, page);
  showPairs(document, page.pairs);
}

function pill(page) {
  let kind = "done";
  let words = "Ready";
  if (!page.serves) [kind, words] = ["failed", page.missing || "Not ready"];
  else if (page.missing) [kind, words] = ["waiting", page.missing];
  else if (!page.store_up) [kind, words] = ["waiting", "Redis is away; serving by the last view"];
  at("ready").className = `pill s-${kind}`;
  put(at("ready").lastElementChild, words);
}

function example(page) {
  const url = new URL("/v1/completions", location.href);
  url.port = page.port;
  const body = JSON.stringify({ model: page.model, prompt: "The capital of France is", max_tokens: 32 });
  const key = hasKey() ? " -H 'Authorization: Bearer YOUR_KEY'" : "";
  put(at("example"), `curl ${url}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`);
}

function choose(id) {
  chosen = id;
  settled = false;
  put(at("said"), `Timeline of request ${id}`);
  lookAt(id).catch(silent);
}

function heard() {
  heardAt = Date.now();
  at("gone").hidden = true;
  at("key-form").hidden = true;
  document.body.classList.remove("stale");
}

function silent() {
  document.body.classList.add("stale");
  at("key-form").hidden = true;
  at("gone").hidden = false;
  const since = heardAt ? ` What you see is ${Math.round((Date.now() - heardAt) / 1000)} s old.` : "";
  put(at("gone"), `The router does not answer.${since} It is asked again and again.`);
  at("ready").className = "pill s-failed";
  put(at("ready").lastElementChild, "No answer");
}

function wantKey() {
  document.body.classList.add("stale");
  at("gone").hidden = true;
  if (!at("key-form").hidden) return;
  forget();
  at("key-form").hidden = false;
  at("key").focus();
}

function pause() {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  put(at("pause"), paused ? "Go on" : "Pause");
  again();
}

at("pause").addEventListener("click", pause);
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea");
  if (event.key.toLowerCase() === "p" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) pause();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  remember(at("key").value.trim());
  at("key").value = "";
  at("key-form").hidden = true;
  again();
});

const again = every(look);
