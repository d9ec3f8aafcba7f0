// Metrics as cards, and one of them in a window of its own.

const CARDS_AT_FIRST = 6; // of one hook; the rest at a press
const CARDS_FOUND = 60; // of a search
const CARDS_UNFOLDED = 18; // of all hooks that have a set of their own
const FIRST = ["train", "eval", "training_metrics", "norms"]; // how training goes
let numOpen = 0;

// -- metrics ---------------------------------------------------------------------------------------------

/** Names of all metrics, losses and evaluations first; those of single layers only if asked for, twins under one name. */
function metricNames(withLayers) {
  const names = new Set(), isOwn = (curve) => curve.same === undefined && (withLayers || curve.layer === undefined);
  for (const run of page.runs) for (const curve of run.curves) if (isOwn(curve)) names.add(curve.name);
  const place = (hook) => (FIRST.includes(hook) ? FIRST.indexOf(hook) : hook === "initial" ? 9 : FIRST.length);
  const worth = (name) => place(hookOf(name)) - (/loss|grad_norm$/.test(name) ? 0.5 : 0);
  return [...names].sort((a, b) => worth(a) - worth(b)); // among equals, as they were first seen
}

/** Other names of the same curve, as a hook may report what the evaluation found. */
const twinsOf = (name) => [...new Set(page.runs.flatMap((run) => run.curves.filter((curve) => curve.same === name).map((curve) => curve.name)))];

const opened = new Set(); // hooks of which all cards are shown
const folded = new Map(); // by hook, whether its cards are folded, once the reader or the page has folded or unfolded them

/** The curves of a metric, of all runs that have it. */
const curvesOf = (name) => page.runs.map((run) => run.byName.get(name)).filter(Boolean);

function showCards() {
  for (const element of $("cards").querySelectorAll(".plot")) forget(element);
  const searching = state.words.length > 0;
  let names = metricNames(searching);
  const total = names.length;
  const isFound = (name) => state.words.every((word) => name.toLowerCase().includes(word));
  names = names.filter((name) => isFound(name) || (searching && twinsOf(name).some(isFound)));
  const layered = page.runs.some((run) => run.groups.length);
  const hint = layered && !searching && total ? "Metrics of single layers are in the map below; a search finds them as well." : "";
  const cut = names.length > CARDS_FOUND && searching ? `, the first ${CARDS_FOUND} are shown` : "";
  $("search-result").textContent = searching ? `${shown(names.length)} of ${plural(total, "metric")}${cut}` : hint;
  if (searching) names = names.slice(0, CARDS_FOUND);
  const empty = searching ? "No metric matches." : "No metrics have been recorded.";
  const sets = searching ? [[null, names]] : cardSets(names);
  numOpen = 0;
  $("cards").replaceChildren(...(names.length ? sets.map(([hook, own]) => cardSet(hook, own)) : [make("p", { class: "empty" }, empty)]));
}

/** How training goes, and hooks with few metrics, are the first set; each of the others has its own, under its name. */
function cardSets(names) {
  const hooks = new Map();
  for (const name of names) hooks.set(hookOf(name), [...(hooks.get(hookOf(name)) ?? []), name]);
  const isFirst = ([hook, own]) => FIRST.includes(hook) || own.length < 4;
  const few = [...hooks].filter(isFirst).flatMap(([, own]) => own);
  return [...(few.length ? [[null, few]] : []), ...[...hooks].filter((set) => !isFirst(set))];
}

const hookOf = (name) => (name.includes("/") ? name.split("/")[0] : "");

/** One set; further down the page they are folded, so that what comes after is not far away. */
function cardSet(hook, names) {
  const few = hook === null || opened.has(hook) ? names : names.slice(0, CARDS_AT_FIRST);
  const isOpen = hook === null || opened.has(hook) || (numOpen += few.length) <= CARDS_UNFOLDED;
  const count = make("span", { class: "note" }, ` ${plural(names.length, "metric")}`);
  const cards = make("div", { class: "cards" }, ...few.map(card));
  const ontoggle = (event) => { folded.set(hook, !event.target.open); };
  const box = hook === null ? make("div", { class: "set" }, cards)
    : make("details", { class: "set", open: folded.has(hook) ? !folded.get(hook) : isOpen, ontoggle }, make("summary", {}, make("h3", {}, hook), count), cards);
  if (few.length < names.length) {
    const more = () => { opened.add(hook); showCards(); };
    box.append(make("button", { type: "button", class: "more", onclick: more }, `Show all ${names.length} of ${hook}`));
  }
  return box;
}

function card(name) {
  const plot = make("div", { class: "plot", role: "img", "aria-label": `Plot of ${name}` });
  const onclick = () => { location.hash = linkTo(name); }, twins = twinsOf(name);
  const open = make("button", { type: "button", class: "quiet open", "aria-label": `Open ${name}`, onclick }, "⤢");
  plotInto(plot, curvePlot(() => curvesOf(name), { small: true }));
  const hook = name.includes("/") ? `${hookOf(name)}/` : "";
  const title = make("h4", { title: [name, ...twins].join(", also ") }, make("span", {}, hook), name.slice(hook.length));
  return make("article", { class: "card", "data-metric": name },
    make("div", { class: "card-head" }, title, make("span", { class: "last" }, lastText(name)), open), plot);
}

/** The last value, if there is one curve alone. */
function lastText(name) {
  const curves = curvesOf(name);
  return curves.length === 1 ? shown(curves[0].values.at(-1)) : "";
}

/** A few choices side by side, of which one holds. */
function choice(fieldset, name, options, chosen, onChoose) {
  const box = make("div", { class: "choice" }, ...options.map(([value, text]) => make("label", {},
    make("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onChoose(value) }), make("span", {}, text))));
  fieldset.append(box);
}

// -- one metric in a window of its own -------------------------------------------------------------------

function linkTo(metric, run, step) {
  const parts = { open: metric, ...(run ? { run: run.index } : {}), ...(step === undefined ? {} : { step }) };
  return `#${new URLSearchParams(parts)}`;
}

function followLink() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const name = wanted.get("open"), run = page.runs[wanted.get("run") ?? 0];
  const step = wanted.has("step") ? Number(wanted.get("step")) : null;
  const curves = curvesOf(name);
  if (!curves.length || !run) return;
  state.open = Object.fromEntries(FOCUS.filter((key) => wanted.has(key)).map((key) => [key, wanted.get(key)]));
  $("focus-title").textContent = name;
  $("focus-text").textContent = step === null ? "" : `The line is at ${shownStep(step)}${page.runs.length > 1 ? ` of ${run.name}` : ""}.`;
  showAbout(name, curves);
  const place = placeOnMap(run, name);
  $("focus-map").hidden = place === null;
  if (place !== null && step !== null) chooseOnMap(run, place, step);
  if (!$("focus").open) $("focus").showModal();
  const mark = step === null ? null : { run: run.index, step };
  plotInto($("focus-plot"), curvePlot(() => curvesOf(name), { mark }), { now: true });
  keepInUrl();
}

function showAbout(name, curves) {
  $("focus-about").replaceChildren(...about(name, curves).flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]));
}

/** Leave the window of a metric for its layer on the map. */
function goToMap() {
  const { open, run = 0, step } = state.open;
  chooseOnMap(page.runs[run], placeOnMap(page.runs[run], open), step === undefined ? state.mark : Number(step));
  $("focus").close();
  $("layers").scrollIntoView();
  $("row-layer").focus({ preventScroll: true });
}

/** What the hook says of a metric, and what it came to. */
function about(name, curves) {
  const info = infoOf(name) ?? {};
  const told = [["Meaning", info.description], ["Formula", info.formula], ["Sign", info.sign_info]].filter(([, text]) => text);
  const ends = curves.map((curve) => {
    const finite = Array.from(curve.values).filter(Number.isFinite);
    const least = finite.reduce((a, b) => Math.min(a, b), Infinity), most = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    const range = finite.length ? `, from ${shown(least)} to ${shown(most)}` : "";
    const text = `${plural(curve.values.length, "point")}, last ${shown(curve.values.at(-1))}${range}`;
    return [page.runs.length > 1 ? curve.run.name : "Values", text];
  });
  const twins = twinsOf(name);
  return [...told, ...ends, ...(twins.length ? [["The same as", twins.join(", ")]] : [])];
}

function infoOf(name) {
  for (const run of page.runs) {
    const hook = run.facts.hooks?.[name.split("/")[0]], rest = name.split("/").slice(1).join("/");
    const found = (hook?.metrics ?? []).find((metric) => metric.name === rest || metric.name === name);
    if (found) return found;
  }
  return null;
}

function leaveFocus() {
  state.open = null;
  writeUrl();
}
