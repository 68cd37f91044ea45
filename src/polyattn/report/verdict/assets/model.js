// The rows of the comparison as columns, and what is said of one of them.
const data = JSON.parse(document.getElementById("data").textContent);
const count = data.rows.module.length;

const numeric = (column) => column.map((value) =>
  value === "inf" ? Infinity : value === "nan" ? NaN : value);
const rows = { ...data.rows };
for (const name of ["in", "out", "inherited", "added", "threshold"]) rows[name] = numeric(rows[name]);

// The most severe first. A module shows the most severe of its calls.
const SEVERITY = ["culprit", "differs", "inherited", "cannot say", "extra", "missing", "same", "not compared"];
const COLOURS = {
  culprit: "--culprit", differs: "--differs", inherited: "--inherited", "cannot say": "--unsure", extra: "--other",
  missing: "--other", same: "--same", "not compared": "--other",
};
const MEANINGS = {
  culprit: "whose doing the first difference is",
  differs: "differs on its own as well, besides the culprit",
  inherited: "differs after the culprit: its inputs do, or what it is inside of",
  "cannot say": "an error as large as rounding makes it, and as faults do",
  extra: "in the port only", missing: "in the reference only",
  same: "within its threshold", "not compared": "nothing of it could be compared",
};
const verdictOf = (row) => data.words[rows.verdict[row]];
const severity = new Uint8Array(count);
for (let row = 0; row < count; row++) {
  const at = SEVERITY.indexOf(verdictOf(row));
  severity[row] = at < 0 ? SEVERITY.length - 1 : at;
}
const isCulprit = (row) => severity[row] === 0;
const agrees = (row) => severity[row] >= SEVERITY.indexOf("same");

const nameNumber = (row) => rows.module[row] >= 0 ? rows.module[row] : rows.reference[row];
const nameOf = (row) => {
  const number = nameNumber(row);
  return number < 0 ? "" : data.names[number];
};
const shown = (name) => name === "" ? "(model)" : name;
const classOf = (row) => data.words[rows.cls[row]];

// An error in units of its threshold; null where there is none.
const over = (error, threshold) => {
  if (error === null || threshold === null) return null;
  if (Number.isNaN(error)) return Infinity;
  if (threshold > 0) return threshold === Infinity ? 0 : error / threshold;
  return error > 0 ? Infinity : 0;
};
const larger = (a, b) => a === null ? b : b === null ? a : Math.max(a, b);
const ratios = new Array(count);
const worsts = new Array(count); // the larger of the errors, NaN as infinite
for (let row = 0; row < count; row++) {
  const limit = rows.threshold[row];
  ratios[row] = larger(over(rows.in[row], limit), over(rows.out[row], limit));
  const known = (error) => Number.isNaN(error) ? Infinity : error;
  worsts[row] = larger(known(rows.in[row]), known(rows.out[row]));
}

const number = (value) => {
  if (value === null) return "";
  if (Number.isNaN(value)) return "NaN";
  if (value === Infinity) return "\u221e";
  return value === 0 ? "0" : value.toExponential(1);
};
const times = (value) => {
  if (value === null) return "";
  if (value === Infinity) return "\u221e";
  if (value === 0) return "0";
  if (value >= 1e6 || value < 0.01) return value.toExponential(1);
  return value >= 100 ? String(Math.round(value)) : value.toPrecision(2);
};

// The steps of the run. Without any, the calls of the outermost module are counted instead.
const axis = (() => {
  const stepped = data.steps.length > 0;
  const group = new Int32Array(count).fill(-1);
  if (stepped) {
    group.set(rows.step);
    return { name: "step", labels: data.steps, group };
  }
  let outer = -1;
  const calls = [0, 0];
  for (let row = 0; row < count; row++) {
    if (rows.depth[row] === 0 && rows.module[row] >= 0) {
      if (outer < 0) outer = rows.module[row];
      if (rows.module[row] === outer) calls[rows.backward[row]]++;
    }
    group[row] = Math.max(0, calls[rows.backward[row]] - 1);
  }
  const labels = Array.from({ length: Math.max(1, ...calls) }, (_, at) => String(at));
  return { name: "forward", labels, group };
})();
const several = axis.labels.length > 1;
const whenOf = (row) => {
  const parts = [];
  if (axis.name === "step" && rows.step[row] >= 0) parts.push(`step ${data.steps[rows.step[row]]}`);
  parts.push(`call ${rows.call[row]}`);
  if (rows.backward[row]) parts.push("backward");
  return parts.join(", ");
};

const make = (tag, cls, text) => {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  return made;
};
const find = (id) => document.getElementById(id);
