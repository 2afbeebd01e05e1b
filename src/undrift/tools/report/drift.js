// Drift: how far clients move, and whether they agree. Drawn only if a run has these figures: without them, a column of
// the same name is a part’s own.

const DRIFT = {
  agreement: ["Agreement of the updates", "‖mean update‖ / mean ‖update‖", "1: all the same, 0: they cancel out"],
  cosine: ["Cosine with the mean update", "mean cosine", "mean over the round’s clients"],
  cosine_min: ["Smallest cosine with the mean update", "smallest cosine", null],
  update_norm: ["Length of the clients’ updates", "mean ‖update‖", "mean over the round’s clients"],
  update_norm_max: ["Longest update of a round", "max ‖update‖", null],
  mean_update_norm: ["Length of the mean update", "‖mean update‖", null],
  server_step: ["Length of the server’s step", "‖step‖", "what the weights change by in a round"],
  train_loss_first: ["Training loss, first local step", "loss", "mean over the round’s clients"],
  train_loss: ["Training loss, last local step", "loss", "mean over the round’s clients"],
};
const drifts = (key) => payload.drift && key in DRIFT;
function drift(add, lines, any, whose) {
  for (const [key, [title, y, note]] of Object.entries(DRIFT)) {
    if (!drifts(key) || !any("schedules", key)) continue;
    const bound = key === "agreement" ? { floor: 0, ceiling: 1, range: [0, 1.03] } : key.startsWith("cosine") ? { floor: -1, ceiling: 1 } : key.startsWith("train") ? {} : { floor: 0 };
    add("drift", `drift ${key}`, title, lines("schedules", key, y, bound), { note });
  }
  const mapped = holder((r) => r.layers.layer_agreement);
  if (mapped >= 0) add("drift", "drift layers", "Agreement by layer", () => layerMap(mapped), { note: whose(mapped), wide: true });
  const moved = holder((r) => r.norms);
  if (moved >= 0) add("drift", "drift clients", "Clients with the longest updates", () => longest(moved), { note: `mean over their rounds, and the longest${whose(moved) ? `; ${whose(moved)}` : ""}`, wide: true });
}
function layerMap(run) {
  const { layers, axes } = payload.runs[run], { lines, values } = layers.layer_agreement, at = [...lines.keys()], room = innerWidth < 640 ? 14 : 26;
  const trace = { type: "heatmap", x: axes[chosen.axis], y: at, z: values, zmin: 0, zmax: 1, customdata: lines.map((name) => axes[chosen.axis].map(() => plain(name))),
    colorscale: SCALES[look()], colorbar: scale("agreement"), hovertemplate: "%{customdata}<br>%{x}<br>agreement %{z:.3f}<extra></extra>" };
  const every = Math.ceil(lines.length / 24), ticks = at.filter((k) => k % every === 0);
  const y = axis("", { autorange: "reversed", tickvals: ticks, ticktext: ticks.map((k) => plain(cut(lines[k], room))), showgrid: false, automargin: true });
  return { traces: [trace], layout: layout(over(), y, { hovermode: "closest" }) };
}
function longest(run) {
  const { who, mean: means, most: highest, rounds, of } = payload.runs[run].norms, i = groupOf(run), x = [...who.keys()];
  const bars = { type: "bar", x, y: means, marker: { color: colour(i) }, customdata: who.map((name, k) => [plain(name), rounds[k]]),
    hovertemplate: "client %{customdata[0]}, in %{customdata[1]} rounds<br>mean ‖update‖ %{y:.4~g}<extra></extra>" };
  const tops = { type: "scatter", mode: "markers", x, y: highest, marker: { symbol: "line-ew-open", size: 12, color: ink("ink") }, customdata: who.map(plain), hovertemplate: "client %{customdata}<br>longest %{y:.4~g}<extra></extra>" };
  const title = who.length < of ? `${who.length} of ${of.toLocaleString("en")} clients` : "client";
  return { traces: [bars, tops], layout: layout(axis(title, { tickvals: x, ticktext: who.map((name) => plain(cut(name, 12))), automargin: true, showgrid: false }), axis("‖update‖", { rangemode: "tozero" }), { hovermode: "closest", bargap: 0.25 }) };
}
