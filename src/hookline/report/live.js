// A page that is kept up to date by `hookline report --live`: asks the server for what is new, and draws that.
// The token comes behind the # of the address, and leaves it at once: the address can be copied, and the tab keeps the token.

const isLive = "live" in document.documentElement.dataset;
const LOOK_EVERY = 1000, LOOK_LATER = 5000, QUIET_AFTER = 60; // milliseconds; seconds without a record
let token = null, lookSoon, looking = false;

function takeToken() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  token = wanted.get("token") ?? sessionStorage.getItem("hookline-token");
  if (token) sessionStorage.setItem("hookline-token", token);
  if (!wanted.has("token")) return;
  wanted.delete("token");
  asked.delete("token");
  history.replaceState(null, "", wanted.size ? `#${wanted}` : location.pathname);
}

/** The answer of the server: { packed }, which is null if nothing is new, and the server's clock; or { problem }. */
async function ask() {
  const since = page ? `?since=${page.live.version}` : "";
  try {
    const answer = await fetch(`data${since}`, { headers: { Authorization: `Bearer ${token ?? ""}` }, cache: "no-store" });
    if (answer.status === 401) return { problem: "token" };
    if (!answer.ok) return { problem: await answer.text() };
    const now = Date.parse(answer.headers.get("Date")) / 1000;
    return { packed: answer.status === 204 ? null : new Uint8Array(await answer.arrayBuffer()), now };
  } catch {
    return { problem: "The server does not answer: hookline report --live was ended. What is here stays." };
  }
}

/** Wait for the first answer. */
async function firstData() {
  takeToken();
  for (;;) {
    if (!token) await askForToken();
    const { packed, problem, now } = await ask();
    if (packed) {
      page = await unpack(packed);
      showNews(now);
      return;
    }
    if (problem === "token") await askForToken();
    else {
      tell(problem, "error");
      await new Promise((resolve) => setTimeout(resolve, LOOK_LATER));
    }
  }
}

/** Have the reader give the token, as one who was sent the address has to. */
function askForToken() {
  const input = make("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const form = make("form", { class: "tools" }, make("label", { class: "wide" }, "Token", input), make("button", { class: "more" }, "Open"));
  $("head").replaceChildren(make("h1", {}, "This page needs its token"),
    make("p", { class: "where" }, "It is behind #token= in the address that hookline report --live printed."), form);
  input.focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      token = input.value.trim().replace(/^.*#token=/, "");
      sessionStorage.setItem("hookline-token", token);
      resolve();
    };
  });
}

/** Look for news from now on: every second while the page is seen. */
function startLive() {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  lookSoon = setTimeout(look, LOOK_EVERY);
}

async function look() {
  clearTimeout(lookSoon);
  if (document.hidden || looking) return;
  looking = true;
  const { packed, problem, now } = await ask();
  if (packed) {
    page = await unpack(packed);
    redraw(update);
  }
  if (problem) tell(problem === "token" ? "The server was started anew; open the address that it has printed." : problem, "error");
  else showNews(now);
  looking = false;
  lookSoon = setTimeout(look, problem ? LOOK_LATER : LOOK_EVERY);
}

/** Show what has come. Lists, windows, zooms and what was unfolded stay as they are. */
function update() {
  if (state.base !== null && !page.runs[state.base]) state.base = null;
  const parts = { head: showHead, findings: showAnomalies, "hook-tables": showHooks, legend: showLegend, cards: updateCards };
  for (const [id, show] of Object.entries(parts)) keepFocus($(id), show);
  showFacts();
  fillMap();
  fillGrids({ updated: true });
  keepFocus($("nav"), showNav);
  paintSwatches();
  if ($("focus").open) showAbout(state.open.open, curvesOf(state.open.open));
}

/** Make a part anew; the keyboard stays where it is in it. */
function keepFocus(part, show) {
  const all = () => [...part.querySelectorAll("button, a, summary")], at = all().indexOf(document.activeElement);
  show();
  if (at >= 0) all()[at]?.focus({ preventScroll: true });
}

/** Say how old the newest record is, and which runs have had none for long though they have not ended. */
function showNews(now) {
  const ended = ["finished", "failed", "stopped"], going = page.runs.filter((run) => !ended.includes(run.facts.status));
  const newsOf = (run) => page.live.news[run.index], ago = (run) => now - newsOf(run);
  const known = going.filter((run) => newsOf(run) !== null);
  const quiet = known.filter((run) => ago(run) > QUIET_AFTER);
  if (quiet.length) {
    const times = quiet.map((run) => `${page.runs.length > 1 ? `${run.name}: no` : "No"} news since ${shownMoment(newsOf(run), now)}`);
    tell(`${times.join("; ")}. ${quiet.length > 1 ? "These runs" : "This run"} may have been killed, or records come less often.`, "warning");
  } else {
    tell(known.length ? "Live: new records appear here by themselves." : going.length ? "Live: waiting for the first record." : "All runs have ended.", "live");
  }
}

/** The time of a moment; of one that is longer ago than half a day, with its date. */
function shownMoment(seconds, now) {
  const date = new Date(1000 * seconds);
  return now - seconds > 43200 ? date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : date.toLocaleTimeString("en-GB");
}

/** A line at the top; it is read out when it changes. */
function tell(text, kind) {
  const line = $("news");
  line.hidden = false;
  line.className = kind === "live" ? "news" : `news finding ${kind}`;
  if (line.textContent !== text) line.textContent = text;
}
