// What the reader has chosen, and the start: reads the data, shows the text, then plotly and the plots.
// All scripts are one module in the page; this one is its last part and calls the others.

const $ = (id) => document.getElementById(id);
const state = { axis: "step", scale: "linear", smoothing: 0, words: [], statistic: 0, layer: null, hidden: new Set(), sort: null, open: null };
let page = null; // what unpack() gave

/** An element: make("a", { href: "#x", class: "y" }, "text", child). */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function fill(select, options) {
  select.replaceChildren(...options.map((text, index) => make("option", { value: index }, text)));
  select.selectedIndex = options.length ? 0 : -1;
}

const plural = (count, one, many = `${one}s`) => `${shown(count)} ${count === 1 ? one : many}`;

// -- light and dark, navigation, start ---------------------------------------------------------------------

function chosenTheme() {
  try { return localStorage.getItem("hookline-theme"); } catch { return null; } // a browser may refuse it for files
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (page) { paintSwatches(); redraw(); }
}

function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(chosenTheme() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!chosenTheme()) setTheme(dark.matches ? "dark" : "light"); });
  $("theme").onclick = () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("hookline-theme", theme); } catch { /* then it holds until the page is closed */ }
    setTheme(theme);
  };
}

function showNav(numFindings) {
  for (const section of document.querySelectorAll("main > section:not([hidden])")) {
    const count = section.id === "anomalies" && numFindings ? make("span", { class: "count" }, numFindings) : null;
    // The address keeps what was chosen, so a press moves the page and leaves the address alone.
    const onclick = (event) => { event.preventDefault(); section.scrollIntoView(); section.focus({ preventScroll: true }); };
    $("nav").append(make("a", { href: `#${section.id}`, onclick }, section.querySelector("h2").textContent, count));
  }
}

/** What the link to the page asks for; what makes no sense of it is passed over. */
function restore() {
  if (["epoch", "time"].includes(asked.get("x"))) state.axis = asked.get("x");
  if (asked.get("y") === "log") state.scale = "log";
  const smoothing = Number(asked.get("smooth"));
  if (smoothing > 0 && smoothing < 1) state.smoothing = smoothing;
  $("search").value = asked.get("find") ?? "";
  state.words = searchedWords();
  state.layer = asked.get("layer");
  state.sort = asked.get("sort");
  for (const index of (asked.get("hide") ?? "").split(",")) if (index !== "" && page.runs[index]) state.hidden.add(Number(index));
}

const searchedWords = () => $("search").value.toLowerCase().split(/\s+/).filter(Boolean);

function startTools() {
  const axes = [["step", "step"], ...(page.runs.some((run) => run.clock.epochs) ? [["epoch", "epoch"]] : []), ["time", "time"]];
  if (!axes.some(([value]) => value === state.axis)) state.axis = "step";
  choice($("x-axis"), "x", axes, state.axis, (value) => { state.axis = value; redraw(); keepInUrl(); });
  choice($("y-axis"), "y", [["linear", "linear"], ["log", "log"]], state.scale, (value) => { state.scale = value; redraw(); keepInUrl(); });
  let soon;
  $("search").oninput = () => {
    state.words = searchedWords();
    clearTimeout(soon);
    soon = setTimeout(showCards, 120); // typing goes on
    keepInUrl();
  };
  const showSmoothing = () => { $("smoothing-value").textContent = state.smoothing; };
  $("smoothing").value = state.smoothing;
  showSmoothing();
  $("smoothing").oninput = (event) => {
    state.smoothing = Number(event.target.value);
    showSmoothing();
    redraw();
    keepInUrl();
  };
  $("focus-close").onclick = () => $("focus").close();
  $("focus-image").onclick = () => saveImage($("focus-plot"));
  $("focus-numbers").onclick = () => saveNumbers($("focus-plot"));
  $("focus").onclose = leaveFocus;
  $("focus").onclick = (event) => { if (event.target === $("focus")) $("focus").close(); };
  addEventListener("hashchange", followAddress);
}

async function loadPlotly() {
  const text = new TextDecoder().decode(await inflated("plotly"));
  document.head.append(make("script", {}, text));
  $("plotly").remove(); // two megabytes of text that nobody needs any more
}

async function start() {
  startTheme();
  if (!window.DecompressionStream) throw new Error("This page needs a browser of 2023 or later, which can unpack what is in it.");
  page = await unpack();
  restore();
  showHead();
  showNav(showAnomalies());
  startTools();
  showHooks();
  showFacts();
  showLegend();
  $("foot").textContent = `Made by hookline on ${shownTime(page.made)}. Everything is in this file.`;
  await new Promise((resolve) => setTimeout(resolve)); // the text is on the screen before plotly is read
  await loadPlotly();
  showCards();
  startMap();
  startGrids();
  for (const link of [...$("nav").children]) if ($(link.hash.slice(1)).hidden) link.remove();
  paintSwatches();
  startPaper();
  if (asked.has("open")) followLink();
  document.documentElement.dataset.ready = Math.round(performance.now());
}

start().catch((error) => {
  $("head").append(make("p", { class: "finding error" }, `The page could not be drawn: ${error.message}`));
  throw error;
});
