// How values are written, and how rows of a table follow their data without being made anew.

export const NONE = "–";
const whole = new Intl.NumberFormat("en");

export const count = (value) => (value == null ? NONE : whole.format(value));

export function duration(ms) {
  if (ms == null) return NONE;
  if (ms < 0.9995) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 9.995) return `${ms.toFixed(2)} ms`;
  if (ms < 99.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${ms.toFixed(0)} ms`;
  if (ms < 99_950) return `${(ms / 1000).toFixed(2)} s`;
  return `${whole.format(Math.round(ms / 1000))} s`;
}

export function rate(value) {
  if (value == null) return NONE;
  return value < 99.95 ? value.toFixed(1) : whole.format(Math.round(value));
}

export function bytes(value) {
  if (value == null) return NONE;
  let unit = 0;
  while (value >= 1000 && unit < 4) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : 1;
  return `${value.toFixed(digits)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const time = (ms) => clock.format(new Date(ms));

// Everything that came from somewhere goes through here: as text, never as markup.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// One row for each item, in order; a row that is there already is kept, and moved only if it must.
export function follow(body, items, keyOf, make, fill) {
  const wanted = new Set(items.map(keyOf));
  const rows = new Map();
  for (const row of [...body.rows]) {
    if (wanted.has(row.dataset.key)) rows.set(row.dataset.key, row);
    else row.remove();
  }
  items.forEach((item, at) => {
    const key = keyOf(item);
    let row = rows.get(key);
    if (!row) {
      row = make(item);
      row.dataset.key = key;
    }
    fill(row, item);
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
  });
}

export function cells(row, classes) {
  for (const name of classes) row.append(element("td", name));
  return row;
}
