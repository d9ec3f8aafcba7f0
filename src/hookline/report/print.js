// On paper: every plot is drawn, as wide as the paper, light.

const PAPER = matchMedia("print");
let before = null; // what is put back afterwards

/** Draw everything for the paper. Called by the browser right before, so nothing here may wait. */
function startPrint() {
  if (before || !page) return;
  before = { theme: document.documentElement.dataset.theme };
  document.documentElement.dataset.printing = ""; // page.css gives the page the width of paper
  document.documentElement.dataset.theme = "light";
  paintSwatches();
  for (const element of plots.keys()) draw(element);
}

function endPrint() {
  if (!before) return;
  delete document.documentElement.dataset.printing;
  document.documentElement.dataset.theme = before.theme;
  before = null;
  paintSwatches();
  for (const element of plots.keys()) if (element.data) Plotly.purge(element); // a size that was said is kept by plotly
  redraw();
}

function startPaper() {
  addEventListener("beforeprint", startPrint);
  addEventListener("afterprint", endPrint);
  PAPER.addEventListener("change", () => (PAPER.matches ? startPrint() : endPrint()));
}
