// Rows over steps as colours: layers, and distributions. draw.js draws what the functions here give.

const SEQUENTIAL = "Viridis"; // even in lightness, and told apart by colour-blind people
const diverging = () => [[0, "#2166ac"], [0.25, "#67a9cf"], [0.5, colour("middle")], [0.75, "#ef8a62"], [1, "#b2182b"]];

/**
 * Rows over steps as colours: `rows` are arrays of numbers, `told` what the hover tells of them, `chosen` the row that
 * is marked, `mark` a step to draw a line at.
 */
function mapPlot({ rows, told = rows, names, steps, how, title, chosen, mark = null, onClick }) {
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
      shapes: [...(chosen === null ? [] : [rowFrame(chosen)]), ...(mark === null ? [] : [markAt(mark)])],
    });
    const columns = names.map((row, i) => ({ name: row, steps, values: told[i] }));
    return { data: [trace, ...badCells(seen.rows, text, seen.steps)], layout, onClick, zooms: seen.size > 1 || range !== null,
      file: { name: title, table: () => tableOf(columns) } };
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

/** Rows over steps: places of a list, bins, frequencies …; of counts, the share of each at its moment. */
function gridMap(grid, moment, onClick) {
  const rows = grid.counts ? shares(grid) : grid.rows;
  return (range, element) => {
    const what = { rows, told: grid.rows, names: grid.bins, steps: grid.steps, how: "linear", title: grid.name, chosen: null, onClick };
    const drawn = mapPlot(what)(range, element);
    const { data, layout } = drawn;
    const row = grid.keys === "binary exponent" ? "2<sup>%{text}</sup>" : `${safe(grid.keys)} %{text}`;
    if (grid.counts) {
      data[0] = { ...data[0], zmin: 0, hovertemplate: `${row}<br>step %{x:,}<br>%{z:.2%}, %{customdata:,}<extra></extra>` };
      data[0].colorbar.tickformat = ".0%";
    } else {
      data[0] = { ...data[0], hovertemplate: `${row}<br>${toldAt(1)}<br>%{customdata:.5~g}<extra></extra>` };
    }
    const marks = rowMarks(grid.bins, element.clientWidth);
    layout.height = element.clientHeight - 8;
    layout.yaxis = { ...layout.yaxis, autorange: true, tickvals: marks.at, ticktext: marks.text,
      title: titled(safe(grid.keys)) };
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
      hovertemplate: `${safe(grid.keys)} %{x}<br><b>%{y:.5~g}</b><extra></extra>` }],
    layout: layoutOf({ bargap: 0.08, xaxis: axis({ type: "category", showgrid: false, nticks: 12, title: titled(safe(grid.keys)) }),
      yaxis: axis({ rangemode: "tozero" }), margin: { l: 44, r: 8, t: 8, b: 40 } }),
    file: { name: `${grid.name} at ${grid.steps[moment]}`,
      table: () => [[grid.keys, grid.name], ...grid.bins.map((bin, i) => [bin, grid.rows[i][moment]])] },
  });
}
