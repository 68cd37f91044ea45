// The steps: a slider and a strip of the worst error of each, in units of its threshold.
const slider = find("axis-slider");
const axisStrip = find("axis-strip");
const worstBy = new Array(axis.labels.length).fill(null);
const hasCulprit = new Set();
for (let row = 0; row < count; row++) {
  const group = axis.group[row];
  if (group < 0) continue;
  worstBy[group] = larger(worstBy[group], ratios[row]);
  if (isCulprit(row)) hasCulprit.add(group);
}
const drawAxis = () => {
  const width = axisStrip.clientWidth, height = axisStrip.clientHeight;
  if (!width || !several) return;
  const context = sized(axisStrip, width, height);
  const each = width / axis.labels.length;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  let free = 0;
  for (const [at, ratio] of worstBy.entries()) {
    const colour = heat(ratio);
    context.fillStyle = colour === null ? palette["--grid"] : colour;
    context.fillRect(at * each, 0, Math.max(1, each - (each > 4 ? 2 : 0)), 18);
    const wide = context.measureText(axis.labels[at]).width;
    const left = (at + 0.5) * each - wide / 2;
    if (left >= free) {
      context.fillStyle = at === state.group ? palette["--ink"] : palette["--soft"];
      context.fillText(axis.labels[at], (at + 0.5) * each, 27);
      free = left + wide + 6;
    }
    if (hasCulprit.has(at)) {
      context.fillStyle = palette["--panel"];
      shape(context, "culprit", (at + 0.5) * each, 9, 5);
      context.fill();
      context.fillStyle = palette["--culprit"];
      shape(context, "culprit", (at + 0.5) * each, 9, 3.6);
      context.fill();
    }
  }
  if (state.group >= 0) {
    context.strokeStyle = palette["--ink"];
    context.lineWidth = 2;
    context.strokeRect(state.group * each + 1, 1, Math.max(2, each - 4), 16);
  }
};
const drawAxisLegend = () => {
  const context = sized(find("axis-legend"), 190, 26);
  const cells = [0, 0.01, 1, 2, 10, 100, 1e3, 1e4, 1e5, 1e6];
  const said = { 0: "0", 2: "1", 4: "10", 6: "1e3", 9: "1e6" };
  context.font = "10.5px system-ui, sans-serif";
  context.textAlign = "center";
  for (const [at, ratio] of cells.entries()) {
    context.fillStyle = heat(ratio);
    context.fillRect(at * 19, 2, 18, 11);
    context.fillStyle = palette["--soft"];
    if (said[at]) context.fillText(said[at], at * 19 + 9, 24);
  }
};
const sayAxis = () => {
  const at = state.group;
  find("axis-all").setAttribute("aria-pressed", at < 0);
  const said = at < 0
    ? `all ${axis.labels.length} ${axis.name === "step" ? "steps" : "forward passes"}`
    : `${axis.name} ${axis.labels[at]}` +
      (worstBy[at] === null ? "" : `: worst error ${times(worstBy[at])}\u00d7 its threshold`);
  find("axis-said").textContent = said;
  slider.setAttribute("aria-valuetext", said);
  slider.value = String(at);
};
const stepTo = (at) => setGroup(Math.max(0, Math.min(axis.labels.length - 1, at)));
if (several) {
  find("axis").hidden = false;
  find("axis-title").textContent = axis.name === "step" ? "Steps" : "Forward passes";
  slider.max = String(axis.labels.length - 1);
  slider.min = slider.value = "-1"; // all
  slider.setAttribute("aria-label", `Which ${axis.name} to show`);
  slider.addEventListener("input", () => setGroup(Number(slider.value)));
  find("axis-all").addEventListener("click", () => setGroup(-1));
  find("axis-back").addEventListener("click", () => stepTo(state.group < 0 ? axis.labels.length - 1 : state.group - 1));
  find("axis-on").addEventListener("click", () => stepTo(state.group + 1));
  axisStrip.addEventListener("click", (event) => {
    const at = Math.floor((event.offsetX / axisStrip.clientWidth) * axis.labels.length);
    if (at === state.group) setGroup(-1);
    else stepTo(at);
  });
  listen(() => {
    sayAxis();
    drawAxis();
    drawAxisLegend();
  });
  new ResizeObserver(drawAxis).observe(axisStrip);
}
