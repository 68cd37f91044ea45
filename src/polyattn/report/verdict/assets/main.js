// The filter, the verdicts to show, and the start.
const chips = find("verdicts");
const counts = new Map();
for (let row = 0; row < count; row++) counts.set(verdictOf(row), (counts.get(verdictOf(row)) || 0) + 1);
const kinds = [...SEVERITY.filter((one) => counts.has(one)), ...[...counts.keys()].filter((one) => !SEVERITY.includes(one))];
const drawChips = () => {
  chips.replaceChildren(...kinds.map((verdict) => {
    const chip = make("button");
    chip.type = "button";
    chip.dataset.verdict = verdict;
    chip.title = MEANINGS[verdict] || "";
    chip.setAttribute("aria-pressed", !state.hidden.has(verdict));
    chip.append(glyph(verdict, false), make("span", "", verdict), make("span", "count", String(counts.get(verdict))));
    chip.addEventListener("click", () => {
      if (!state.hidden.delete(verdict)) state.hidden.add(verdict);
      const focused = document.activeElement === chip;
      drawChips();
      if (focused) chips.querySelectorAll("button")[kinds.indexOf(verdict)].focus();
      refilter();
    });
    return chip;
  }));
};
const clear = () => {
  state.hidden.clear();
  state.group = -1;
  drawChips();
  setText("");
};
let typing = 0;
find("filter").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => setText(event.target.value), 80);
});
find("reset").addEventListener("click", clear);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !["INPUT", "TEXTAREA"].includes(document.activeElement.tagName)) {
    event.preventDefault();
    find("filter").focus();
  }
  if (event.key === "Escape") hideTip();
});

const recolour = () => {
  repaint();
  drawChips();
  drawLegend();
  tell("colours");
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
// paper is white whatever the screen is
const print = (on) => () => {
  document.documentElement.classList.toggle("printing", on);
  recolour();
  paintCurve(); // there is no other frame before it is printed
};
window.addEventListener("beforeprint", print(true));
window.addEventListener("afterprint", print(false));

repaint();
find("explorer").hidden = false;
document.documentElement.classList.add("js");
summarise();
closeToCulprit();
drawChips();
drawLegend();
refilter();
if (data.culprit) choose(data.culprit.row);
