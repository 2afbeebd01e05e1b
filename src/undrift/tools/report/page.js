// The page's state: the data, and the reader's choices, which new data of a live run do not change.
let payload = JSON.parse(document.getElementById("data").textContent);
const chosen = { axis: "round", source: "test", run: 0, hidden: new Set(), log: new Map(), look: null, target: new Map() };

const AXES = {
  round: { label: "round", title: "round", format: ",d" },
  steps: { label: "SGD steps", title: "SGD steps taken by all clients", format: "~s" },
  bytes: { label: "bytes", title: "bytes sent, both ways", format: "~s", suffix: "B" },
  seconds: { label: "seconds", title: "seconds of training", format: "~r", suffix: " s" },
};
const SOURCES = {
  test: "the test set", validation: "validation data", client: "clients’ own data: mean",
  client_worst: "clients’ own data: worst tenth", client_std: "clients’ own data: deviation between clients",
  tuned: "clients, one more epoch: mean", tuned_worst: "clients, one more epoch: worst tenth",
  tuned_std: "clients, one more epoch: deviation between clients",
};
// Colours for colour-blind readers, one set per theme; from the ninth curve on, lines are dashed.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b84f8d", "#9a7400", "#3aa0dc", "#6a4c93", "#5a6068"],
  dark: ["#4da6e0", "#ff8a4c", "#2fc79a", "#ea9cc8", "#f0c14b", "#9bd8ff", "#b79ceb", "#b8bfc8"],
};
const SCALES = {
  light: [[0, "#ffffff"], [0.02, "#eaf3fa"], [0.35, "#8fc1e3"], [0.7, "#2f7fb8"], [1, "#08365c"]],
  dark: [[0, "#181c22"], [0.02, "#1d2a36"], [0.35, "#245a85"], [0.7, "#4da6e0"], [1, "#e3f3ff"]],
};
const DASHES = ["solid", "dash", "dot", "dashdot"];
const NAMES = {
  ...payload.labels, diagnostic: "diagnostic S", decays: "decays so far, d",
  rates: "learning rate of the first local steps", ratio: "ratio μ by layer", temperature: "temperature T by layer",
};

// ---- small helpers

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const byId = (id) => document.getElementById(id);
// Plotly interprets some HTML in texts, so names are escaped.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const word = (name) => NAMES[name] || name.replaceAll("_", " ");
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
const look = () => chosen.look || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colour = (i) => COLOURS[look()][i % 8];
const dash = (i) => DASHES[Math.floor(i / 8) % 4];
const clear = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
const shown = () => payload.groups.map((group, i) => ({ group, i })).filter(({ group }) => !chosen.hidden.has(group.name));
const swatch = (i) => el("span", { class: "swatch", style: `border-color:${colour(i)};border-top-style:${["solid", "dashed", "dotted", "dashed"][Math.floor(i / 8) % 4]}` });
const groupOf = (run) => payload.groups.findIndex((group) => group.runs.includes(run));
// If the chosen run lacks something, show it of the first run that has it.
const holder = (has) => (has(payload.runs[chosen.run]) ? chosen.run : payload.runs.findIndex(has));
const label = (run) => {
  const group = payload.groups[groupOf(run)], { seed, folder } = payload.runs[run];
  return group.runs.length > 1 ? `${group.name} · seed ${seed ?? folder}` : group.name;
};

// ---- traces and axes

function line(x, curve, name, i, shade = colour(i)) {
  const at = curve.mean.map((y, k) => k).filter((k) => curve.mean[k] !== null && x[k] !== null);
  const pick = (values) => at.map((k) => values[k]);
  const xs = pick(x), found = [], clearly = shown().length <= 10; // more bands than that hide one another
  const { floor = -Infinity, ceiling = Infinity } = curve; // what no value of a metric can be below or above
  const low = clearly && (curve.low || (curve.std && curve.mean.map((y, k) => Math.max(floor, y - curve.std[k]))));
  const high = curve.high || (curve.std && curve.mean.map((y, k) => Math.min(ceiling, y + curve.std[k])));
  if (low) {
    const edge = { x: xs, mode: "lines", line: { width: 0, shape: curve.shape }, hoverinfo: "skip", type: "scatter" };
    if (curve.low) edge.line = { width: 1, dash: "dot", color: clear(shade, 0.7) };
    found.push({ ...edge, y: pick(low) }, { ...edge, y: pick(high), fill: "tonexty", fillcolor: clear(shade, curve.low ? 0.07 : 0.16) });
  }
  found.push({
    x: xs, y: pick(curve.mean), name: plain(name), type: "scatter", mode: at.length < 13 ? "lines+markers" : "lines",
    line: { color: shade, width: payload.groups.length > 8 ? 1.3 : 2, dash: dash(i), shape: curve.shape }, marker: { size: 6, color: shade },
    customdata: curve.std ? pick(curve.std) : undefined,
    hovertemplate: curve.std ? "%{y:.4~g} ± %{customdata:.2~g}" : "%{y:.4~g}",
  });
  return found;
}

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 8, font: { color: ink("soft"), size: 12 } }, gridcolor: ink("line"), zeroline: false,
    linecolor: ink("line"), tickcolor: ink("line"), tickfont: { color: ink("soft") }, ...more,
  };
}
const over = () => {
  const { title, format, suffix } = AXES[chosen.axis], few = chosen.axis === "round" && Math.max(...payload.runs.map((run) => run.rounds)) <= 6;
  return axis(title, { tickformat: format, ticksuffix: suffix, nticks: 7, dtick: few ? 1 : undefined, hoverformat: chosen.axis === "round" ? ",d" : ".4~s" });
};
function layout(x, y, more = {}) {
  return {
    xaxis: x, yaxis: y, showlegend: false, margin: { l: 58, r: 24, t: 10, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", font: { family: "inherit", size: 12, color: ink("ink") },
    hovermode: payload.groups.length > 8 ? "closest" : "x unified", hoverlabel: {
      bgcolor: ink("card"), bordercolor: ink("line"), font: { color: ink("ink") }, namelength: 44 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", uirevision: chosen.axis, ...more,
  };
}
const scale = (title) => ({
  title: { text: title, side: "right", font: { size: 12, color: ink("soft") } }, thickness: 10, outlinewidth: 0,
  tickfont: { color: ink("soft") }, nticks: 6,
});

// ---- the list of charts

function declared() {
  const found = [], whose = (run) => (payload.runs.length > 1 ? label(run) : "");
  const add = (section, key, title, make, more = {}) => found.push({ section, key, title, make, ...more });
  const lines = (where, key, y, more = {}) => () => ({
    traces: alike(where, key).flatMap(({ x, curve, names, i, all }) =>
      line(x, { ...curve, ...more }, names.length > 1 ? `${all ? "all" : names.length} alike` : names[0], i, all ? ink("soft") : colour(i))),
    layout: layout(over(), axis(y, chosen.log.get(key) ? { type: "log", exponentformat: "power" } : more.shape ? { rangemode: "tozero", minallowed: 0, nticks: 6, tickformat: ",d", dtick: most("decays") <= 6 ? 1 : undefined } : { range: more.range || constant(where, key) })),
  });
  const any = (where, key) => payload.groups.some((group) => group[where][key]);

  for (const metric of payload.metrics) {
    const key = `${chosen.source}.${metric}`, several = payload.groups.some((g) => g.runs.length > 1);
    if (any("curves", key)) {
      if (metric === "loss" && !chosen.log.has(key)) chosen.log.set(key, steep(key));
      add("learning", `metric ${metric}`, capital(word(metric)), lines("curves", key, word(metric), bounds(metric)),
        { note: `on ${SOURCES[chosen.source]}${several ? "; mean ± standard deviation over seeds" : ""}`, log: metric === "loss" && key });
    }
  }
  if (payload.runs.some((r) => r.classes)) {
    add("classes", "classes last", "At the last evaluation", lastByClass, { note: "by class" });
    const run = holder((r) => r.classes);
    add("classes", "classes rounds", "As training went", () => byClass(run), { note: whose(run) });
  }
  if (payload.runs.some((r) => r.clients)) {
    add("clients", "clients sorted", "From the worst client to the best", sortedClients, { note: "at the last round" });
    const run = holder((r) => r.clients);
    add("clients", "clients each", "Client by client", () => eachClient(run), { note: whose(run) });
  }
  for (const [key, more] of [["lr", {}], ["local_steps", {}]]) {
    if (any("schedules", key)) add("schedules", key, capital(word(key)), lines("schedules", key, word(key), more),
      { note: key === "local_steps" ? `mean of the round’s clients${payload.groups.some((g) => g.runs.length > 1) ? " and of the seeds" : ""}, and from the fewest to the most of any` : "the values used in each round, before the method scales them" });
  }
  const layer = (section, key, y, name) => {
    const run = holder((r) => r.layers[key]), { lines } = payload.runs[run].layers[key];
    add(section, key, capital(word(key)), () => layered(run, key, y, name), { note: whose(run), keys: lines.map((own, k) => [name(own), tint(k, lines.length)]) });
  };
  const keys = [...new Set(payload.runs.flatMap((run) => Object.keys(run.layers)))].filter((key) => key !== "layer_agreement");
  drift(add, lines, any, whose);
  if (keys.includes("rates")) layer("schedules", "rates", "learning rate", (k) => `step ${+k + 1}`);
  if (any("schedules", "diagnostic")) add("decay", "diagnostic", "Diagnostic S", lines("schedules", "diagnostic", "S = Σ ⟨update, previous update⟩"), { note: "below 0 after the window counts a decay" });
  if (any("schedules", "decays")) add("decay", "decays", "Decays so far, d", lines("schedules", "decays", "decays", { shape: "hv" }));
  for (const key of keys.filter((k) => k !== "rates")) {
    layer("parts", key, word(key).split(" ")[0], (k) => (key === "ratio" || key === "temperature" ? `layer ${k}` : k));
  }
  const others = new Set(payload.groups.flatMap((group) => Object.keys(group.schedules)));
  for (const key of others) if (!drifts(key) && !["lr", "local_steps", "diagnostic", "decays"].includes(key)) add("parts", `other ${key}`, capital(word(key)), lines("schedules", key, word(key)));
  const owner = holder((r) => r.partition !== undefined);
  if (owner >= 0) {
    const { counts } = payload.partitions[payload.runs[owner].partition];
    add("data", "partition", counts ? "Samples by client and class" : "Samples by client", () => held(owner), { note: whose(owner), wide: true });
  }
  return found;
}
const SECTIONS = {
  learning: ["Learning", null],
  classes: ["Classes", "Accuracy on the test set’s samples of each class."],
  clients: ["Clients", "The global model on each client’s own held-out data."],
  drift: ["Drift", "How far clients move, and whether they move the same way. Agreement is the length of the mean update divided by the updates’ mean length: 1 if all are the same, near 0 if they cancel out."],
  schedules: ["Schedules", "Learning rates and local steps by round."],
  decay: ["Decay by diagnostic", "Pflug’s diagnostic sums the inner products of successive rounds’ updates; when it turns negative, training has become stationary."],
  parts: ["What the method measured", null],
  data: ["Data", null],
};

// Identical curves, as schedules often are, are drawn as one, since the last would hide the others.
function alike(where, key) {
  const grid = where === "curves" ? "evaluated" : "every", found = new Map(), present = shown().filter(({ group }) => group[where][key]);
  for (const { group, i } of present) {
    const x = group[grid][chosen.axis], curve = group[where][key], same = where === "curves" ? i : JSON.stringify([x, curve]);
    if (found.has(same)) found.get(same).names.push(group.name);
    else found.set(same, { x, curve, i, names: [group.name] });
  }
  return [...found.values()].map((one) => ({ ...one, all: one.names.length > 1 && one.names.length === present.length }));
}
const most = (key) => Math.max(0, ...payload.groups.flatMap((group) => group.schedules[key]?.mean || []));
// The range of an axis whose values are all the same, which Plotly would put between v − 1 and v + 1.
function constant(where, key) {
  const all = shown().flatMap(({ group }) => { const c = group[where][key]; return c ? [...(c.low || c.mean), ...(c.high || c.mean)] : []; }).filter((y) => y !== null);
  const first = all[0], varies = shown().some(({ group }) => group[where][key]?.std);
  return all.length && !varies && all.every((y) => y === first) ? (first ? [Math.min(0, 2 * first), Math.max(0, 2 * first)] : [0, 1]) : undefined;
}
// Where a band of a standard deviation must end: metrics that are never negative, and fractions.
function bounds(metric) {
  const all = payload.groups.flatMap((group) => group.curves[`${chosen.source}.${metric}`]?.mean || []).filter((y) => y !== null);
  const fraction = /accuracy|recall|precision|f1|auroc/.test(metric) && all.every((y) => y <= 1);
  return { floor: all.every((y) => y >= 0) ? 0 : undefined, ceiling: fraction ? 1 : undefined };
}
// A loss that spans orders of magnitude, for example of a diverging run, starts on a logarithmic axis.
function steep(key) {
  const all = payload.groups.flatMap((group) => (group.curves[key] ? group.curves[key].mean : [])).filter((y) => y !== null && y > 0);
  return all.length > 1 && Math.max(...all) > 200 * Math.min(...all);
}
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

function classNames(run) {
  const partition = payload.partitions[payload.runs[run].partition], count = payload.runs[run].classes.accuracy[0].length;
  return partition && partition.classes && partition.classes.length === count ? partition.classes : [...Array(count).keys()].map(String);
}
function lastByClass() {
  const rows = shown().flatMap(({ group, i }) => {
    const own = group.runs.filter((r) => payload.runs[r].classes), ends = own.map((r) => payload.runs[r].classes.accuracy.at(-1));
    if (!own.length) return [];
    const names = classNames(own[0]).map(plain);
    return [{ group, i, names, y: names.map((_, c) => mean(ends.map((end) => end[c]).filter((v) => v !== null && v !== undefined))) }];
  });
  if (rows.length > 8) { // more dots could not be told apart
    const trace = { type: "heatmap", x: rows[0].names, y: rows.map((_, k) => k), z: rows.map((row) => row.y), customdata: rows.map((row) => row.names.map(() => plain(row.group.name))), ygap: 1,
      zmin: 0, zmax: 1, colorscale: SCALES[look()], colorbar: scale("accuracy"), hovertemplate: "%{customdata}<br>class %{x}<br>accuracy %{z:.3f}<extra></extra>" };
    const y = axis("", { autorange: "reversed", tickvals: rows.map((_, k) => k), ticktext: rows.map((row) => plain(cut(row.group.name, innerWidth < 640 ? 12 : 22))), showgrid: false, tickfont: { size: 10, color: ink("soft") } });
    return { traces: [trace], layout: layout(axis("class", { type: "category" }), y, { hovermode: "closest", margin: { l: innerWidth < 640 ? 84 : 144, r: 24, t: 10, b: 46 } }) };
  }
  const traces = rows.map(({ group, i, names, y }) => ({ x: names, y, name: plain(group.name), type: "scatter", mode: names.length > 30 ? "markers" : "lines+markers",
    line: { color: clear(colour(i), 0.35), width: 1, dash: dash(i) }, hovertemplate: "%{y:.4~g}", marker: { color: colour(i), size: 9 } }));
  return { traces, layout: layout(axis("class", { type: "category", automargin: true }), axis("accuracy", { range: [-0.03, 1.03] })) };
}
function byClass(run) {
  const { axes, accuracy } = payload.runs[run].classes, names = classNames(run).map(plain);
  const trace = {
    type: "heatmap", x: axes[chosen.axis], y: names, z: names.map((_, c) => accuracy.map((row) => row[c])), zmin: 0, zmax: 1,
    colorscale: SCALES[look()], colorbar: scale("accuracy"), hovertemplate: "class %{y}<br>%{x}<br>accuracy %{z:.3f}<extra></extra>",
  };
  return { traces: [trace], layout: layout(over(), axis("class", { type: "category", autorange: "reversed", automargin: true }), { hovermode: "closest" }) };
}
function quantiles(values) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b), count = Math.min(sorted.length, 101);
  return [...Array(count).keys()].map((k) => {
    const at = count > 1 ? (k / (count - 1)) * (sorted.length - 1) : 0, below = Math.floor(at);
    return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
  });
}
function sortedClients() {
  let metric = "accuracy";
  const traces = shown().flatMap(({ group, i }) => {
    const own = group.runs.map((r) => payload.runs[r].clients).filter(Boolean);
    if (!own.length) return [];
    metric = own[0].metric;
    const each = own.map((clients) => quantiles(clients.values)), count = Math.min(...each.map((q) => q.length));
    const at = (q, k) => q[count > 1 ? Math.round((k / (count - 1)) * (q.length - 1)) : 0];
    const ks = [...Array(count).keys()];
    return [{ x: ks.map((k) => (count > 1 ? (100 * k) / (count - 1) : 0)), y: ks.map((k) => mean(each.map((q) => at(q, k)))), name: plain(group.name),
      type: "scatter", mode: count < 13 ? "lines+markers" : "lines", line: { color: colour(i), width: 2, dash: dash(i) }, hovertemplate: "%{y:.4~g}" }];
  });
  return { traces, layout: layout(axis("share of clients, worst first", { ticksuffix: "%" }), axis(word(metric))) };
}
function eachClient(run) {
  const { who, values, metric, of } = payload.runs[run].clients, i = groupOf(run);
  const trace = { type: "bar", x: who.map(plain), y: values, marker: { color: colour(i) }, hovertemplate: `client %{x}<br>${word(metric)} %{y:.4~g}<extra></extra>` };
  const partition = payload.partitions[payload.runs[run].partition], all = partition ? partition.clients - partition.empty : of;
  const title = who.length < of ? `${who.length} of ${of} clients, worst first` : of < all ? `client (without held-out data: ${all - of} of ${all})` : "client";
  return { traces: [trace], layout: layout(axis(title, { type: "category", automargin: true, nticks: innerWidth < 640 ? 10 : 20, showticklabels: who.length <= 60 }), axis(word(metric)), { hovermode: "closest", bargap: 0.15 }) };
}
const tint = (k, count) => (count <= 8 ? colour(k) : `hsl(${205 + (150 * k) / (count - 1)} 65% ${look() === "dark" ? 40 + (40 * k) / count : 25 + (40 * k) / count}%)`);
function layered(run, key, title, name) {
  const { layers, axes } = payload.runs[run], { lines, values } = layers[key], x = axes[chosen.axis];
  const traces = lines.map((own, k) => ({ x, y: values[k], name: plain(name(own)), type: "scatter", mode: x.length < 13 ? "lines+markers" : "lines",
    line: { color: tint(k, lines.length), width: 2 }, hovertemplate: "%{y:.4~g}" }));
  return { traces, layout: layout(over(), axis(title)) };
}
function held(run) {
  const { counts, classes, sizes, listed, names, clients } = payload.partitions[payload.runs[run].partition];
  const who = listed.map((c, k) => plain(names ? `${names[k]} (${c})` : c)), x = [...who.keys()];
  const title = listed.length < clients ? `${listed.length} of ${clients.toLocaleString("en")} clients, in even steps from largest to smallest` : "client";
  const ticks = x.filter((k) => k % Math.ceil(x.length / (innerWidth < 640 ? 10 : 30)) === 0);
  const below = { ...axis(title), tickvals: listed.length < clients ? [] : ticks, ticktext: ticks.map((k) => plain(names ? cut(String(names[k]), 12) : listed[k])), automargin: true, range: [-0.5, x.length - 0.5], showgrid: false };
  const bars = { type: "bar", x, y: sizes, customdata: who, marker: { color: ink("soft") }, yaxis: counts ? "y2" : "y", hovertemplate: "client %{customdata}<br>%{y:,} samples<extra></extra>" };
  const more = { hovermode: "closest", bargap: 0.2, uirevision: "data" };
  if (!counts) return { traces: [bars], layout: layout(below, axis("samples"), more) };
  const map = {
    type: "heatmap", x, y: classes.map(plain), z: classes.map((_, c) => counts.map((row) => row[c])), customdata: classes.map(() => who), xgap: x.length > 80 ? 0 : 1, ygap: classes.length > 40 ? 0 : 1,
    colorscale: SCALES[look()], zmin: 0, colorbar: { ...scale("samples"), len: 0.72, y: 0.36 }, hovertemplate: "client %{customdata}<br>class %{y}<br>%{z:,} samples<extra></extra>",
  };
  return { traces: [map, bars], layout: layout(below, axis("class", { type: "category", autorange: "reversed", automargin: true, domain: [0, 0.74], showgrid: false }),
    { ...more, yaxis2: axis("samples", { domain: [0.8, 1], anchor: "x", nticks: 3 }) }) };
}

// ---- text: header, table, legend, settings

function header() {
  byId("title").textContent = payload.title;
  byId("subtitle").textContent = payload.subtitle;
  const runs = payload.runs, open = runs.filter((run) => !run.finished), lost = runs.filter((run) => run.mark);
  const done = runs.reduce((sum, run) => sum + run.rounds, 0), planned = runs.reduce((sum, run) => sum + (run.planned || run.rounds), 0);
  const first = runs[0].state, count = runs.length.toLocaleString("en");
  let said = runs.length === 1 ? (runs[0].finished ? `Finished after ${done.toLocaleString("en")} rounds` : done ? `Not finished: ${first}` : "No round finished yet")
    : open.length ? `${runs.length - open.length} of ${count} runs finished; ${done.toLocaleString("en")} of ${planned.toLocaleString("en")} rounds` : `All ${count} runs finished`;
  if (lost.length && runs.length > 1) said += ["stopped", "diverged", "at chance"].map((mark) => [mark, lost.filter((run) => run.mark === mark).length]).map(([mark, count]) => (count ? `; ${count} ${mark}` : "")).join("");
  else if (lost.length) said += lost[0].stopped ? `. ${lost[0].stopped}` : lost[0].nonfinite ? `; the loss is not finite from round ${lost[0].nonfinite} on` : `; ${lost[0].diverged}`;
  byId("state").textContent = said;
  byId("state").className = lost.length ? "bad" : open.length ? "wait" : "good";
  byId("progress").hidden = !open.length;
  byId("progress").firstElementChild.style.width = `${(100 * done) / Math.max(planned, 1)}%`;
}
function controls() {
  const press = (axis) => el("button", { type: "button", "data-axis": axis, "aria-pressed": String(axis === chosen.axis), onclick: () => { chosen.axis = axis; controls(); summary(); draw(); } }, AXES[axis].label);
  const pick = (id, text, options, value, on) => el("label", {}, text, (() => {
    const made = el("select", { id, onchange: (event) => on(event.target.value) }, ...options.map(([key, name]) => el("option", { value: key }, cut(name, 60))));
    made.value = value;
    return made;
  })());
  const sources = Object.keys(SOURCES).filter((source) => payload.groups.some((group) => Object.keys(group.curves).some((key) => key.startsWith(`${source}.`))));
  if (sources.length && !sources.includes(chosen.source)) chosen.source = sources[0];
  const parts = [];
  if (payload.groups.some((group) => group.evaluated.round.length || group.every.round.length)) parts.push(el("div", { class: "axis" }, "over", el("span", { class: "segments", role: "group", "aria-label": "What curves are drawn over" }, ...Object.keys(AXES).map(press))));
  if (sources.length > 1) parts.push(pick("source", "measured on", sources.map((s) => [s, SOURCES[s]]), chosen.source, (value) => { chosen.source = value; summary(); draw(); }));
  if (payload.runs.length > 1) parts.push(pick("run", "details of", payload.runs.map((_, r) => [r, label(r)]), chosen.run, (value) => { chosen.run = +value; draw(); settings(); }));
  byId("choices").replaceChildren(...parts);
  byId("legend").replaceChildren(...(payload.groups.length < 2 ? [] : payload.groups.map((group, i) => el("button", {
    type: "button", "aria-pressed": String(!chosen.hidden.has(group.name)), title: "Click hides or shows it; a double click shows it alone",
    onclick: () => { if (!chosen.hidden.delete(group.name)) chosen.hidden.add(group.name); mark(); draw(); },
    ondblclick: () => { chosen.hidden = new Set(payload.groups.map((g) => g.name).filter((name) => name !== group.name)); mark(); draw(); },
  }, swatch(i), group.name))));
  byId("controls").hidden = !parts.length;
  byId("controls").classList.toggle("many", payload.groups.length > 8); // a longer legend would cover the charts
}
function mark() {
  payload.groups.forEach((group, i) => byId("legend").children[i]?.setAttribute("aria-pressed", String(!chosen.hidden.has(group.name))));
}
function settings() {
  const keys = [...new Set(payload.groups.flatMap((group) => Object.keys(group.settings)))], parts = [el("h2", {}, "Settings")];
  if (payload.groups.length > 1 && keys.length) {
    const rows = payload.groups.map((group, i) => el("tr", {}, el("td", {}, swatch(i), group.name), ...keys.map((key) => el("td", { "data-label": key }, group.settings[key] ?? "–"))));
    parts.push(el("p", { class: "about" }, "What differs:"), el("div", { class: "card scroll stacked left" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, ""), ...keys.map((key) => el("th", {}, key)))), el("tbody", {}, ...rows))));
  }
  const facts = Object.entries(payload.shared).map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)));
  if (payload.runs.length > 1) parts.push(el("p", { class: "about", style: "margin-top:14px" }, "What all runs share:"));
  const raw = el("details", { class: "card" }, el("summary", {}, `config.toml of ${payload.runs[chosen.run].folder}`), el("pre", {}, payload.runs[chosen.run].config));
  raw.open = byId("settings").querySelector("details")?.open ?? false;
  parts.push(el("dl", { class: "card facts" }, ...facts), raw);
  byId("settings").replaceChildren(...parts);
  const downsampled = payload.downsampled ? " Curves of more than 300 points show the extremes of every segment." : "";
  byId("foot").textContent = `undrift ${payload.version}, ${payload.made}. Numbers are rounded to five digits.${downsampled} Maps by round have at most 100 columns. This page needs no network.`;
}
function dataFacts() {
  const owner = holder((run) => run.partition !== undefined), p = owner < 0 ? null : payload.partitions[payload.runs[owner].partition], n = (x) => x.toLocaleString("en");
  return p ? `${n(p.samples)} samples at ${n(p.clients - p.empty)} clients${p.empty ? ` (${n(p.empty)} more have none)` : ""}: smallest ${n(p.smallest)}, median ${n(p.median)}, largest ${n(p.largest)}.` : null;
}

// ---- charts on the page: drawn when they come into view, redrawn when something changes

const near = new IntersectionObserver((entries) => entries.forEach((entry) => {
  const card = entry.target;
  card.near = entry.isIntersecting;
  if (card.near && card.stale) paint(card);
}), { rootMargin: "100% 0px" });

function paint(card) {
  if (!window.Plotly) return;
  const { traces, layout } = card.chart.make(), plot = card.querySelector(".plot");
  card.stale = false;
  Plotly.react(plot, traces, layout, { responsive: true, displaylogo: false, displayModeBar: matchMedia("(pointer: coarse)").matches ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"] });
  card.dataset.drawn = "true";
}
function draw() {
  const charts = declared(), main = byId("charts"), cards = new Map([...main.querySelectorAll(".chart")].map((card) => [card.dataset.key, card]));
  for (const name of Object.keys(SECTIONS)) {
    const own = charts.filter((chart) => chart.section === name);
    let section = main.querySelector(`section[data-name="${name}"]`);
    if (!section) main.append(section = el("section", { "data-name": name }, el("h2", {}, SECTIONS[name][0]), el("p", { class: "about" }), el("div", { class: "grid" })));
    section.hidden = !own.length;
    const about = name === "data" ? dataFacts() : SECTIONS[name][1];
    section.children[1].textContent = about || "";
    section.children[1].hidden = !about;
    own.forEach((chart, k) => {
      let card = cards.get(chart.key);
      if (!card) {
        card = el("article", { class: "card chart", "data-key": chart.key }, el("div", { class: "head" }), el("div", { class: "plot" }), el("div", { class: "keys" }));
        near.observe(card);
      }
      cards.delete(chart.key);
      card.chart = chart;
      card.classList.toggle("wide", Boolean(chart.wide) || (own.length % 2 === 1 && k === own.length - 1));
      const log = chart.log && el("button", { type: "button", "aria-pressed": String(Boolean(chosen.log.get(chart.log))), onclick: () => { chosen.log.set(chart.log, !chosen.log.get(chart.log)); draw(); } }, "log scale");
      card.children[0].replaceChildren(...[el("h3", {}, chart.title), el("small", {}, chart.note || ""), log].filter(Boolean));
      card.children[2].replaceChildren(...(chart.keys || []).map(([text, shade]) => el("span", {}, el("span", { class: "swatch", style: `border-color:${shade}` }), text)));
      if (section.children[2].children[k] !== card) section.children[2].insertBefore(card, section.children[2].children[k] || null);
      card.stale = true;
      if (card.near) paint(card);
    });
  }
  for (const card of cards.values()) { near.unobserve(card); if (window.Plotly) Plotly.purge(card.querySelector(".plot")); card.remove(); }
}

// ---- light and dark theme

function wear() {
  if (chosen.look) document.documentElement.dataset.look = chosen.look;
  byId("look").textContent = look() === "dark" ? "☀ light" : "☾ dark";
}
function recall(value) { // storage may be unavailable to pages opened from disk
  try { return value === undefined ? localStorage.getItem("undrift look") : localStorage.setItem("undrift look", value); } catch { return null; }
}
function render() { header(); summary(); controls(); settings(); draw(); }
byId("look").addEventListener("click", () => { chosen.look = look() === "dark" ? "light" : "dark"; recall(chosen.look); wear(); render(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { wear(); render(); });

// ---- a served page polls for new data

let tag = null;
async function follow() {
  const badge = byId("live");
  badge.hidden = false;
  try {
    const reply = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (reply.status === 200) {
      tag = reply.headers.get("ETag");
      payload = await reply.json();
      chosen.run = Math.min(chosen.run, payload.runs.length - 1);
      render();
    }
    badge.textContent = "live";
    badge.className = "pill good";
  } catch {
    badge.textContent = "no longer live";
    badge.className = "pill wait";
  }
  setTimeout(follow, 1000);
}

const remembered = recall();
if (remembered === "dark" || remembered === "light") chosen.look = remembered;
wear();
header(); summary(); controls(); settings();
addEventListener("DOMContentLoaded", () => { draw(); if (payload.live) follow(); });
