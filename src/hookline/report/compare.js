// Several runs side by side: what differs, a table of what came out, which sorts, and a legend, which hides runs.

const SETTINGS = ["model", "versions", "git"]; // parts of the facts of which all entries are settings
const SINGLE = ["experiment", "strategy", "seed", "device", "dtype", "optimizer", "ranks"];
/** Options that are about files, the screen and going on, or that facts have under a name of their own; not how a run trains. */
const NO_SETTINGS = new Set(["command", "output_dir", "name", "console", "show", "live", "silent", "no_console_output", "no_report", "record_trajectory",
  "save_checkpoints", "validate_checkpoints", "run_group", ...SINGLE]);
const IS_SINK = /^sinks(\.|$)|^hook_(csv|jsonl|parquet|tensorboard|mlflow|wandb|prometheus|sink)$/;

function settingsOf(run) {
  const part = (name, prefix = "") => (isObject(run.facts[name]) ? entriesOf(run.facts[name], prefix) : []);
  const own = [...SINGLE.filter((name) => name in run.facts).map((name) => [name, run.facts[name]]), ...part("config")];
  const known = new Set([...NO_SETTINGS, ...own.map(([name]) => name)]);
  const options = part("options").map(([name, value]) => [name.replace(/^(flags|loop|hook_config|hooks\.config)\./, ""), value])
    .filter(([name, value]) => !known.has(name) && !IS_SINK.test(name) && !isNothing(value));
  return new Map([...own, ...options, ...SETTINGS.flatMap((name) => part(name, `${name}.`))]);
}

const isNothing = (value) => value === null || value === false || (Array.isArray(value) && !value.length);

const entriesOf = (facts, prefix) => Object.entries(facts).flatMap(([name, value]) =>
  (isObject(value) ? entriesOf(value, `${prefix}${name}.`) : [[prefix + name, value]]));

const isGiven = (name) => !SETTINGS.some((part) => name.startsWith(`${part}.`));

/** Columns of settings that are not the same in all runs; those that somebody gave come first. */
function differing() {
  const settings = page.runs.map(settingsOf), names = [...new Set(settings.flatMap((own) => [...own.keys()]))];
  return names.sort((a, b) => isGiven(b) - isGiven(a)).filter((name) => new Set(settings.map((own) => JSON.stringify(own.get(name)))).size > 1)
    .map((name) => ({ name, kind: "setting", values: settings.map((own) => own.get(name)) }));
}

/** A short table of the settings that differ, with a column for each run; the facts at the end of the page have all. */
function differences() {
  const rows = differing().map(({ name, values }) => make("tr", {}, make("th", { scope: "row" }, name),
    ...values.map((value) => make("td", {}, value === undefined ? "–" : asFact("", value)))));
  if (!rows.length) return [];
  const box = table("facts differences", ["", ...page.runs.map((run) => run.name)], rows);
  box.querySelectorAll("thead th").forEach((cell, i) => { if (i) cell.prepend(make("span", { class: "swatch", "data-run": i - 1 })); });
  box.querySelector("table").prepend(make("caption", {}, "What differs"));
  box.classList.add("narrow");
  return [box];
}

const isAccuracy = (name) => /(^|[/_])(acc|accuracy)$|(^|\/)top[15]$/.test(name);
const isLoss = (name) => /(^|[/_])loss$/.test(name);

/** Columns of what came out, accuracies first: of accuracies and losses the last and the best, of other evaluations the last. */
function outcomes() {
  const names = metricNames(false).filter((name) => ["train", "eval"].includes(hookOf(name)) || name === "training_metrics/loss");
  const short = (name) => name.slice(hookOf(name).length + 1), isAlone = (name) => names.filter((other) => short(other) === short(name)).length === 1;
  const found = names.sort((a, b) => isAccuracy(b) - isAccuracy(a)).flatMap((name) => {
    const label = isAlone(name) ? short(name) : name, curves = page.runs.map((run) => run.byName.get(name));
    const last = { name: label, values: curves.map((curve) => curve?.values.at(-1)) };
    if (!isAccuracy(name) && !isLoss(name)) return [last];
    return [last, { name: `best ${label}`, values: curves.map((curve) => bestOf(curve, isAccuracy(name) ? Math.max : Math.min)) }];
  });
  const losses = page.runs.map((run) => run.facts.result?.loss); // of runs that recorded no curve of it
  return found.some((column) => isLoss(column.name)) || !losses.some(Number.isFinite) ? found : [...found, { name: "loss", values: losses }];
}

const bestOf = (curve, better) => curve?.values.reduce((best, value) =>
  (Number.isFinite(value) ? (best === undefined ? value : better(best, value)) : best), undefined);

function runColumns() {
  const column = (name, of, text = shown) => ({ name, values: page.runs.map(of), text });
  return [...differing(), ...outcomes(), column("steps", numSteps), column("duration", duration, shownDuration),
    column("findings", (run) => run.anomalies.length)];
}

/** The table of runs; a press on the name of a column sorts by it, another turns it round. */
function runTable() {
  const columns = runColumns(), texts = columns.filter((column) => column.values.some((value) => typeof value === "string"));
  const head = [{ name: "run", values: page.runs.map((run) => run.name) }, { name: "status", values: page.runs.map((run) => run.facts.status) }, ...columns];
  const rows = page.runs.map((run) => make("tr", { "data-row": run.index },
    make("th", { scope: "row" }, runButton(run)), make("td", {}, run.facts.status ?? "–"),
    ...columns.map(({ values, text, kind }) => make("td", { class: texts.some((own) => own.values === values) ? kind : `number ${kind ?? ""}` },
      (text ?? asCell)(values[run.index])))));
  const box = table("runs", head.map((column) => column.name), rows, head.map((column, i) => (i < 2 || texts.includes(column) ? -1 : i)));
  box.querySelectorAll("thead th").forEach((cell, i) => {
    cell.replaceChildren(make("button", { type: "button", class: "sort", onclick: () => sortRuns(box, head, i) }, head[i].name));
  });
  const first = head.findIndex((column) => column.name === (state.sort ?? "").replace(/^-/, ""));
  if (first >= 0) showSorted(box, head[first], first, state.sort.startsWith("-"));
  const same = differing().length ? "" : "All settings that are known are the same. ";
  return make("div", {}, box, make("p", { class: "note" }, `${same}A press on a column sorts by it; a press on a run hides it in all curves.`));
}

const asCell = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? shown(value) : asFact("", value));

function sortRuns(box, head, i) {
  const { name } = head[i];
  state.sort = state.sort === name ? `-${name}` : name;
  showSorted(box, head[i], i, state.sort.startsWith("-"));
  keepInUrl();
}

/** Rows by one column; those that have nothing there come last, whichever way round. */
function showSorted(box, { values }, i, isDown) {
  const known = (value) => value !== undefined && value !== null && !Number.isNaN(value);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  const order = page.runs.map((run) => run.index).sort((a, b) =>
    (known(values[a]) && known(values[b]) ? (isDown ? -1 : 1) * compare(values[a], values[b]) : known(values[b]) - known(values[a])));
  const body = box.querySelector("tbody");
  body.append(...order.map((index) => body.querySelector(`[data-row="${index}"]`)));
  box.querySelectorAll("thead th").forEach((cell, at) => {
    if (at === i) cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

// -- the legend ------------------------------------------------------------------------------------------

/** The name of a run as a button that hides it, or shows it again. */
function runButton(run) {
  return make("button", { type: "button", class: "run-name", "data-toggle": run.index, "aria-pressed": String(!state.hidden.has(run.index)),
    title: "Hide or show this run in all curves", onclick: () => toggleRun(run) },
  make("span", { class: "swatch", "data-run": run.index }), run.name);
}

function toggleRun(run) {
  if (!state.hidden.delete(run.index)) state.hidden.add(run.index);
  for (const button of document.querySelectorAll(`[data-toggle="${run.index}"]`)) button.setAttribute("aria-pressed", String(!state.hidden.has(run.index)));
  redraw();
  keepInUrl();
}

function showLegend() {
  if (page.runs.length > 1) $("legend").replaceChildren(...page.runs.map(runButton));
  $("base-label").hidden = page.runs.length < 2;
  fill($("base"), [["", "none"], ...page.runs.map((run) => [run.index, run.name])], state.base ?? "");
}

/** Another run to compare with, or none: maps and the scale depend on it, beside all curves. */
function showBase() {
  for (const input of document.querySelectorAll("input[name=y]")) input.disabled = state.base !== null;
  if (!$("layers").hidden) showMap();
  keepInUrl();
}
