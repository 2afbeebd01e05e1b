// Printing: every chart, also those that were never in view, at the width of a sheet of paper.

function sheet(printing) {
  if (!window.Plotly) return;
  document.documentElement.classList.toggle("sheet", printing);
  for (const card of document.querySelectorAll(".chart")) {
    if (printing && (card.stale || !card.dataset.drawn)) paint(card);
    else if (card.dataset.drawn) Plotly.relayout(card.querySelector(".plot"), { autosize: true }); // Plots.resize would wait
  }
}
addEventListener("beforeprint", () => sheet(true));
addEventListener("afterprint", () => sheet(false));
matchMedia("print").addEventListener("change", (event) => sheet(event.matches)); // where the events are not known
