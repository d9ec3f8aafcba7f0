// What a plot can be saved as: a picture, or the numbers behind it. Both are named after the metric.

/** A metric's name as the name of a file. */
const fileName = (name) => name.replace(/[^\p{L}\p{N}.-]+/gu, "_").replace(/^_+|_+$/g, "") || "plot";

/** A plot as "png" or "svg", on the ground it has here: light text on no ground would be lost on paper. */
function saveImage(element, format) {
  const { width, height } = element.getBoundingClientRect(), { data, layout } = element;
  const figure = { data, layout: { ...layout, paper_bgcolor: colour("ground") }, config: { plotlyServerURL: "" } };
  return Plotly.downloadImage(figure, { format, scale: format === "png" ? 2 : 1, width, height, filename: fileName(plots.get(element).file.name) });
}

// Functions of their own: were they made anew for each drawing, plotly would take its settings for others, and begin afresh.
const savePng = (element) => saveImage(element, "png");
const saveSvg = (element) => saveImage(element, "svg");

function saveNumbers(element) {
  const { name, table } = plots.get(element).file;
  const lines = table().map((row) => row.map(inCsv).join(","));
  const url = URL.createObjectURL(new Blob([lines.join("\r\n"), "\r\n"], { type: "text/csv" }));
  make("a", { href: url, download: `${fileName(name)}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function inCsv(value) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value)) return String(value);
  if (Number.isFinite(value)) return String(Number(value.toPrecision(7))); // all that single precision holds
  if (typeof value === "number") return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  return /[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
}

/** Columns by step: every step that any of `columns` has, each with its value there; a column is { name, steps, values }. */
function tableOf(columns) {
  const steps = [...new Set(columns.flatMap((column) => [...column.steps]))].sort((a, b) => a - b);
  const found = columns.map(({ steps: own, values }) => new Map(Array.from(own, (step, i) => [step, values[i]])));
  return [["step", ...columns.map((column) => column.name)], ...steps.map((step) => [step, ...found.map((column) => column.get(step))])];
}
