// The numbers: unpacked from the page, and what is computed from them. Nothing here touches what is shown.
// Packer in report_page.py writes what unpack() reads; the two change together.

const MISSING = -3.4028234663852886e38; // no value, in metric_series.py too

/** The bytes in an element's text, which is base64. */
function bytesIn(id) {
  const text = document.getElementById(id).textContent;
  return Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

function inflated(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** The runs in packed bytes, each curve with its steps and values. */
async function unpack(packed) {
  const buffer = await inflated(packed);
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const uneven = new Int32Array(buffer, 4 + length, header.counts.ints);
  const floats = joined(new Uint8Array(buffer, 4 + length + 4 * header.counts.ints), header.counts.floats);
  const steps = header.steps.map((list) =>
    "at" in list ? uneven.subarray(list.at, list.at + list.count)
                 : Int32Array.from({ length: list.count }, (_, i) => list.first + i * list.every));
  header.runs.forEach((run, index) => {
    run.index = index;
    for (const curve of run.curves) {
      curve.run = run;
      curve.stepList = curve.steps;
      curve.steps = steps[curve.steps];
      curve.values = floats.subarray(curve.at, curve.at + curve.steps.length);
    }
    for (const grid of run.grids) {
      grid.run = run;
      grid.steps = steps[grid.steps];
      grid.rows = grid.bins.map((_, row) => {
        const at = grid.at + row * grid.steps.length;
        const cells = floats.subarray(at, at + grid.steps.length);
        return cells.includes(MISSING) ? Array.from(cells, (value) => (value === MISSING ? null : value)) : cells;
      });
    }
    run.byName = new Map(run.curves.map((curve) => [curve.name, curve]));
  });
  return header;
}

/** Numbers out of their four planes of bytes. */
function joined(planes, count) {
  const bytes = new Uint8Array(4 * count);
  for (let k = 0; k < 4; k++) {
    const plane = planes.subarray(k * count, (k + 1) * count);
    for (let i = 0; i < count; i++) bytes[4 * i + k] = plane[i];
  }
  return new Float32Array(bytes.buffer);
}

/**
 * A curve minus another one, at those of its steps that the other reaches; between two steps of the other, its value is
 * on the line between them.
 */
function minus(curve, other) {
  if (curve.stepList === other.stepList) return { ...curve, values: curve.values.map((value, i) => value - other.values[i]) };
  const steps = [], values = [], at = other.steps, last = at.length - 1;
  let k = 0;
  curve.steps.forEach((step, i) => {
    while (k < last && at[k + 1] <= step) k++;
    if (last < 0 || step < at[0] || step > at[last]) return;
    const share = at[k] === step ? 0 : (step - at[k]) / (at[k + 1] - at[k]);
    steps.push(step);
    values.push(curve.values[i] - (share ? (1 - share) * other.values[k] + share * other.values[k + 1] : other.values[k]));
  });
  // Curves of the same two lists of steps have the same steps again.
  const stepList = `${curve.stepList} in ${other.stepList}`;
  return { ...curve, steps: Int32Array.from(steps), values: Float32Array.from(values), stepList };
}

/** Where steps are on an axis: the step itself, the epoch, or the time since the start. */
function placesOn(axis, run, steps) {
  if (axis === "step") return steps;
  const at = axis === "epoch" ? run.clock.epochs : run.clock.seconds;
  if (!at) return steps;
  const known = run.clock.steps, unit = axis === "time" ? timeUnit().seconds : 1;
  let k = 0;
  return Float64Array.from(steps, (step) => {
    while (k < known.length - 2 && known[k + 1] < step) k++;
    if (known.length < 2) return at[0] / unit;
    const share = (step - known[k]) / (known[k + 1] - known[k]);
    return (at[k] + Math.min(1, Math.max(0, share)) * (at[k + 1] - at[k])) / unit;
  });
}

/** Seconds, minutes or hours: what the longest run is best told in. */
function timeUnit() {
  const longest = Math.max(0, ...page.runs.map((run) => run.clock.seconds.at(-1) ?? 0));
  if (longest < 180) return { name: "seconds", seconds: 1 };
  return longest < 3 * 3600 ? { name: "minutes", seconds: 60 } : { name: "hours", seconds: 3600 };
}

/** A moving average whose weight falls by `weight` a point; the first points are not pulled to zero. */
function smoothed(values, weight) {
  if (!weight) return values;
  const result = new Float64Array(values.length);
  let sum = 0, total = 0;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) {
      sum = weight * sum + (1 - weight) * values[i];
      total = weight * total + (1 - weight);
      result[i] = sum / total;
    } else {
      result[i] = NaN;
    }
  }
  return result;
}

/** Of a long curve as much as a screen can show between `from` and `to`: of each stretch its smallest and largest. */
function thinned(xs, ys, from = -Infinity, to = Infinity, most = 1600) {
  let a = 0, b = xs.length;
  while (a < b && xs[a] < from) a++;
  while (b > a && xs[b - 1] > to) b--;
  a = Math.max(0, a - 1);
  b = Math.min(xs.length, b + 1);
  if (b - a <= most) return { x: xs.slice(a, b), y: ys.slice(a, b) };
  const size = Math.ceil((b - a) / (most / 2)), x = [], y = [];
  for (let start = a; start < b; start += size) {
    let low = start, high = start, gap = -1;
    for (let i = start; i < Math.min(b, start + size); i++) {
      if (!Number.isFinite(ys[i])) gap = i;
      else if (!Number.isFinite(ys[low]) || ys[i] < ys[low]) low = i;
      if (ys[i] > ys[high] || !Number.isFinite(ys[high])) high = i;
    }
    for (const i of [...new Set([low, high, gap])].filter((i) => i >= 0).sort((p, q) => p - q)) {
      x.push(xs[i]);
      y.push(ys[i]);
    }
  }
  return { x, y };
}

/** The numbers that a share `low` and `high` of the finite values lie below, from a sample. */
function spread(rows, low, high, of = (value) => value) {
  const sample = [];
  const total = rows.reduce((sum, row) => sum + row.length, 0);
  const stride = Math.max(1, Math.floor(total / 20000));
  let next = 0;
  for (const row of rows) {
    for (; next < row.length; next += stride) {
      const value = of(row[next]);
      if (Number.isFinite(value)) sample.push(value);
    }
    next -= row.length;
  }
  sample.sort((p, q) => p - q);
  const at = (share) => sample[Math.min(sample.length - 1, Math.round(share * (sample.length - 1)))];
  return sample.length ? [at(low), at(high)] : [0, 1];
}

// -- as text ---------------------------------------------------------------------------------------------

/** Four digits that matter; whole numbers whole. */
function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en-US").replace("-", "−");
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("e+", "e").replaceAll("-", "−");
}

function shownDuration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
}

function shownMilliseconds(value) {
  if (typeof value !== "number") return "–";
  if (value >= 10000) return shownDuration(value / 1000);
  return value >= 1 ? `${shown(Number(value.toPrecision(3)))} ms` : `${shown(Number((1000 * value).toPrecision(3)))} µs`;
}

function shownStep(step) {
  return step < 0 ? "before the first step" : `step ${shown(step)}`;
}

function shownShare(share) {
  return share > 0 && share < 0.0001 ? "< 0.01 %" : `${shown(Number((100 * share).toPrecision(2)))} %`;
}

function shownTime(moment) {
  return new Date(moment).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}
