// Workers with their pools and queues, pairs, and the totals above them.

import { bytes, cells, count, duration, element, follow, put, rate } from "./show.js";

const POOL = ["in_use", "cached", "free"];

export function showTotals(root, totals) {
  const set = (id, text) => put(root.getElementById(id), text);
  set("in-flight", count(totals.in_flight));
  set("queued", count(totals.queued));
  set("rate", rate(totals.tokens_per_s));
  set("ended", rate(totals.requests_per_s));
  for (const [id, found] of [["first-token", totals.first_token], ["gap", totals.gap]]) {
    for (const each of ["p50", "p90", "p99"]) put(root.querySelector(`#${id} .${each}`), duration(found[`${each}_ms`]));
  }
  spark(root.getElementById("spark"), totals.tokens_by_second);
}

function spark(picture, values) {
  const most = Math.max(...values, 1);
  const points = values.map((value, at) => `${((at * 120) / (values.length - 1)).toFixed(1)} ${(30 - (28 * value) / most).toFixed(1)}`);
  picture.querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  picture.querySelector(".area").setAttribute("d", `M0 32L${points.join("L")}L120 32Z`);
}

export function showWorkers(root, page) {
  follow(root.getElementById("workers").tBodies[0], page.workers, (worker) => worker.incarnation, makeWorker, fillWorker);
  const none = root.getElementById("no-workers");
  none.hidden = page.workers.length > 0;
  root.getElementById("workers").hidden = !none.hidden;
  put(none, "No worker is registered. Start one: kvrelay prefill and kvrelay decode, with this router's --redis.");
  const more = page.workers_left_out ? `; ${count(page.workers_left_out)} more are not shown` : "";
  put(root.getElementById("workers-hint"), page.workers.length ? `blocks of ${count(page.workers[0].blocks.tokens)} tokens${more}` : "");
}

function makeWorker() {
  const row = element("tr");
  const name = element("th", "mono");
  name.scope = "row";
  row.append(name);
  cells(row, ["role", "state", "pool-col", "n", "n", "n", "n", "n", "n unit", "n unit"]);
  row.cells[2].append(element("span", "dot"), element("span", "words"));
  const pool = element("span", "pool");
  pool.setAttribute("role", "img");
  for (const each of POOL) pool.append(element("span", each));
  row.cells[3].append(pool);
  return row;
}

function fillWorker(row, worker) {
  const blocks = worker.blocks;
  const [name, role, state, pool, inUse, cached, free, running, waiting, prefill, decode] = row.cells;
  put(name, worker.name);
  name.title = `${worker.address}, ${worker.transport}, ${worker.incarnation}`;
  put(role, worker.role);
  state.className = `state s-${worker.state === "ready" ? "done" : worker.state === "not in use" ? "failed" : "waiting"}`;
  put(state.lastChild, worker.state);
  const label = `${count(blocks.in_use)} of ${count(blocks.total)} blocks in use, ${count(blocks.cached)} cached, ${count(blocks.free)} free`;
  const bar = pool.firstChild;
  bar.setAttribute("aria-label", label);
  bar.title = label;
  POOL.forEach((each, at) => {
    bar.children[at].style.width = `${(100 * blocks[each]) / Math.max(blocks.total, 1)}%`;
  });
  put(inUse, count(blocks.in_use));
  put(cached, count(blocks.cached));
  put(free, count(blocks.free));
  put(running, count(worker.running));
  put(waiting, count(worker.waiting));
  put(prefill, worker.prefill_tokens_per_s ? `${rate(worker.prefill_tokens_per_s)} tok/s` : "–");
  put(decode, worker.decode_tokens_per_s ? `${rate(worker.decode_tokens_per_s)} tok/s` : "–");
}

export function showPairs(root, pairs) {
  const most = Math.max(...pairs.map((pair) => pair.tokens), 1);
  follow(root.getElementById("pairs").tBodies[0], pairs, (pair) => `${pair.prefill} ${pair.decode}`, makePair, (row, pair) => {
    const [from, to, share, prompts, tokens, size] = row.cells;
    put(from, pair.prefill);
    put(to, pair.decode);
    share.firstChild.firstChild.style.width = `${(100 * pair.tokens) / most}%`;
    put(prompts, count(pair.prompts));
    put(tokens, count(pair.tokens));
    put(size, bytes(pair.bytes));
  });
  root.getElementById("no-pairs").hidden = pairs.length > 0;
  root.getElementById("pairs").hidden = pairs.length === 0;
}

function makePair() {
  const row = element("tr");
  const from = element("th", "mono");
  from.scope = "row";
  row.append(from);
  cells(row, ["mono", "share-col", "n", "n", "n"]);
  const bar = element("span", "pool");
  bar.setAttribute("aria-hidden", "true");
  bar.append(element("span", "relayed"));
  row.cells[2].append(bar);
  return row;
}
