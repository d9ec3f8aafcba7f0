// What the reader has chosen, and the start: reads the data, shows the text, then plotly and the plots.
// All scripts are one module in the page; this one is its last part and calls the others.

const $ = (id) => document.getElementById(id);
const state = { axis: "step", scale: "linear", smoothing: 0, words: [], statistic: null, layer: null, mark: null,
  hidden: new Set(), base: null, sort: null, open: null };
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

/** Give a list its options, [value, text] each, and choose `wanted` of them, else the first; a list as it is, is left alone. */
function fill(select, options, wanted) {
  const chosen = String(wanted ?? select.value), now = JSON.stringify(options);
  if (select.dataset.options !== now) select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  select.dataset.options = now;
  select.selectedIndex = Math.max(0, options.findIndex(([value]) => String(value) === chosen));
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

function showNav() {
  const numFindings = page.runs.reduce((sum, run) => sum + run.anomalies.length, 0);
  const sections = [...document.querySelectorAll("main > section:not([hidden])")];
  $("nav").replaceChildren(...sections.map((section) => {
    const count = section.id === "anomalies" && numFindings ? make("span", { class: "count" }, numFindings) : null;
    // The address keeps what was chosen, so a press moves the page and leaves the address alone.
    const onclick = (event) => { event.preventDefault(); section.scrollIntoView(); section.focus({ preventScroll: true }); };
    return make("a", { href: `#${section.id}`, onclick }, section.querySelector("h2").textContent, count);
  }));
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
  state.statistic = asked.get("stat");
  const mark = Number(asked.get("mark") ?? NaN), base = asked.get("base");
  if (Number.isInteger(mark)) state.mark = mark;
  if (page.runs.length > 1 && page.runs[base]) state.base = Number(base);
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
  $("base").onchange = (event) => { state.base = event.target.value === "" ? null : Number(event.target.value); redraw(showBase); };
  $("focus-map").onclick = goToMap;
  $("focus-image").onclick = () => savePng($("focus-plot"));
  $("focus-drawing").onclick = () => saveSvg($("focus-plot"));
  $("focus-numbers").onclick = () => saveNumbers($("focus-plot"));
  $("focus").onclose = leaveFocus;
  $("focus").onclick = (event) => { if (event.target === $("focus")) $("focus").close(); };
  addEventListener("hashchange", followAddress);
}

async function loadPlotly() {
  const text = new TextDecoder().decode(await inflated(bytesIn("plotly")));
  document.head.append(make("script", {}, text));
  $("plotly").remove(); // two megabytes of text that nobody needs any more
}

async function start() {
  startTheme();
  if (!window.DecompressionStream) throw new Error("This page needs a browser of 2023 or later, which can unpack what is in it.");
  page = await unpack(bytesIn("data"));
  restore();
  showHead();
  showAnomalies();
  showNav();
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
  showBase();
  showNav();
  paintSwatches();
  startPaper();
  if (asked.has("open")) followLink();
  if (seconds) reloadSoon();
  document.documentElement.dataset.ready = Math.round(performance.now());
}

start().catch((error) => {
  $("head").append(make("p", { class: "finding error" }, `The page could not be drawn: ${error.message}`));
  throw error;
});
