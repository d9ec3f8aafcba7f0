// The map of layers over steps, the curve of one layer, and distributions.

// -- layers over steps -----------------------------------------------------------------------------------

const runsWith = (what) => page.runs.filter(what);

function mapParts() {
  const run = runsWith((each) => each.groups.length)[$("map-run").selectedIndex];
  const group = run?.groups[$("map-group").selectedIndex];
  return { run, group, statistic: group?.statistics.find((each) => each.name === state.statistic) ?? group?.statistics[0] };
}

function startMap() {
  $("map-run").onchange = () => fillMap();
  $("map-group").onchange = () => fillMap();
  $("map-statistic").oninput = (event) => { state.statistic = mapParts().group.statistics[event.target.value].name; showMap(); };
  $("row-layer").onchange = (event) => { state.layer = event.target.value; showMap(); };
  if ([...$("map-colour").options].some((option) => option.value === asked.get("colour"))) $("map-colour").value = asked.get("colour");
  $("map-colour").onchange = showMap;
  const first = ["map", "map-run", "stat", "layer", "mark"].some((name) => asked.has(name)) ? null : firstOnMap();
  if (first) chooseOnMap(first.run, first.place, first.step);
  else fillMap({ run: asked.get("map-run"), group: asked.get("map") });
}

/** Where the map opens: at the layer of the first anomaly that has one. */
function firstOnMap() {
  for (const run of page.runs) {
    for (const { metric, step } of run.anomalies.flatMap((finding) => finding.sights)) {
      const place = placeOnMap(run, metric);
      if (place) return { run, place, step };
    }
  }
  return null;
}

/** Fill the lists of runs, maps, statistics and layers. What was chosen stays if it is there, unless others are given. */
function fillMap({ run: index, group: name } = {}) {
  const runs = runsWith((run) => run.groups.length);
  $("layers").hidden = !runs.length;
  if (!runs.length) return;
  fill($("map-run"), runs.map((run) => [run.index, run.name]), index);
  $("map-run-label").hidden = runs.length < 2;
  fill($("map-group"), mapParts().run.groups.map((group) => [group.name, group.name.replace("/", " / ")]), name);
  const { group, statistic } = mapParts(), names = group.statistics.map((each) => each.name);
  state.statistic = statistic.name;
  Object.assign($("map-statistic"), { max: names.length - 1, value: names.indexOf(statistic.name), disabled: names.length < 2 });
  $("map-statistic-ticks").replaceChildren(...(names.length > 1 && names.length < 8 ? names.map((each) => make("span", {}, each)) : []));
  if (!group.layers.includes(state.layer)) state.layer = group.layers[0];
  fill($("row-layer"), group.layers.map((layer) => [layer, layer]), state.layer);
  showMap();
}

function showMap() {
  const { run, group, statistic } = mapParts();
  $("map-statistic-name").textContent = statistic.name;
  $("map-statistic").setAttribute("aria-valuetext", statistic.name);
  const chosen = group.layers.indexOf(state.layer), base = baseOf(run);
  const onClick = ({ points: [point] }) => { state.layer = group.layers[point.pointIndex[0]]; state.mark = point.x; showMap(); };
  const title = `${group.name}/${statistic.name}`, how = $("map-colour").value, mark = state.mark;
  let plot = null; // rows are many: they are lined up when the map is seen, once
  const makePlot = () => {
    const { rows, steps } = alignedRows(run, group, statistic, base);
    noteMap(group, steps, base);
    return mapPlot({ rows, names: group.layers, steps, how, title, chosen, mark, onClick });
  };
  $("map").style.minHeight = `${mapHeight(group.layers.length)}px`; // what is below stays in its place when the map is drawn
  plotInto($("map"), (range, element) => (plot ??= makePlot())(range, element));
  showRow(run, group, statistic);
  keepInUrl();
}

function noteMap(group, steps, base) {
  const hint = "the first layer on top. A click on a cell shows the curve of its layer, with a line at its step.";
  const difference = base ? ` Each value minus that of ${base.name} at the same step.` : "";
  $("map-note").textContent = `${plural(group.layers.length, "layer")} × ${plural(steps.length, "moment")}, ${hint}${difference}`;
}

/** The run that the map of `run` is compared with. */
const baseOf = (run) => (state.base === null || state.base === run.index ? null : page.runs[state.base]);

/** Rows that have a value, or null, at every step that any of them has. */
function alignedRows(run, group, statistic, base) {
  const byRow = new Map(statistic.curves);
  const curves = group.layers.map((_, row) => run.curves[byRow.get(row)]).map((curve) => {
    const other = curve && base?.byName.get(curve.name);
    return base && curve ? (other ? minus(curve, other) : undefined) : curve;
  });
  const known = curves.filter(Boolean), first = known[0];
  if (known.length === curves.length && known.every((curve) => curve.stepList === first.stepList)) {
    return { rows: curves.map((curve) => curve.values), steps: first.steps };
  }
  const steps = [...new Set(known.flatMap((curve) => [...curve.steps]))].sort((a, b) => a - b);
  const column = new Map(steps.map((step, i) => [step, i]));
  const rows = curves.map((curve) => {
    const row = new Array(steps.length).fill(null);
    curve?.steps.forEach((step, i) => { row[column.get(step)] = curve.values[i]; });
    return row;
  });
  return { rows, steps };
}

/** The curve of one layer, of all runs that have it. */
function showRow(run, group, statistic) {
  $("row-layer").value = state.layer;
  $("row-title").textContent = `${state.layer} – ${group.name}/${statistic.name}`;
  const layer = state.layer, mark = state.mark === null ? null : { run: run.index, step: state.mark };
  const find = () => page.runs.map((each) => {
    const own = each.groups.find((other) => other.name === group.name);
    const same = own?.statistics.find((other) => other.name === statistic.name);
    return each.curves[new Map(same?.curves).get(own?.layers.indexOf(layer))];
  }).filter(Boolean);
  plotInto($("row-plot"), curvePlot(find, { mark }));
}

/** Where a metric is on the maps of a run: { group, statistic, layer }; null for one that is of no layer. */
function placeOnMap(run, metric) {
  const index = run.curves.findIndex((curve) => curve.name === metric), layer = run.curves[index]?.layer;
  if (layer === undefined) return null;
  for (const group of run.groups) {
    const statistic = group.statistics.find((each) => each.curves.some(([, at]) => at === index));
    if (statistic) return { group: group.name, statistic: statistic.name, layer };
  }
  return null;
}

/** Show a layer of a run on its map, and the step at which something happened. */
function chooseOnMap(run, place, step) {
  Object.assign(state, { statistic: place.statistic, layer: place.layer, mark: step });
  fillMap({ run: run.index, group: place.group });
}

// -- distributions ---------------------------------------------------------------------------------------

function gridChosen() {
  return runsWith((run) => run.grids.length)[$("grid-run").selectedIndex]?.grids[$("grid-metric").selectedIndex];
}

function startGrids() {
  $("grid-run").onchange = () => fillGrids();
  $("grid-metric").onchange = () => fillGrids();
  $("grid-step").oninput = showGrid;
  fillGrids({ run: asked.get("grid-run"), metric: asked.get("grid"), moment: asked.get("at") });
}

/** Fill the lists of runs and metrics; the slider is at the last step, unless another is given. */
function fillGrids({ run, metric, moment } = {}) {
  const runs = runsWith((each) => each.grids.length), slider = $("grid-step");
  $("distributions").hidden = !runs.length;
  if (!runs.length) return;
  fill($("grid-run"), runs.map((each) => [each.index, each.name]), run);
  $("grid-run-label").hidden = runs.length < 2;
  fill($("grid-metric"), runs[$("grid-run").selectedIndex].grids.map((grid) => [grid.name, grid.name]), metric);
  const { steps } = gridChosen();
  slider.max = steps.length - 1;
  slider.value = moment ?? slider.max;
  showGrid();
}

function showGrid() {
  const grid = gridChosen(), moment = Number($("grid-step").value), step = grid.steps[moment];
  $("grid-step-name").textContent = shownStep(step);
  $("grid-step").setAttribute("aria-valuetext", shownStep(step));
  const onClick = (event) => { $("grid-step").value = grid.steps.indexOf(event.points[0].x); showGrid(); };
  plotInto($("grid-map"), gridMap(grid, moment, onClick));
  plotInto($("grid-bars"), gridBars(grid, moment));
  keepInUrl();
}
