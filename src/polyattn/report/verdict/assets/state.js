// What is chosen: the filter, the verdicts, the step, a row; and who is told when it changes.
const state = { text: "", hidden: new Set(), group: -1, row: -1, scope: null, visible: [] };
const listeners = [];
const listen = (told) => listeners.push(told);
const tell = (what) => { for (const told of listeners) told(what); };

const searched = Array.from({ length: count }, () => null);
const textOf = (row) => {
  if (searched[row] === null) {
    const other = rows.reference[row] >= 0 ? data.names[rows.reference[row]] : "";
    const said = [shown(nameOf(row)), other, classOf(row), data.words[rows.note[row]]];
    searched[row] = said.join("\n").toLowerCase();
  }
  return searched[row];
};

const refilter = () => {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (let row = 0; row < count; row++) {
    if (state.group >= 0 && axis.group[row] !== state.group) continue;
    if (state.hidden.has(verdictOf(row))) continue;
    if (words.length) {
      const text = textOf(row);
      if (!words.every((word) => text.includes(word))) continue;
    }
    found.push(row);
  }
  state.visible = found;
  tell("filter");
};

const choose = (row, from) => {
  state.row = row;
  state.scope = null;
  tell(from || "row");
};
const scopeTo = (node) => {
  state.scope = node;
  tell("scope");
};
const setGroup = (group) => {
  state.group = group;
  const row = state.row;
  if (group >= 0 && row >= 0 && axis.group[row] !== group) {
    // the same module in the step that was chosen
    for (let at = 0; at < count; at++) {
      if (axis.group[at] === group && nameNumber(at) === nameNumber(row)) {
        state.row = at;
        break;
      }
    }
  }
  refilter();
};
const setText = (text) => {
  state.text = text;
  if (find("filter").value !== text) find("filter").value = text;
  refilter();
};
