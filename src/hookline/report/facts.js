// What the run was and what looks wrong: the top of the page, anomalies, hooks, facts. Text goes in as text, never as HTML.
// Takes the runs that page.js has unpacked; draws no plots.

// -- the top ---------------------------------------------------------------------------------------------

function showHead() {
  const [run] = page.runs, head = $("head");
  head.replaceChildren();
  if (page.runs.length > 1) {
    head.append(make("h1", {}, plural(page.runs.length, "run")), ...differences(), runTable());
  } else {
    const status = run.facts.status;
    head.append(make("h1", {}, run.name, " ", status ? make("span", { class: `status ${status}` }, status) : null));
    const where = [run.facts.model?.class, run.facts.device, dtypeOf(run), whenStarted(run)].filter(Boolean);
    head.append(make("p", { class: "where" }, where.join(" · ")));
    const tiles = tilesOf(run).map(([name, value]) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value)));
    if (tiles.length) head.append(make("dl", { class: "tiles" }, ...tiles));
  }
  for (const run of page.runs) {
    for (const text of remarksOf(run)) head.append(make("p", { class: "remark" }, page.runs.length > 1 ? `${run.name}: ` : "", text));
  }
}

function remarksOf(run) {
  const going = seconds ? null : "This run was going when the page was made; make it again for what came since.";
  const again = run.facts.options?.command ? "." : "; hookline run --resume goes on from its last checkpoint.";
  const stopped = `This run was stopped before its end${again}`;
  return [run.facts.status === "running" ? going : run.facts.status === "stopped" ? stopped : null, ...run.remarks].filter(Boolean);
}

/** The type of the weights, and the one that autocast computes in. */
function dtypeOf({ facts }) {
  return facts.autocast ? `${facts.dtype ?? "?"}, autocast ${facts.autocast}` : facts.dtype;
}

function whenStarted(run) {
  const known = run.facts.started && !Number.isNaN(new Date(run.facts.started).getTime());
  return known ? shownTime(run.facts.started) : null;
}

function numSteps(run) {
  return run.facts.result?.steps ?? Math.max(0, ...run.curves.map((curve) => curve.steps.at(-1) + 1), 1 + (run.clock.steps.at(-1) ?? -1));
}

function lastOf(run, name) {
  const curve = run.byName.get(name);
  return curve ? curve.values.at(-1) : undefined;
}

function duration(run) {
  return run.facts.seconds ?? run.clock.seconds.at(-1);
}

function hookShare(run) {
  const seconds = duration(run), costs = Object.values(run.facts.hooks ?? {}).map((hook) => hook?.cost?.total_ms ?? 0);
  return costs.length && seconds ? costs.reduce((a, b) => a + b, 0) / 1000 / seconds : null;
}

/** The share of firings; what hooks do inside the forward and backward pass is in none, so it may be more. */
function hooksTook(run) {
  const share = hookShare(run), inside = Object.values(run.facts.hooks ?? {}).some((hook) => hook?.inside_steps);
  return share === null ? undefined : `${inside ? "at least " : ""}${shownShare(share)}`;
}

/** What a watch was allowed, and what it took. */
function budgetOf(run, of) {
  const asked = lastOf(run, `budget/${of}/asked`), actual = lastOf(run, `budget/${of}/actual`);
  const whole = lastOf(run, `budget/${of}/whole_run`), ofRun = typeof whole === "number" ? `; ${shownShare(whole)} of the whole run` : "";
  return typeof asked === "number" ? `${shownShare(asked)}, took ${typeof actual === "number" ? shownShare(actual) : "?"}${ofRun}` : undefined;
}

function budgetedWatches(run) {
  return [...run.byName.keys()].map((name) => /^budget\/(.+)\/asked$/.exec(name)?.[1]).filter(Boolean);
}

function tilesOf(run) {
  const result = run.facts.result ?? {};
  const figures = Object.entries(result.metrics ?? {}).filter(([, value]) => typeof value === "number").slice(0, 3);
  const tiles = [
    ["Loss", result.loss ?? lastOf(run, "train/loss") ?? lastOf(run, "training_metrics/loss")],
    ...figures,
    ["Steps", numSteps(run) || undefined],
    ["Epochs", run.clock.epochs ? result.epochs ?? Math.floor(run.clock.epochs.at(-1)) : undefined],
    ["Duration", duration(run) ? shownDuration(duration(run)) : undefined],
    ["Parameters", run.facts.model?.parameters],
    ["Hooks took", hooksTook(run)],
    ...budgetedWatches(run).map((name) => [`Budget of ${name}`, budgetOf(run, name)]),
  ].filter(([, value]) => value !== undefined && value !== null);
  return tiles.map(([name, value]) => [name, shown(value)]);
}

/** A table that scrolls by itself when it is wider than the page; `numbers` are the columns that hold them. */
function table(kind, names, rows, numbers = []) {
  const head = names.map((name, i) => make("th", { scope: "col", class: numbers.includes(i) ? "number" : undefined }, name));
  return make("div", { class: "scroll" },
    make("table", { class: kind }, head.length ? make("thead", {}, make("tr", {}, ...head)) : null, make("tbody", {}, ...rows)));
}

function paintSwatches() {
  for (const swatch of document.querySelectorAll("[data-run]")) swatch.style.background = runColour(page.runs[swatch.dataset.run]);
}

// -- anomalies -------------------------------------------------------------------------------------------

const WORTH = { error: 0, warning: 1, notice: 2 };
const RULES = "NaN and Inf, spikes of losses and gradients, falls of accuracy, a loss that rises, exploding norms, dead units, vanishing gradients";

/** What could be judged: a curve of a few points cannot, and what was not recorded was not looked at. */
function lookedAt() {
  const counts = new Map();
  for (const run of page.runs) for (const [kind, count] of run.looked.kinds) counts.set(kind, (counts.get(kind) ?? 0) + count);
  const short = page.runs.reduce((sum, run) => sum + run.looked.short, 0);
  const many = { loss: "losses", accuracy: "accuracies" };
  const found = [...counts].map(([kind, count]) => (count ? plural(count, kind, many[kind]) : `no ${kind}`)).join(", ");
  return `Looked for: ${RULES}. There were ${found} long enough to judge${short ? `; ${shown(short)} had too few points` : ""}.`;
}

function showAnomalies() {
  const all = page.runs.flatMap((run) => run.anomalies.map((finding) => ({ run, ...finding })));
  all.sort((a, b) => WORTH[a.level] - WORTH[b.level]);
  $("findings").replaceChildren(...all.map(findingBox), ...page.runs.filter((run) => run.looked.why).map(unjudgedBox),
    ...(all.length || !page.runs.some(wasJudged) ? [] : [quietBox()]));
}

const wasJudged = (run) => run.looked.kinds.some(([, count]) => count);

/** A run that could not be judged is not said to be well. */
function unjudgedBox(run) {
  const name = page.runs.length > 1 ? make("span", { class: "run" }, run.name) : null;
  return make("div", { class: "finding notice" }, make("div", { class: "finding-head" },
    make("b", {}, wasJudged(run) ? "Could not judge the loss" : "Could not judge"), make("span", {}, `${run.looked.why}.`), name));
}

function quietBox() {
  const allJudged = page.runs.every((run) => !run.looked.why);
  return make("p", { class: `finding ${allJudged ? "all-well" : "notice"}` },
    `Nothing unusual was found${allJudged ? "" : " in what could be judged"}. ${lookedAt()}`);
}

function findingBox(finding) {
  const head = make("div", { class: "finding-head" }, make("b", {}, finding.title), make("span", {}, finding.text),
    page.runs.length > 1 ? make("span", { class: "run" }, finding.run.name) : null);
  const items = finding.sights.map((sight) => make("li", {},
    make("a", { href: linkTo(sight.metric, finding.run, sight.step), class: "sight" }, sight.metric), " ",
    make("span", {}, `${shownStep(sight.step)}: ${sight.text}`)));
  const box = make("div", { class: `finding ${finding.level}`, "data-title": finding.title }, head);
  if (items.length) box.append(make("ul", { class: "sights" }, ...items.slice(0, 4)));
  if (items.length > 4) {
    const unnamed = finding.more ? make("p", { class: "note" }, `and ${shown(finding.more)} more`) : null;
    const summary = make("summary", {}, `${shown(items.length - 4 + finding.more)} more`);
    box.append(make("details", {}, summary, make("ul", { class: "sights" }, ...items.slice(4)), unnamed));
  }
  return box;
}

// -- hooks and facts -------------------------------------------------------------------------------------

const HOOK_COLUMNS = ["Hook", "Fired", "In all", "Each time", "Of the run", "What it does"];

function showHooks() {
  $("hook-tables").replaceChildren();
  const runs = runsWith((run) => Object.keys(run.facts.hooks ?? {}).length);
  const unknown = "What hooks there were, and what they cost, is not known: run.json says nothing of them.";
  if (!runs.length) $("hook-tables").append(make("p", { class: "empty" }, unknown));
  for (const run of runs) {
    const hooks = Object.entries(run.facts.hooks).sort(([, a], [, b]) => (b.cost?.total_ms ?? 0) - (a.cost?.total_ms ?? 0));
    const rows = hooks.map(([name, hook]) => hookRow(name, hook, duration(run)));
    const box = table("hooks", HOOK_COLUMNS, rows, [1, 2, 3, 4]);
    const folded = () => make("details", { class: "of-run", open: run === runs[0] }, make("summary", {}, make("h3", {}, run.name)), box);
    $("hook-tables").append(page.runs.length > 1 ? folded() : box);
  }
}

function hookRow(name, hook, seconds) {
  const cost = hook.cost ?? {}, share = seconds && typeof cost.total_ms === "number" ? cost.total_ms / 1000 / seconds : null;
  const bar = make("span", { class: "share", "aria-hidden": true }, make("i", { style: `width:${Math.min(100, 100 * (share ?? 0))}%` }));
  const metrics = (hook.metrics ?? []).map((metric) => make("li", {}, make("code", {}, metric.name),
    metric.description ? ` – ${metric.description}` : "", metric.formula ? make("div", { class: "mono note" }, metric.formula) : null));
  const about = metrics.length
    ? make("details", {}, make("summary", {}, plural(metrics.length, "metric")), make("ul", {}, ...metrics)) : null;
  const number = (label, ...text) => make("td", { class: "number", "data-label": label }, ...text); // the label is for phones
  return make("tr", {},
    make("th", { scope: "row" }, name, hook.kind ? make("div", { class: "kind note" }, hook.kind) : null),
    number(HOOK_COLUMNS[1], shown(hook.fired ?? cost.count)),
    number(HOOK_COLUMNS[2], shownMilliseconds(cost.total_ms)),
    number(HOOK_COLUMNS[3], shownMilliseconds(cost.mean_ms)),
    number(HOOK_COLUMNS[4], share === null ? "–" : shownShare(share), share === null ? null : bar,
      hook.inside_steps ? make("div", { class: "note" }, "without its work inside steps") : null),
    make("td", {}, hook.description ?? "", about));
}

/** Facts by part: those of the run itself, then each that has several in it (config, versions, …). */
function partsOf(run) {
  const parts = new Map([["run", new Map([["folder", run.folder], ["records", shown(run.records)]])]]);
  for (const [name, value] of Object.entries(run.facts)) {
    if (name === "hooks") continue; // in a table of their own
    const isSet = ([, text]) => name !== "options" || !["false", "–", "", "default"].includes(text); // most flags never are
    if (isObject(value)) parts.set(name, new Map(flattened(value).filter(isSet)));
    else parts.get("run").set(name, asFact(name, value));
  }
  if (Object.keys(run.words).length) parts.set("text metrics", new Map(Object.entries(run.words)));
  return parts;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function flattened(facts, prefix = "") {
  return Object.entries(facts).flatMap(([name, value]) =>
    isObject(value) ? flattened(value, `${prefix}${name}.`) : [[prefix + name, asFact(name, value)]]);
}

function asFact(name, value) {
  if (name === "command" && Array.isArray(value)) return value.join(" ");
  if (name === "seconds" && typeof value === "number") return shownDuration(value);
  if (value === null) return "–";
  if (Array.isArray(value)) return value.map((item) => (typeof item === "object" ? JSON.stringify(item) : item)).join(", ");
  // A seed or a size is to be read, and copied, as it was given.
  return typeof value === "number" && Number.isInteger(value) ? String(value) : shown(value);
}

/** The facts: of several runs, what differs in one table with a column for each, then what is the same in all of them. */
function showFacts() {
  const runs = page.runs.map(partsOf), several = runs.length > 1;
  const differ = [], boxes = [];
  for (const part of new Set(runs.flatMap((run) => [...run.keys()]))) {
    const tables = runs.map((run) => run.get(part) ?? new Map()), same = [];
    for (const name of new Set(tables.flatMap((facts) => [...facts.keys()]))) {
      const values = tables.map((facts) => facts.get(name) ?? "–");
      if (new Set(values).size > 1) differ.push(factRow(part === "run" ? name : `${part}.${name}`, values, "differs"));
      else same.push(factRow(name, values.slice(0, 1)));
    }
    if (same.length) boxes.push(make("div", { class: "part" }, make("h3", {}, part), table("facts", [], same)));
  }
  const first = several ? [make("h3", {}, differ.length ? "What differs" : "Nothing differs"),
    differ.length ? table("facts", ["", ...page.runs.map((run) => run.name)], differ) : null, make("h3", {}, "The same in all runs")] : [];
  $("fact-table").replaceChildren(...first.filter(Boolean), make("div", { class: "parts" }, ...boxes));
}

function factRow(name, values, kind) {
  return make("tr", { class: kind }, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value)));
}
