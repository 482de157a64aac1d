// The list of requests: newest first, moved through with the arrow keys.

import { cells, count, duration, element, follow, put, time, NONE } from "./show.js";

const WORDS = {
  ok: "finished",
  cancelled: "cancelled",
  bad_request: "bad request",
  token_conflict: "conflict",
};

export const stateOf = (request) => {
  if (request.outcome === null) return request.ttft_ms === null ? "waiting" : "writing";
  return WORDS[request.outcome] ?? request.outcome;
};

export const kindOf = (request) => {
  if (request.outcome === null) return request.ttft_ms === null ? "waiting" : "running";
  if (request.outcome === "ok") return "done";
  return request.outcome === "cancelled" ? "left" : "failed";
};

export class RequestList {
  constructor(table, choose) {
    this.table = table;
    this.body = table.tBodies[0];
    this.choose = choose;
    this.chosen = "";
    this.current = "";
    this.body.addEventListener("click", (event) => this.clicked(event));
    this.body.addEventListener("keydown", (event) => this.pressed(event));
    this.body.addEventListener("focusin", (event) => this.enter(event.target.closest("tr")));
    table.addEventListener("focus", () => this.currentRow()?.focus());
  }

  show(requests) {
    const focused = this.body.contains(document.activeElement);
    follow(this.body, requests, (request) => request.id, (request) => this.make(request), (row, request) => this.fill(row, request));
    if (!this.currentRow() && this.body.rows.length) this.enter(this.body.rows[0]);
    if (focused && !this.body.contains(document.activeElement)) this.currentRow()?.focus();
  }

  make() {
    const row = element("tr");
    row.tabIndex = -1;
    const state = element("td", "state");
    state.append(element("span", "dot"), element("span", "words"));
    row.append(state);
    return cells(row, ["t", "mono id", "", "n", "n", "n", "n", "n"]);
  }

  fill(row, request) {
    const [state, received, id, route, ...numbers] = row.cells;
    row.setAttribute("aria-selected", String(request.id === this.chosen));
    state.className = `state s-${kindOf(request)}`;
    put(state.lastChild, stateOf(request));
    put(received, time(request.received_ms));
    put(id, request.id);
    id.title = request.id;
    put(route, request.route === null ? NONE : request.attempts > 1 ? `${request.route} ×${request.attempts}` : request.route);
    const texts = [
      count(request.prompt_tokens),
      count(request.cached_tokens),
      count(request.output_tokens),
      duration(request.ttft_ms),
      duration(request.duration_ms),
    ];
    texts.forEach((text, at) => put(numbers[at], text));
  }

  currentRow() {
    return [...this.body.rows].find((row) => row.dataset.key === this.current);
  }

  enter(row) {
    if (!row) return;
    const before = this.currentRow();
    if (before) before.tabIndex = -1;
    this.current = row.dataset.key;
    row.tabIndex = 0;
  }

  clicked(event) {
    const row = event.target.closest("tr");
    if (!row || String(getSelection())) return;
    row.focus();
    this.select(row);
  }

  select(row) {
    this.chosen = row.dataset.key;
    for (const each of this.body.rows) each.setAttribute("aria-selected", String(each === row));
    this.choose(this.chosen);
  }

  pressed(event) {
    const row = event.target.closest("tr");
    const rows = [...this.body.rows];
    const at = rows.indexOf(row);
    const page = 10;
    const to = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: rows.length - 1,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      rows[Math.max(0, Math.min(to, rows.length - 1))].focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.select(row);
    }
  }
}
