// One request's spans as bars on one axis, a lane for each part; and the same as a table.

import { count, duration, element, put, rate, NONE } from "./show.js";
import { kindOf, stateOf } from "./requests.js";

const KINDS = [
  [/exposed/, "exposed"],
  [/queue|wait|admission|assign|route|gateway|reserve/, "wait"],
  [/transfer|relay|receive|publish|hand/, "transfer"],
  [/first token/, "wait"],
  [/prefill|compute|prompt/, "compute"],
  [/decode|generate|stream|detoken|writ/, "decode"],
];

// What is not known by its name is a piece of what it is in.
const kind = (span, spans, deep = 0) => {
  if (span.parent === null) return "whole";
  if (span.attributes["kvrelay.exposed"] === true) return "exposed";
  const known = KINDS.find(([pattern]) => pattern.test(span.name))?.[1];
  if (known) return known;
  const within = deep < 6 && spans[span.parent];
  return within && within.parent !== null ? kind(within, spans, deep + 1) : "other";
};

const depth = (spans, at) => {
  let deep = 0;
  for (let up = spans[at].parent; up !== null && spans[up] && deep < 6; up = spans[up].parent) deep += 1;
  return deep;
};

// The parts in the order in which they begin, each with its spans by time.
export function lanes(spans) {
  const found = new Map();
  spans.forEach((span, at) => {
    if (!found.has(span.part)) found.set(span.part, []);
    found.get(span.part).push({ ...span, kind: kind(span, spans), deep: depth(spans, at) });
  });
  for (const lane of found.values()) {
    const top = Math.min(...lane.map((span) => span.deep));
    lane.forEach((span) => (span.deep -= top));
    lane.sort((a, b) => a.start_ms - b.start_ms || a.deep - b.deep);
  }
  return [...found].sort(([, a], [, b]) => a[0].start_ms - b[0].start_ms);
}

export function exposedMs(request) {
  const found = request.spans.filter((span) => kind(span, request.spans) === "exposed");
  if (!found.length) return null;
  return found.reduce((sum, span) => sum + (span.end_ms ?? span.start_ms) - span.start_ms, 0);
}

function ticks(length) {
  const rough = length / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(length / step) + 1 }, (_, at) => at * step);
}

const percent = (share) => `${(100 * share).toFixed(3)}%`;

function axisLabel(ms, length) {
  if (length < 1000) return `${+ms.toPrecision(4)} ms`;
  return `${+(ms / 1000).toPrecision(4)} s`;
}

export class Waterfall {
  constructor(root) {
    const part = (id) => root.querySelector(`#${id}`);
    this.parts = { id: part("detail-id"), none: part("no-detail"), chosen: part("chosen"), facts: part("facts"), why: part("why"), bars: part("bars"), spans: part("spans") };
    this.switches = { zoom: part("zoom"), view: part("view") };
    this.zoom = "first";
    this.view = "bars";
    this.request = null;
    for (const name of ["zoom", "view"]) {
      this.switches[name].addEventListener("click", (event) => {
        const chosen = event.target.dataset[name];
        if (!chosen) return;
        this[name] = chosen;
        for (const button of this.switches[name].children) {
          button.setAttribute("aria-pressed", String(button.dataset[name] === chosen));
        }
        this.draw();
      });
    }
  }

  clear(text) {
    this.request = null;
    put(this.parts.none, text);
    this.parts.none.hidden = false;
    this.parts.chosen.hidden = true;
    this.switches.zoom.hidden = this.switches.view.hidden = true;
    put(this.parts.id, "");
  }

  show(request) {
    this.request = request;
    this.parts.none.hidden = true;
    this.parts.chosen.hidden = false;
    this.switches.view.hidden = false;
    put(this.parts.id, request.id);
    this.draw();
  }

  draw() {
    if (!this.request) return;
    this.drawFacts();
    put(this.parts.why, this.request.why);
    this.parts.why.hidden = !this.request.why;
    this.drawBars();
    this.drawTable();
    this.parts.bars.hidden = this.view !== "bars";
    this.parts.bars.nextElementSibling.hidden = this.view !== "bars";
    this.parts.spans.classList.toggle("sr", this.view !== "table");
  }

  drawFacts() {
    const request = this.request;
    const exposed = exposedMs(request);
    const writing = request.duration_ms - request.ttft_ms;
    const speed = request.ttft_ms !== null && request.output_tokens > 1 && writing > 0 ? ((request.output_tokens - 1) / writing) * 1000 : null;
    const facts = [
      ["State", stateOf(request)],
      ["First token", duration(request.ttft_ms)],
      ["Exposed", duration(exposed)],
      ["Duration", duration(request.duration_ms)],
      ["Speed", speed === null ? NONE : `${rate(speed)} tok/s`],
      ["Prompt", `${count(request.prompt_tokens)} tok`],
      ["Cached", `${count(request.cached_tokens)} tok`],
      ["Output", `${count(request.output_tokens)} tok`],
      ["Route", request.route ?? NONE],
      ["Attempts", count(request.attempts)],
      ["Trace", request.trace_id || NONE],
    ];
    const list = this.parts.facts;
    if (!list.children.length) {
      for (const [name] of facts) {
        const pair = element("div");
        pair.append(element("dt", "", name), element("dd"));
        list.append(pair);
      }
    }
    facts.forEach(([, value], at) => put(list.children[at].lastChild, value));
    list.children[0].lastChild.className = `s-${kindOf(request)}`;
  }

  window() {
    const request = this.request;
    const end = Math.max(request.duration_ms ?? 0, ...request.spans.map((span) => span.end_ms ?? span.start_ms), 0.001);
    const first = request.ttft_ms;
    const useful = first !== null && end > 2 * first;
    this.switches.zoom.hidden = !useful;
    return useful && this.zoom === "first" ? first * 1.12 : end * 1.01;
  }

  drawBars() {
    const length = this.window();
    const plot = document.createDocumentFragment();
    const axis = element("div", "axis");
    const scale = element("div", "scale");
    for (const at of ticks(length)) {
      const mark = element("span", "tick", axisLabel(at, length));
      mark.style.left = percent(at / length);
      scale.append(mark);
    }
    axis.append(element("span", "name"), scale, element("span", "lasts"));
    plot.append(axis);
    for (const [part, spans] of lanes(this.request.spans)) {
      plot.append(element("div", "lane", part));
      for (const span of spans) plot.append(this.bar(span, length));
    }
    const first = this.request.ttft_ms;
    this.parts.bars.replaceChildren(plot);
    if (first !== null && first <= length) {
      const rail = element("div", "rail");
      const mark = element("div", "first");
      mark.style.left = percent(first / length);
      mark.append(element("span", "flag", `first token ${duration(first)}`));
      if (first / length > 0.6) mark.classList.add("leftward");
      rail.append(mark);
      this.parts.bars.append(rail);
    }
    this.parts.bars.setAttribute("aria-label", `Timeline of ${this.request.spans.length} spans, first token after ${duration(first)}. The same is in the table that follows.`);
  }

  bar(span, length) {
    const end = span.end_ms ?? this.request.duration_ms ?? length;
    const row = element("div", `bar k-${span.kind}${span.deep > 1 ? " piece" : ""}`);
    const name = element("span", "name", span.name);
    name.style.paddingLeft = `${span.deep * 12}px`;
    name.title = span.name;
    const track = element("span", "track");
    if (span.start_ms <= length) {
      const fill = element("span", span.end_ms === null ? "fill open" : "fill");
      const begin = Math.max(span.start_ms, 0);
      fill.style.left = percent(begin / length);
      fill.style.width = percent(Math.max(Math.min(end, length) - begin, 0) / length);
      track.append(fill);
    } else {
      track.append(element("span", "later", "later →"));
    }
    row.append(name, track, element("span", "lasts", span.end_ms === null ? "…" : duration(end - span.start_ms)));
    row.title = notes(span);
    return row;
  }

  drawTable() {
    const rows = lanes(this.request.spans).flatMap(([part, spans]) =>
      spans.map((span) => {
        const row = element("tr");
        const head = element("th", "", part);
        head.scope = "row";
        const exposed = span.kind === "exposed" && !/exposed/.test(span.name) ? " (exposed)" : "";
        row.append(
          head,
          element("td", "", span.name + exposed),
          element("td", "n", duration(span.start_ms)),
          element("td", "n", span.end_ms === null ? "lasts" : duration(span.end_ms - span.start_ms)),
          element("td", "notes", notes(span)),
        );
        return row;
      }),
    );
    if (this.request.spans_left_out) {
      const row = element("tr");
      const cell = element("td", "", `${count(this.request.spans_left_out)} more spans are not shown`);
      cell.colSpan = 5;
      row.append(cell);
      rows.push(row);
    }
    this.parts.spans.tBodies[0].replaceChildren(...rows);
  }
}

const notes = (span) =>
  Object.entries(span.attributes)
    .map(([name, value]) => `${name.replace(/^(kvrelay|gen_ai)\./, "")} ${typeof value === "number" && !Number.isInteger(value) ? +value.toPrecision(4) : value}`)
    .join(", ");
