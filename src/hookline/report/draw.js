// Plots: each is drawn when it comes into view, and again when what it depends on has changed.
// Takes curves from data.js and colours from page.css; page.js decides what is drawn where.

const plots = new Map(); // element -> how to draw it; those out of view wait
const waiting = new Set();
let holding = false; // while several things change, nothing is drawn
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.data && target.clientWidth && !("printing" in document.documentElement.dataset)) Plotly.Plots.resize(target);
});
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const plot = plots.get(entry.target);
    if (!plot) continue;
    plot.inView = entry.isIntersecting;
    if (plot.inView && waiting.has(entry.target)) draw(entry.target);
  }
}, { rootMargin: "200px" });

/** Have an element drawn by `how()`, which gives { data, layout }, now or when it is seen. */
function plotInto(element, how, { now = false } = {}) {
  const known = plots.get(element);
  plots.set(element, { how, inView: known?.inView ?? false, range: null });
  waiting.add(element);
  if (!known) observer.observe(element);
  if (!holding && (now || known?.inView)) draw(element);
}

function forget(element) {
  observer.unobserve(element);
  sizes.unobserve(element);
  plots.delete(element);
  waiting.delete(element);
  if (element.data) Plotly.purge(element);
}

/** Everything that is drawn is out of date, after `change`, in which plots may be set anew: each is drawn once. */
function redraw(change = () => {}) {
  holding = true;
  try { change(); } finally { holding = false; }
  for (const [element, plot] of plots) {
    waiting.add(element);
    if (plot.inView) draw(element);
  }
}

function draw(element) {
  const plot = plots.get(element);
  if (!window.Plotly || !plot || !element.clientWidth) return;
  waiting.delete(element);
  const { data, layout, onClick, zooms, file, isCurve } = plot.how(plot.range, element);
  const isNew = !element.data;
  // For paper the size has to be said: plotly takes up a new one only a moment later, and the browser does not wait.
  if ("printing" in document.documentElement.dataset) Object.assign(layout, { width: element.clientWidth, height: layout.height ?? element.clientHeight });
  Plotly.react(element, data, layout, settings());
  if (isNew) {
    element.on("plotly_click", (event) => plots.get(element)?.onClick?.(event));
    element.on("plotly_relayout", (event) => zoomed(element, event));
    element.on("plotly_hover", (event) => hoverOthers(element, event));
    element.on("plotly_unhover", () => hoverOthers(element, null));
    sizes.observe(element);
  }
  Object.assign(plot, { onClick, zooms, file, isCurve });
}

/** Show the same moment in the other curves in view; `event` is plotly's, null when the mouse has left. */
function hoverOthers(element, event) {
  if (!plots.get(element)?.isCurve) return;
  const point = event?.points?.[0];
  for (const [other, plot] of plots) {
    if (other === element || !plot.isCurve || !plot.inView || !other.data) continue;
    // The last argument keeps plotly from telling about it: the others would answer.
    if (point) Plotly.Fx.hover(other, { xval: point.x }, "xy", true);
    else Plotly.Fx.unhover(other);
  }
}

/** A curve that was thinned is drawn again from all of its points in the part that is looked at. */
function zoomed(element, event) {
  const plot = plots.get(element);
  if (!plot?.zooms || plot.drawing) return;
  const range = "xaxis.range[0]" in event ? [event["xaxis.range[0]"], event["xaxis.range[1]"]]
    : event["xaxis.range"] ?? (event["xaxis.autorange"] ? null : undefined);
  if (range === undefined) return;
  plot.range = range && range.map(Number);
  plot.drawing = true;
  draw(element);
  plot.drawing = false;
}

const byTouch = matchMedia("(pointer: coarse)").matches; // there a finger scrolls the page, and does not zoom

/** Only buttons that stay in the page: plotly has others, which send the data away. */
function settings() {
  // plotly's own button has one file name for as long as the plot lives; that of the map changes with its statistic.
  const image = { name: "image", title: "Download plot as a PNG", icon: Plotly.Icons.camera, click: savePng };
  const drawing = { name: "drawing", title: "Download plot as an SVG", icon: Plotly.Icons.pencil, click: saveSvg };
  const numbers = { name: "numbers", title: "Download numbers as CSV", icon: Plotly.Icons.disk, click: saveNumbers };
  return { displaylogo: false, responsive: false, showTips: false, plotlyServerURL: "", displayModeBar: byTouch ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", image, drawing, numbers]] };
}

// -- how all plots look ----------------------------------------------------------------------------------

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function runColour(run) {
  return colour(run.index === 0 ? "accent" : `run-${1 + ((run.index - 1) % 7)}`);
}

/** A colour with some of it taken away. */
function pale(hex, share) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${share})`;
}

function axis(more) {
  return { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"), zeroline: false,
    tickfont: { size: 11, color: colour("faint") }, automargin: true, exponentformat: "power", ...more };
}

function layoutOf(more) {
  const family = getComputedStyle(document.body).fontFamily;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: byTouch ? false : "zoom",
    font: { family, size: 12, color: colour("ink") },
    margin: { l: 44, r: 12, t: 8, b: 32 }, hovermode: "closest",
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), align: "left", namelength: -1,
      font: { family, color: colour("ink"), size: 12 } },
    modebar: { bgcolor: "rgba(0,0,0,0)" }, ...more,
  };
}

const titled = (text) => ({ text, font: { size: 12, color: colour("faint") }, standoff: 8 });

/** Text for plotly, which takes some tags for markup. */
const safe = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// -- curves ----------------------------------------------------------------------------------------------

const scaleNow = () => (state.base === null ? state.scale : "linear"); // a difference may be negative

/** The curves that are drawn: those of runs that are not hidden; if a run is to be compared with, the others minus it. */
function shownCurves(all) {
  const seen = all.filter((curve) => !state.hidden.has(curve.run.index));
  if (state.base === null) return seen;
  const base = all.find((curve) => curve.run.index === state.base);
  return base ? seen.filter((curve) => curve !== base).map((curve) => minus(curve, base)) : [];
}

/** Why there is nothing to see, if there is nothing. */
function emptyText(all, curves) {
  if (curves.some((curve) => curve.steps.length) || !all.length) return null;
  if (state.base === null) return "All runs with this metric are hidden";
  const name = shortened(page.runs[state.base].name, 40);
  if (!all.some((curve) => curve.run.index === state.base)) return `${name} has no such metric`;
  return curves.length ? `No step in common with ${name}` : `Only ${name} has this metric`;
}

/** Curves of one metric, which `find()` gives, a run each, over each other. `mark` is { run, step } to draw a line at. */
function curvePlot(find, { small = false, mark = null } = {}) {
  return (range) => {
    const all = find(), curves = shownCurves(all), empty = emptyText(all, curves);
    const view = state.axis === "time" ? timeUnit().name : state.axis;
    const data = curves.flatMap((curve) => curveTraces(curve, range, small));
    const layout = layoutOf({
      xaxis: axis({ title: small ? undefined : titled(view), nticks: small ? 5 : undefined, automargin: !small,
        ...(range ? { range, autorange: false } : { autorange: true }), separatethousands: true, ...followed() }),
      // The box of the mouse is about the nearest step, however far the curve is from the mouse.
      hovermode: "x unified", hoverdistance: -1, spikedistance: -1,
      yaxis: axis({ type: scaleNow(), zeroline: state.base !== null, nticks: small ? 4 : undefined, automargin: !small, ...valueRange(curves) }),
      ...(small ? { margin: { l: 56, r: 12, t: 8, b: 28 } } : {}), // fixed, as measuring labels takes longer than the rest
      uirevision: state.axis,
      shapes: mark === null ? [] : [markAt(placesOn(state.axis, page.runs[mark.run], [mark.step])[0])],
      annotations: empty === null ? [] : [{ text: safe(empty), showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }],
    });
    const name = all[0]?.name ?? "", minusBase = state.base === null ? "" : ` − ${page.runs[state.base].name}`;
    const columns = curves.map((curve) => ({ ...curve, name: page.runs.length > 1 ? curve.run.name + minusBase : name }));
    return { data, layout, zooms: curves.some((curve) => curve.steps.length > 1600), isCurve: true,
      file: { name: state.base === null ? name : `${name} difference`, table: () => tableOf(columns) } };
  };
}

/** A thin line at the step that the mouse is nearest to. */
const followed = () => ({ showspikes: true, spikemode: "across", spikesnap: "hovered data", spikethickness: 1, spikedash: "solid",
  spikecolor: colour("faint"), unifiedhovertitle: { text: toldX() } });

const toldX = () => (state.axis === "step" ? "step %{x:,}" : state.axis === "epoch" ? "epoch %{x:.4~g}" : `%{x:.4~g} ${timeUnit().name}`);

/** Around a curve that never moves, an axis that shows which value that is; else plotly's choice. */
function valueRange(curves) {
  const [low, high] = spread(curves.map((curve) => curve.values), 0, 1);
  if (low !== high || low === 0 || scaleNow() === "log") return { autorange: true };
  return { range: [low - Math.abs(low) / 2, low + Math.abs(low) / 2], autorange: false };
}

function markAt(x) {
  return { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colour("bad-cell"), width: 1.5, dash: "dot" } };
}

function curveTraces(curve, range, small) {
  const xs = placesOn(state.axis, curve.run, curve.steps), hue = runColour(curve.run);
  const name = page.runs.length > 1 ? `${safe(shortened(curve.run.name, 40))} ` : "";
  const mode = xs.length < 2 ? "markers" : xs.length < 40 ? "lines+markers" : "lines"; // few points are seen as such
  const base = { type: "scatter", mode, marker: { size: small ? 4 : 6, color: hue } };
  const [from, to] = range ?? [-Infinity, Infinity];
  const traces = [];
  if (state.smoothing) {
    traces.push({ ...base, ...thinned(xs, curve.values, from, to), hoverinfo: "skip", name: "raw",
      line: { color: pale(hue, 0.28), width: 1 } });
  }
  const line = thinned(xs, smoothed(curve.values, state.smoothing), from, to);
  traces.push({ ...base, ...line, name: safe(curve.run.name), line: { color: hue, width: small ? 1.6 : 2 },
    hovertemplate: `${name}<b>%{y:.5~g}</b><extra></extra>` });
  const bad = badPoints(curve, xs);
  if (bad.x.length) {
    traces.push({ type: "scatter", mode: "markers", x: bad.x, y: bad.y, text: bad.text, name: "not finite", meta: "bad",
      marker: { symbol: "x", size: 8, color: colour("bad-cell") }, hovertemplate: `${name}<b>%{text}</b><extra></extra>` });
  }
  return traces;
}

/** Values that have no place on the axis, put where the last one was that had; at most 200 of them. */
function badPoints(curve, xs) {
  const found = { x: [], y: [], text: [] };
  const first = curve.values.find(Number.isFinite) ?? (scaleNow() === "log" ? 1 : 0);
  let last = first;
  for (let i = 0; i < xs.length && found.x.length < 200; i++) {
    if (Number.isFinite(curve.values[i])) {
      last = curve.values[i];
    } else {
      found.x.push(xs[i]);
      found.y.push(last);
      found.text.push(shown(curve.values[i]));
    }
  }
  return found;
}
