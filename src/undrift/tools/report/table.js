"use strict";
// The table: what the chosen data say, what it took to reach a target, and what it cost.

const COSTS = { round: ["rounds", (x) => x.toLocaleString("en", { maximumFractionDigits: 1 })], steps: ["SGD steps", (x) => Math.round(x).toLocaleString("en")],
  bytes: ["bytes", (x) => `${+x.toPrecision(3)}`.length > 6 || x >= 1000 ? sized(x) : `${x} B`], seconds: ["seconds", (x) => `${+x.toPrecision(3)}`] };
const sized = (x) => { const k = Math.min(4, Math.floor(Math.log10(Math.max(x, 1)) / 3)); return `${+(x / 1000 ** k).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB"][k]}`; };
const targetKey = () => `${chosen.source}.${payload.metrics[0]}`;

// A round number that at least half of the runs reach; none if lower values are better in some runs, and higher ones in others.
function easy(key) {
  const own = payload.runs.flatMap((run) => run.records[key] ?? []), { lower } = own[0] ?? {};
  if (!own.length || own.some((one) => one.lower !== lower)) return null;
  const ends = own.map((one) => one.value.at(-1)).sort((a, b) => (lower ? a - b : b - a));
  const middle = ends[Math.ceil(ends.length / 2) - 1];
  if (!middle) return null;
  const unit = 10 ** (Math.floor(Math.log10(Math.abs(middle))) - 1) * 5;
  return +((lower ? Math.ceil(middle / unit) : Math.floor(middle / unit)) * unit).toPrecision(6);
}
// Mean ± standard deviation, over the group’s runs that reach the target, of what it took.
function reached(group, key, target) {
  const [, format] = COSTS[chosen.axis];
  const found = group.runs.flatMap((r) => {
    const own = payload.runs[r].records[key], at = own ? own.value.findIndex((v) => (own.lower ? v <= target : v >= target)) : -1;
    return at < 0 ? [] : [own[chosen.axis][at]];
  });
  if (!found.length) return "–";
  const middle = mean(found), of = found.length < group.runs.length ? ` (${found.length} of ${group.runs.length})` : "";
  const deviation = found.length > 1 ? ` ± ${format(Math.sqrt(found.reduce((sum, x) => sum + (x - middle) ** 2, 0) / (found.length - 1)))}` : "";
  return `${format(middle)}${deviation}${of}`;
}
function summary() {
  const key = targetKey(), one = payload.groups.length === 1, metric = payload.metrics[0];
  chosen.target.set(key, chosen.target.get(key) ?? easy(key)); // which stays while a run goes on
  const target = chosen.target.get(key);
  const column = target === null || !metric ? null : `${COSTS[chosen.axis][0]} to ${target}`;
  const settled = payload.groups.every((group) => group.cells.state === "finished"); // as the header says
  const rows = payload.groups.map((group) => {
    const { runs, state, ...rest } = group.cells, costs = Object.entries(rest).filter(([name]) => !/^(last|best) /.test(name));
    const more = column && group.runs.some((r) => payload.runs[r].records[key]) ? { [column]: reached(group, key, target) } : {};
    return { runs, ...(settled ? {} : { state }), ...(group.figures[chosen.source] || {}), ...more, ...Object.fromEntries(costs) };
  });
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))], parts = [];
  if (one) {
    const cells = Object.entries(rows[0]).filter(([name, value]) => name !== "state" && !(name === "runs" && value === "1"));
    parts.push(el("div", { class: "tiles" }, ...cells.map(([name, value]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name)))));
  } else {
    const lines = payload.groups.map((group, i) => el("tr", {}, el("td", {}, swatch(i), group.name), ...columns.map((name) => el("td", { "data-label": name }, rows[i][name] ?? "–"))));
    parts.push(el("div", { class: "card scroll stacked" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, ""), ...columns.map((name) => el("th", {}, name)))), el("tbody", {}, ...lines))));
  }
  if (columns.some((name) => /^(last|best) /.test(name))) {
    const best = columns.some((name) => name.startsWith("best ")) ? " “Best” is the best value of any round. Because the round is picked on the same data, it is optimistic." : "";
    const ask = column && el("label", { class: "target" }, `What it took to reach ${word(metric)} of `, el("input", { id: "target", type: "number", step: "any", value: target,
      onchange: (event) => { const given = parseFloat(event.target.value); if (Number.isFinite(given)) chosen.target.set(key, given); else chosen.target.delete(key); summary(); } }));
    parts.push(el("p", { class: "about under" }, `Measured on ${SOURCES[chosen.source]}.${best} `, ask || ""));
  }
  byId("summary").replaceChildren(...parts);
}
