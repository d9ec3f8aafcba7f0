// The map of layers over steps, the curve of one layer, and distributions.

// -- layers over steps -----------------------------------------------------------------------------------

function mapParts() {
  const run = runsWith((each) => each.groups.length)[$("map-run").selectedIndex];
  const group = run?.groups[$("map-group").selectedIndex];
  return { run, group, statistic: group?.statistics[Math.min(state.statistic, group.statistics.length - 1)] };
}

const runsWith = (what) => page.runs.filter(what);

function startMap() {
  const runs = runsWith((run) => run.groups.length);
  $("layers").hidden = !runs.length;
  if (!runs.length) return;
  fill($("map-run"), runs.map((run) => run.name));
  $("map-run-label").hidden = runs.length < 2;
  $("map-run").onchange = () => chooseRun(mapParts().group?.name);
  $("map-group").onchange = () => chooseGroup();
  $("map-statistic").oninput = (event) => { state.statistic = Number(event.target.value); showMap(); };
  if ([...$("map-colour").options].some((option) => option.value === asked.get("colour"))) $("map-colour").value = asked.get("colour");
  $("map-colour").onchange = showMap;
  choose($("map-run"), "map-run");
  $("row-layer").onchange = (event) => { state.layer = mapParts().group.layers[event.target.selectedIndex]; showMap(); };
  chooseRun();
}

/** Another run: the same map of it, if it has one. */
function chooseRun() {
  const before = $("map-group").selectedOptions[0]?.textContent;
  const run = runsWith((each) => each.groups.length)[$("map-run").selectedIndex];
  const names = run.groups.map((group) => group.name.replace("/", " / "));
  fill($("map-group"), names);
  if (before === undefined) choose($("map-group"), "map");
  else $("map-group").selectedIndex = Math.max(0, names.indexOf(before));
  chooseGroup();
}

function chooseGroup() {
  const { group } = mapParts(), names = group.statistics.map((statistic) => statistic.name);
  const before = $("map-statistic").getAttribute("aria-valuetext") ?? asked.get("stat");
  state.statistic = Math.max(0, names.indexOf(before));
  $("map-statistic").max = names.length - 1;
  $("map-statistic").value = state.statistic;
  $("map-statistic").disabled = names.length < 2;
  $("map-statistic-ticks").replaceChildren(...(names.length > 1 && names.length < 8 ? names.map((name) => make("span", {}, name)) : []));
  fill($("row-layer"), group.layers);
  if (!group.layers.includes(state.layer)) state.layer = group.layers[0];
  showMap();
}

function showMap() {
  const { run, group, statistic } = mapParts();
  $("map-statistic-name").textContent = statistic.name;
  $("map-statistic").setAttribute("aria-valuetext", statistic.name);
  const { rows, steps } = alignedRows(run, group, statistic);
  const chosen = group.layers.indexOf(state.layer);
  const often = steps.length === 1 ? "1 moment" : `${shown(steps.length)} moments`;
  const hint = "the first layer on top. A click on a cell shows the curve of its layer.";
  $("map-note").textContent = `${plural(group.layers.length, "layer")} × ${often}, ${hint}`;
  const onClick = (event) => { state.layer = group.layers[event.points[0].pointIndex[0]]; showMap(); };
  const title = `${group.name}/${statistic.name}`, how = $("map-colour").value;
  plotInto($("map"), mapPlot({ rows, names: group.layers, steps, how, title, chosen, onClick }), { now: true });
  showRow(group, statistic, chosen);
  keepInUrl();
}

/** Rows that have a value, or null, at every step that any of them has. */
function alignedRows(run, group, statistic) {
  const byRow = new Map(statistic.curves), curves = group.layers.map((_, row) => run.curves[byRow.get(row)]);
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
function showRow(group, statistic, chosen) {
  $("row-layer").selectedIndex = chosen;
  $("row-title").textContent = `${state.layer} – ${group.name}/${statistic.name}`;
  const curves = page.runs.map((run) => {
    const own = run.groups.find((each) => each.name === group.name);
    const same = own?.statistics.find((each) => each.name === statistic.name);
    return run.curves[new Map(same?.curves).get(own?.layers.indexOf(state.layer))];
  }).filter(Boolean);
  plotInto($("row-plot"), curvePlot(curves));
}

// -- distributions ---------------------------------------------------------------------------------------

function gridChosen() {
  return runsWith((run) => run.grids.length)[$("grid-run").selectedIndex]?.grids[$("grid-metric").selectedIndex];
}

function startGrids() {
  const runs = runsWith((run) => run.grids.length);
  $("distributions").hidden = !runs.length;
  if (!runs.length) return;
  fill($("grid-run"), runs.map((run) => run.name));
  $("grid-run-label").hidden = runs.length < 2;
  const fillGrids = () => fill($("grid-metric"), runs[$("grid-run").selectedIndex].grids.map((grid) => grid.name));
  $("grid-run").onchange = () => { fillGrids(); chooseGrid(); };
  $("grid-metric").onchange = chooseGrid;
  $("grid-step").oninput = showGrid;
  choose($("grid-run"), "grid-run");
  fillGrids();
  choose($("grid-metric"), "grid");
  chooseGrid(asked.get("at"));
}

function chooseGrid(moment) {
  $("grid-step").max = gridChosen().steps.length - 1;
  $("grid-step").value = typeof moment === "string" ? moment : $("grid-step").max;
  showGrid();
}

function showGrid() {
  const grid = gridChosen(), moment = Number($("grid-step").value);
  $("grid-step-name").textContent = shownStep(grid.steps[moment]);
  $("grid-step").setAttribute("aria-valuetext", shownStep(grid.steps[moment]));
  const onClick = (event) => { $("grid-step").value = grid.steps.indexOf(event.points[0].x); showGrid(); };
  plotInto($("grid-map"), gridMap(grid, moment, onClick));
  plotInto($("grid-bars"), gridBars(grid, moment));
  keepInUrl();
}
