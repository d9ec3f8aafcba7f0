// Plots: each is drawn when it comes into view, and again when what it depends on has changed.
// Takes curves from data.js and colours from page.css; page.js decides what is drawn where.

const plots = new Map(); // element -> how to draw it; those out of view wait
const waiting = new Set();
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
  if (now || known?.inView) draw(element);
}

function forget(element) {
  observer.unobserve(element);
  plots.delete(element);
  waiting.delete(element);
  if (element.data) Plotly.purge(element);
}

/** Everything that is drawn is out of date. */
function redraw() {
  for (const [element, plot] of plots) {
    waiting.add(element);
    if (plot.inView || element.dataset.always) draw(element);
  }
}

function draw(element) {
  const plot = plots.get(element);
  if (!window.Plotly || !plot || !element.clientWidth) return;
  waiting.delete(element);
  const { data, layout, onClick, zooms } = plot.how(plot.range, element);
  const isNew = !element.data;
  Plotly.react(element, data, layout, settings());
  if (isNew) {
    element.on("plotly_click", (event) => plots.get(element)?.onClick?.(event));
    element.on("plotly_relayout", (event) => zoomed(element, event));
    new ResizeObserver(() => element.data && element.clientWidth && Plotly.Plots.resize(element)).observe(element);
  }
  plot.onClick = onClick;
  plot.zooms = zooms;
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
  return { displaylogo: false, responsive: false, showTips: false, plotlyServerURL: "", displayModeBar: byTouch ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] };
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

/** Curves of one metric or several, over each other. `mark` is a step to draw a line at. */
function curvePlot(curves, { small = false, mark = null } = {}) {
  return (range) => {
    const view = state.axis === "time" ? timeUnit().name : state.axis;
    const data = curves.flatMap((curve) => curveTraces(curve, range, small));
    const layout = layoutOf({
      xaxis: axis({ title: small ? undefined : titled(view), nticks: small ? 5 : undefined, automargin: !small,
        ...(range ? { range, autorange: false } : { autorange: true }), separatethousands: true }),
      yaxis: axis({ type: state.scale, nticks: small ? 4 : undefined, automargin: !small, ...valueRange(curves) }),
      ...(small ? { margin: { l: 56, r: 12, t: 8, b: 28 } } : {}), // fixed, as measuring labels takes longer than the rest
      uirevision: state.axis,
      shapes: mark === null ? [] : [markAt(placesOn(state.axis, mark.run, [mark.step])[0])],
    });
    return { data, layout, zooms: curves.some((curve) => curve.steps.length > 1600) };
  };
}

/** Around a curve that never moves, an axis that shows which value that is; else plotly's choice. */
function valueRange(curves) {
  const [low, high] = spread(curves.map((curve) => curve.values), 0, 1);
  if (low !== high || low === 0 || state.scale === "log") return { autorange: true };
  return { range: [low - Math.abs(low) / 2, low + Math.abs(low) / 2], autorange: false };
}

function markAt(x) {
  return { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colour("bad-cell"), width: 1.5, dash: "dot" } };
}

function curveTraces(curve, range, small) {
  const xs = placesOn(state.axis, curve.run, curve.steps), hue = runColour(curve.run);
  const name = page.runs.length > 1 ? `${safe(curve.run.name)}<br>` : "";
  const mode = xs.length < 2 ? "markers" : xs.length < 40 ? "lines+markers" : "lines"; // few points are seen as such
  const base = { type: "scatter", mode, marker: { size: small ? 4 : 6, color: hue } };
  const [from, to] = range ?? [-Infinity, Infinity];
  const traces = [];
  if (state.smoothing) {
    traces.push({ ...base, ...thinned(xs, curve.values, from, to), hoverinfo: "skip", name: "raw",
      line: { color: pale(hue, 0.28), width: 1 } });
  }
  const told = state.axis === "step" ? "step %{x:,}" : state.axis === "epoch" ? "epoch %{x:.4~g}" : `%{x:.4~g} ${timeUnit().name}`;
  const line = thinned(xs, smoothed(curve.values, state.smoothing), from, to);
  traces.push({ ...base, ...line, name: safe(curve.run.name), line: { color: hue, width: small ? 1.6 : 2 },
    hovertemplate: `${name}${told}<br><b>%{y:.5~g}</b><extra></extra>` });
  const bad = badPoints(curve, xs);
  if (bad.x.length) {
    traces.push({ type: "scatter", mode: "markers", x: bad.x, y: bad.y, text: bad.text, name: "not finite", meta: "bad",
      marker: { symbol: "x", size: 8, color: colour("bad-cell") }, hovertemplate: `${name}${told}<br><b>%{text}</b><extra></extra>` });
  }
  return traces;
}

/** Values that have no place on the axis, put where the last one was that had; at most 200 of them. */
function badPoints(curve, xs) {
  const found = { x: [], y: [], text: [] };
  const first = curve.values.find(Number.isFinite) ?? (state.scale === "log" ? 1 : 0);
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

// -- maps ------------------------------------------------------------------------------------------------

const SEQUENTIAL = "Viridis"; // even in lightness, and told apart by colour-blind people
const diverging = () => [[0, "#2166ac"], [0.25, "#67a9cf"], [0.5, colour("middle")], [0.75, "#ef8a62"], [1, "#b2182b"]];

/**
 * Rows over steps as colours: `rows` are arrays of numbers, `told` what the hover tells of them, `chosen` the row that
 * is marked.
 */
function mapPlot({ rows, told = rows, names, steps, how, title, chosen, onClick }) {
  return (range, element) => {
    const width = element.clientWidth, seen = pooled(rows, told, steps, range, Math.max(300, 0.8 * width));
    const tint = tinted(seen.rows, rows, how), marks = rowMarks(names, width);
    // A category axis would take a tick at 3 for the row that is called "3", so rows are numbers, named in the hover.
    const text = names.map((name) => new Array(seen.steps.length).fill(safe(name)));
    const trace = { type: "heatmap", x: seen.steps, y: names.map((_, i) => i), z: tint.z, text, customdata: seen.told,
      zmin: tint.low, zmax: tint.high, hoverongaps: false, colorscale: tint.scale,
      colorbar: { thickness: 10, outlinewidth: 0, len: 1, xpad: 6, tickfont: { size: 11, color: colour("faint") }, ...tint.bar },
      hovertemplate: `<b>%{text}</b><br>${toldAt(seen.size)}<br>%{customdata:.5~g}<extra></extra>`, name: safe(title) };
    const layout = layoutOf({
      xaxis: axis({ title: titled("step"), showgrid: false, separatethousands: true }),
      yaxis: axis({ autorange: "reversed", showgrid: false, tickmode: "array", tickvals: marks.at, ticktext: marks.text, ticks: "" }),
      margin: { l: 8, r: 8, t: 8, b: 40 }, height: mapHeight(names.length), uirevision: title,
      shapes: chosen === null ? [] : [rowFrame(chosen)],
    });
    return { data: [trace, ...badCells(seen.rows, text, seen.steps)], layout, onClick, zooms: seen.size > 1 || range !== null };
  };
}

const toldAt = (size) => (size > 1 ? `largest of ${size} moments from step %{x:,}` : "step %{x:,}");

/**
 * No more columns than can be seen between the ends of `range`: of each stretch what is not finite, else what is
 * furthest from zero.
 */
function pooled(rows, told, steps, range, most) {
  let a = 0, b = steps.length;
  if (range) {
    while (a < b - 1 && steps[a + 1] < range[0]) a++;
    while (b > a + 1 && steps[b - 2] > range[1]) b--;
  }
  const size = Math.ceil((b - a) / most);
  if (size < 2 && b - a === steps.length) return { rows, told, steps, size: 1 };
  const starts = Array.from({ length: Math.ceil((b - a) / size) }, (_, i) => a + i * size);
  const picks = rows.map((row) => starts.map((start) => furthest(row, start, Math.min(b, start + size))));
  const by = (table) => table.map((row, r) => picks[r].map((i) => row[i]));
  return { rows: by(rows), told: told === rows ? by(rows) : by(told), steps: starts.map((i) => steps[i]), size };
}

function furthest(row, from, to) {
  let best = from;
  for (let i = from; i < to; i++) {
    if (row[i] !== null && !Number.isFinite(row[i])) return i;
    if (row[best] === null || Math.abs(row[i]) > Math.abs(row[best])) best = i;
  }
  return best;
}

function mapHeight(count) {
  return Math.max(180, Math.min(640, 70 + count * 18));
}

function rowFrame(row) {
  return { type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line: { color: colour("ink"), width: 1.5 } };
}

/** Names beside the map: as many as there is room for, shortened in the middle. */
function rowMarks(names, width) {
  const most = Math.floor((mapHeight(names.length) - 70) / 15), every = Math.ceil(names.length / Math.max(1, most));
  const letters = width < 520 ? 12 : 30;
  const at = names.map((_, i) => i).filter((i) => i % every === 0);
  return { at, text: at.map((i) => safe(shortened(names[i], letters))) };
}

function shortened(name, letters) {
  if (name.length <= letters) return name;
  const half = Math.floor((letters - 1) / 2);
  return `${name.slice(0, half)}…${name.slice(-half)}`;
}

/** What colour stands for which number of `rows`, by what there is among `all` of them. */
function tinted(rows, all, how) {
  const [least, most] = spread(all, 0, 1), [low, high] = spread(all, 0.01, 0.99);
  const wide = least >= 0 && high > 0 && high > 100 * Math.max(low, 1e-30);
  const kind = how === "auto" ? (wide ? "log" : "linear") : how;
  if (kind === "log") return tintedByLog(rows, all);
  if (kind === "row") return tintedByRow(rows, all);
  const bar = { tickformat: ".3~g", nticks: 6 };
  if (least < 0 && most > 0) {
    const bound = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return { z: rows, low: -bound, high: bound, scale: diverging(), bar };
  }
  return { z: rows, low, high: high > low ? high : low + (Math.abs(low) || 1) * 1e-6, scale: SEQUENTIAL, bar };
}

function tintedByLog(rows, all) {
  const log = (value) => Math.log10(Math.abs(value));
  let [low, high] = spread(all, 0.01, 0.99, log);
  if (high - low < 0.01) [low, high] = [low - 0.5, high + 0.5];
  const every = Math.max(1, Math.ceil((high - low) / 6)), ticks = [];
  for (let power = Math.ceil(low); power <= high; power += every) ticks.push(power);
  if (ticks.length < 2) ticks.splice(0, ticks.length, low, (low + high) / 2, high);
  // Zero has no logarithm; it is drawn as the smallest there is.
  const z = rows.map((row) => Array.from(row, (value) => (value === null ? null : value === 0 ? low : log(value))));
  const text = ticks.map((tick) => (Number.isInteger(tick) ? `10<sup>${tick}</sup>` : shown(10 ** tick)));
  return { z, low, high, scale: SEQUENTIAL, bar: { tickvals: ticks, ticktext: text } };
}

/** How far each value is from its own row's median, in the row's own spread. */
function tintedByRow(rows, all) {
  const z = rows.map((row, r) => {
    const [low, high] = spread([all[r]], 0.16, 0.84), [middle] = spread([all[r]], 0.5, 0.5);
    const unit = (high - low) / 2 || 1;
    return Array.from(row, (value) => (value === null ? null : (value - middle) / unit));
  });
  return { z, low: -4, high: 4, scale: diverging(), bar: { title: { text: "σ", side: "top" }, nticks: 5 } };
}

/** What is not finite, in a colour that no number has; cells without a value stay empty. */
function badCells(rows, text, steps) {
  const isBad = (value) => value !== null && !Number.isFinite(value);
  if (!rows.some((row) => row.some(isBad))) return [];
  const z = rows.map((row) => Array.from(row, (value) => (isBad(value) ? 1 : null)));
  const hue = colour("bad-cell");
  return [{ type: "heatmap", x: steps, y: rows.map((_, i) => i), z, text, zmin: 0, zmax: 1, hoverongaps: false,
    colorscale: [[0, hue], [1, hue]], showscale: false, meta: "bad", name: "not finite",
    hovertemplate: "<b>%{text}</b><br>step %{x:,}<br>not finite<extra></extra>" }];
}

// -- distributions ---------------------------------------------------------------------------------------

/** Bins over steps; of counts, the share of each bin at its moment. */
function gridMap(grid, moment, onClick) {
  const rows = grid.counts ? shares(grid) : grid.rows;
  return (range, element) => {
    const what = { rows, told: grid.rows, names: grid.bins, steps: grid.steps, how: "linear", title: grid.name, chosen: null, onClick };
    const drawn = mapPlot(what)(range, element);
    const { data, layout } = drawn;
    if (grid.counts) {
      data[0] = { ...data[0], zmin: 0, hovertemplate: "2<sup>%{text}</sup><br>step %{x:,}<br>%{z:.2%}, %{customdata:,}<extra></extra>" };
      data[0].colorbar.tickformat = ".0%";
    }
    const marks = rowMarks(grid.bins, element.clientWidth);
    layout.height = element.clientHeight - 8;
    layout.yaxis = { ...layout.yaxis, autorange: true, tickvals: marks.at, ticktext: marks.text,
      title: titled(grid.counts ? "binary exponent" : "place in the list") };
    layout.shapes = [markAt(grid.steps[moment])];
    return drawn;
  };
}

function shares(grid) {
  const totals = new Float64Array(grid.steps.length);
  for (const row of grid.rows) row.forEach((count, i) => { totals[i] += count || 0; });
  return grid.rows.map((row) => row.map((count, i) => (totals[i] ? count / totals[i] : 0)));
}

/** One moment of it. */
function gridBars(grid, moment) {
  return () => ({
    data: [{ type: "bar", x: grid.bins, y: grid.rows.map((row) => row[moment]), marker: { color: runColour(grid.run) },
      hovertemplate: "%{x}<br><b>%{y:.5~g}</b><extra></extra>" }],
    layout: layoutOf({ bargap: 0.08, xaxis: axis({ type: "category", showgrid: false, nticks: 12 }), yaxis: axis({ rangemode: "tozero" }),
      margin: { l: 44, r: 8, t: 8, b: 40 } }),
  });
}
