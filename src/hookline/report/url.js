// What the reader has chosen, in the address: a link to the page shows what its sender saw.

const asked = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : ""); // what the link asks for
const FOCUS = ["open", "run", "step"]; // the metric in a window of its own; the other names are of choices
let soonInUrl, seenInUrl = location.hash; // the address that the page wrote or followed last

/** Everything that is not as it is at first, by name. */
function chosenNow() {
  const found = new URLSearchParams();
  const put = (name, value, usual) => { if (value !== usual && value !== undefined && value !== null) found.set(name, value); };
  put("x", state.axis, "step");
  put("y", state.scale, "linear");
  put("smooth", String(state.smoothing), "0");
  put("find", $("search").value.trim(), "");
  put("hide", [...state.hidden].sort((a, b) => a - b).join(","), "");
  put("base", state.base === null ? null : String(state.base), null);
  put("sort", state.sort, null);
  const { group, statistic } = mapParts();
  if (group && statistic) {
    put("map-run", $("map-run").value, $("map-run").options[0].value);
    put("map", group.name, $("map-group").options[0].value);
    put("stat", statistic.name, group.statistics[0].name);
    put("layer", state.layer, group.layers[0]);
    put("mark", state.mark === null ? null : String(state.mark), null);
    put("colour", $("map-colour").value, "auto");
  }
  const grid = gridChosen();
  if (grid) {
    put("grid-run", $("grid-run").value, $("grid-run").options[0].value);
    put("grid", grid.name, $("grid-metric").options[0].value);
    put("at", $("grid-step").value, $("grid-step").max);
  }
  return found;
}

/** Write the choices into the address. A slider moves often and browsers limit this, so it waits a little. */
function keepInUrl() {
  clearTimeout(soonInUrl);
  soonInUrl = setTimeout(writeUrl, 200);
}

function writeUrl() {
  clearTimeout(soonInUrl);
  if (location.hash !== seenInUrl) return; // a link was pressed just now: `followAddress` comes next
  const found = chosenNow();
  for (const [name, value] of Object.entries(state.open ?? {})) found.set(name, value);
  const hash = found.toString();
  if (location.hash.slice(1) !== hash) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  seenInUrl = location.hash;
}

/** The address was changed, by a link in the page or by the reader. */
function followAddress() {
  seenInUrl = location.hash;
  const wanted = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const focus = wanted.get("open");
  for (const name of FOCUS) wanted.delete(name);
  if (wanted.size && wanted.toString() !== chosenNow().toString()) return location.reload(); // another's choices
  if (focus !== null) followLink();
  else if ($("focus").open) $("focus").close();
  keepInUrl();
}
