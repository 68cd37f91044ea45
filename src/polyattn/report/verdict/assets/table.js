// All calls as a table: sorted by any column, and only the rows in sight in the document.
const tableBox = find("table");
const some = (test) => {
  for (let row = 0; row < count; row++) if (test(row)) return true;
  return false;
};
const otherName = (row) => {
  const at = rows.reference[row];
  return at < 0 || at === rows.module[row] ? "" : shown(data.names[at]);
};
const text = (value) => (cell, row) => { cell.textContent = value(row); };
const share = (cell, row) => {
  const given = rows.inherited[row], added = rows.added[row];
  if (!(given + added > 0) || given === Infinity || added === Infinity) return;
  const box = make("span", "share"), one = make("i"), other = make("b");
  one.style.width = `${(100 * given) / (given + added)}%`;
  other.style.width = `${(100 * added) / (given + added)}%`;
  box.append(one, other);
  box.title = `inherited ${number(given)}, added ${number(added)}`;
  cell.append(box);
};
const named = (cell, row) => {
  const name = make("span", "name", shown(nameOf(row)) + (rows.backward[row] ? " (backward)" : ""));
  name.title = shown(nameOf(row));
  cell.append(glyph(verdictOf(row), false), name);
};
const COLUMNS = [
  { key: "order", title: "#", width: 58, numeric: true, of: (row) => data.first + row + 1, draw: text((row) => data.first + row + 1) },
  { key: "module", title: "module", width: 400, of: nameOf, draw: named },
  { key: "reference", title: "in the reference", width: 260, of: otherName, draw: text(otherName), if: some((row) => otherName(row) !== "") },
  { key: "class", title: "class", width: 150, of: classOf, draw: text(classOf), if: some((row) => classOf(row) !== "") },
  { key: "step", title: "step", width: 56, numeric: true, of: (row) => rows.step[row], draw: text((row) => rows.step[row] < 0 ? "" : data.steps[rows.step[row]]), if: data.steps.length > 0 },
  { key: "call", title: "call", width: 52, numeric: true, of: (row) => rows.call[row], draw: text((row) => rows.call[row]), if: some((row) => rows.call[row] > 0) },
  { key: "in", title: "in (inherited)", width: 104, numeric: true, of: (row) => rows.in[row], draw: text((row) => number(rows.in[row])) },
  { key: "added", title: "added", width: 76, numeric: true, of: (row) => rows.added[row], draw: text((row) => number(rows.added[row])) },
  { key: "out", title: "out", width: 76, numeric: true, of: (row) => rows.out[row], draw: text((row) => number(rows.out[row])) },
  { key: "share", title: "inherited | added", width: 112, of: (row) => rows.added[row] / (rows.added[row] + rows.inherited[row]), draw: share },
  { key: "threshold", title: "threshold", width: 84, numeric: true, of: (row) => rows.threshold[row], draw: text((row) => number(rows.threshold[row])) },
  { key: "ratio", title: "\u00d7 threshold", width: 92, numeric: true, of: (row) => ratios[row], draw: text((row) => times(ratios[row])) },
  { key: "verdict", title: "verdict", width: 110, of: (row) => severity[row], draw: text(verdictOf), cls: "verdict" },
  { key: "how", title: "aligned by", width: 92, of: (row) => data.words[rows.how[row]], draw: text((row) => data.words[rows.how[row]]), if: some((row) => !["name", ""].includes(data.words[rows.how[row]])) },
  { key: "note", title: "note", width: 320, of: (row) => data.words[rows.note[row]], draw: text((row) => data.words[rows.note[row]]), if: some((row) => data.words[rows.note[row]] !== "") },
].filter((column) => column.if !== false);

let sorting = { key: "order", down: false };
let sorted = [];
const collator = new Intl.Collator("en", { numeric: true });
const compared = (a, b) => {
  const none = (value) => value === null || value === "" || Number.isNaN(value);
  if (none(a) || none(b)) return none(a) - none(b);
  return typeof a === "string" ? collator.compare(a, b) : a - b;
};
const resort = () => {
  const column = COLUMNS.find((one) => one.key === sorting.key);
  sorted = [...state.visible];
  if (sorting.key !== "order" || sorting.down) {
    const values = new Map(sorted.map((row) => [row, column.of(row)]));
    const empty = (row) => [null, ""].includes(values.get(row)) || Number.isNaN(values.get(row));
    sorted.sort((a, b) => {
      if (empty(a) || empty(b)) return empty(a) - empty(b) || a - b; // what is not known comes last
      return (sorting.down ? -1 : 1) * compared(values.get(a), values.get(b)) || a - b;
    });
  }
};

const head = tableBox.appendChild(make("div", "head"));
head.setAttribute("role", "row");
for (const column of COLUMNS) {
  const cell = head.appendChild(make("div", column.numeric ? "cell number" : "cell"));
  cell.setAttribute("role", "columnheader");
  cell.style.width = `${column.width}px`;
  if (column.key === "note") cell.style.flexGrow = "1";
  column.button = cell.appendChild(make("button", "", column.title));
  column.button.type = "button";
  column.button.dataset.key = column.key;
  column.cell = cell;
  column.button.addEventListener("click", () => {
    // numbers are first wanted with the largest on top
    const down = column.numeric && !["order", "step", "call"].includes(column.key);
    sorting = { key: column.key, down: sorting.key === column.key ? !sorting.down : down };
    drawTable();
    tableBox.scrollTop = 0;
  });
}

const tableLine = (at) => {
  const row = sorted[at];
  const line = make("div", `row${isCulprit(row) ? " culprit" : ""}${row === state.row ? " chosen" : ""}`);
  line.setAttribute("role", "row");
  line.setAttribute("aria-rowindex", at + 2);
  if (row === state.row) line.setAttribute("aria-selected", "true");
  line.id = `row-${row}`;
  for (const column of COLUMNS) {
    const cell = line.appendChild(make("div", `cell ${column.numeric ? "number" : ""} ${column.cls || ""}`));
    cell.setAttribute("role", "cell");
    cell.style.width = `${column.width}px`;
    if (column.key === "note") cell.style.flexGrow = "1";
    column.draw(cell, row);
  }
  return line;
};
const tableList = virtual(tableBox, 26, tableLine, 30);
const drawTable = () => {
  resort();
  for (const column of COLUMNS) {
    const on = column.key === sorting.key;
    column.cell.setAttribute("aria-sort", on ? (sorting.down ? "descending" : "ascending") : "none");
    column.button.textContent = column.title + (on ? (sorting.down ? " \u25be" : " \u25b4") : "");
  }
  tableList.set(sorted.length);
  tableBox.style.height = `${Math.min(560, 50 + 26 * Math.max(2, count))}px`;
  tableBox.setAttribute("aria-rowcount", sorted.length + 1);
  const all = data.total > count ? `; ${data.total} in all` : "";
  find("table-said").textContent = `${sorted.length} of ${count} calls${all}`;
};

tableBox.addEventListener("click", (event) => {
  const line = event.target.closest(".row");
  if (line) choose(Number(line.id.slice(4)), "table");
});
tableBox.addEventListener("keydown", (event) => {
  if (event.target !== tableBox) return;
  const at = sorted.indexOf(state.row);
  const go = (to) => {
    const row = sorted[Math.max(0, Math.min(sorted.length - 1, to))];
    if (row !== undefined) choose(row);
  };
  const keys = {
    ArrowDown: () => go(at + 1), ArrowUp: () => go(at < 0 ? 0 : at - 1), Home: () => go(0),
    End: () => go(sorted.length - 1), PageDown: () => go(at + tableList.perPage()),
    PageUp: () => go(at - tableList.perPage()),
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});
listen((what) => {
  if (what === "filter") drawTable();
  else if (what !== "scope") tableList.redraw();
  const at = sorted.indexOf(state.row);
  if (state.row >= 0 && at >= 0 && what !== "table" && what !== "scope") tableList.show(at);
  if (at >= 0) tableBox.setAttribute("aria-activedescendant", `row-${state.row}`);
  else tableBox.removeAttribute("aria-activedescendant");
});
