// The modules by their names: a tree of which each line shows the worst call, and each step's.
const LINE = 24;
const STRIP = 160;
const root = { label: "(model)", path: "", parent: null, children: new Map(), rows: [], open: true, level: 0 };
const nodeOf = new Array(data.names.length).fill(null);

const nodeAt = (name) => {
  let node = root;
  if (name === "") return root;
  let path = "";
  for (const [at, label] of name.split(".").entries()) {
    path = at ? `${path}.${label}` : label;
    let child = node.children.get(label);
    if (!child) {
      child = { label, path, parent: node, children: new Map(), rows: [], open: false, level: node.level + 1 };
      node.children.set(label, child);
    }
    node = child;
  }
  return node;
};
for (let row = 0; row < count; row++) {
  const at = nameNumber(row);
  if (at < 0) continue;
  nodeOf[at] = nodeOf[at] || nodeAt(data.names[at]);
  nodeOf[at].rows.push(row);
}
const nodeOfRow = (row) => nameNumber(row) < 0 ? root : nodeOf[nameNumber(row)];
const below = (node, visit) => {
  const left = [node];
  while (left.length) {
    const one = left.pop();
    visit(one);
    for (const child of one.children.values()) left.push(child);
  }
};

// Whether some call of a module passes the filter, and which is the worst.
const isWorse = (row, than) => than < 0 || severity[row] < severity[than] ||
  (severity[row] === severity[than] && (ratios[row] ?? -1) > (ratios[than] ?? -1));
const summarise = () => {
  below(root, (node) => {
    node.own = node.worst = -1;
    node.passes = false;
  });
  for (const row of state.visible) {
    const node = nodeOfRow(row);
    if (isWorse(row, node.own)) node.own = row;
  }
  const all = [];
  below(root, (node) => all.push(node));
  for (const node of all.reverse()) {
    if (node.own >= 0) node.passes = true;
    if (node.own >= 0 && isWorse(node.own, node.worst)) node.worst = node.own;
    if (node.passes && node.parent) {
      node.parent.passes = true;
      if (isWorse(node.worst, node.parent.worst)) node.parent.worst = node.worst;
    }
  }
};

// The worst ratio of what is below a node, by steps; several steps a pixel where there are many.
const bins = Math.min(axis.labels.length, STRIP);
const heatOf = (node) => {
  if (!node.heat) {
    node.heat = new Array(bins).fill(null);
    below(node, (one) => {
      for (const row of one.rows) {
        if (axis.group[row] < 0) continue;
        const at = Math.floor((axis.group[row] * bins) / axis.labels.length);
        node.heat[at] = larger(node.heat[at], ratios[row]);
      }
    });
  }
  return node.heat;
};

const treeBox = find("tree");
let lines = [];
let active = root; // the line that the keyboard is at
const isFiltered = () => state.text !== "" || state.hidden.size > 0;
const relist = () => {
  lines = [];
  const left = [root];
  while (left.length) {
    const node = left.pop();
    if (!node.passes && isFiltered()) continue;
    lines.push(node);
    const unfolded = node.open || (state.text !== "" && !node.shut);
    node.unfolded = unfolded && node.children.size > 0;
    if (node.unfolded) left.push(...[...node.children.values()].reverse());
  }
  const said = `${lines.length} lines${state.visible.length === count ? "" : ", filtered"}`;
  find("tree-said").textContent = said;
};

const treeLine = (at) => {
  const node = lines[at];
  const own = node.own >= 0 ? node.own : node.unfolded ? -1 : node.worst;
  const worst = node.unfolded ? own : node.worst;
  const verdict = worst >= 0 ? verdictOf(worst) : "not compared";
  const row = make("div", "row");
  if (node.own < 0) row.classList.add("faint");
  if (node.own >= 0 && isCulprit(node.own)) row.classList.add("culprit");
  if (state.row >= 0 && nodeOfRow(state.row) === node) row.classList.add("chosen");
  row.id = `line-${at}`;
  row.setAttribute("role", "treeitem");
  row.setAttribute("aria-level", node.level + 1);
  row.setAttribute("aria-selected", row.classList.contains("chosen"));
  if (node.children.size) row.setAttribute("aria-expanded", node.unfolded);
  row.setAttribute("aria-label", `${node.label}, ${verdict}`);
  row.style.paddingLeft = `${4 + 13 * Math.min(node.level, 20)}px`;
  row.dataset.path = node.path;
  const twist = make("span", "twist", node.children.size ? (node.unfolded ? "\u25be" : "\u25b8") : "");
  const name = make("span", "name", node.label === "" ? "(empty)" : node.label);
  name.title = shown(node.path);
  const kind = make("span", "kind", node.own >= 0 ? classOf(node.own) : "");
  const error = make("span", "error", worst >= 0 ? number(worsts[worst]) : "");
  row.append(twist, glyph(verdict, node.own < 0 || (!node.unfolded && node.worst !== node.own)));
  row.append(name, kind, make("span", "gap"), error);
  if (several) row.append(strip(node));
  return row;
};

const strip = (node) => {
  const wide = stripWidth();
  const canvas = make("canvas");
  canvas.style.width = `${wide}px`;
  const context = sized(canvas, wide, 16);
  const each = wide / bins;
  for (const [at, ratio] of heatOf(node).entries()) {
    const colour = heat(ratio);
    if (colour === null) continue;
    context.fillStyle = colour;
    context.fillRect(at * each, 2, Math.max(1, each - (each > 4 ? 1 : 0)), 12);
  }
  if (state.group >= 0) {
    context.strokeStyle = palette["--ink"];
    const at = Math.floor((state.group * bins) / axis.labels.length);
    context.strokeRect(at * each + 0.5, 1.5, Math.max(2, each - 2), 13);
  }
  canvas.title = `worst error in units of its threshold, by ${axis.name}`;
  canvas.dataset.strip = "1";
  return canvas;
};
const stripWidth = () => Math.min(STRIP, Math.max(bins * 12, 60));

const treeList = virtual(treeBox, LINE, treeLine, 0);
const drawTree = () => {
  relist();
  treeList.set(lines.length);
  treeBox.setAttribute("aria-activedescendant", `line-${lines.indexOf(active)}`);
};
const unfoldTo = (node) => {
  for (let at = node.parent; at; at = at.parent) {
    at.open = true;
    at.shut = false;
  }
};
const fold = (node, open) => {
  node.open = open;
  node.shut = !open;
  drawTree();
};
const pick = (node) => {
  active = node;
  if (node.own >= 0) choose(node.own, "tree");
  else fold(node, !node.unfolded);
  scopeTo(node);
};
const closeToCulprit = () => {
  below(root, (node) => { node.open = node === root; node.shut = false; });
  const goal = data.culprit ? data.culprit.row : state.visible.find((row) => !agrees(row));
  if (goal !== undefined) {
    unfoldTo(nodeOfRow(goal));
    nodeOfRow(goal).open = nodeOfRow(goal).children.size <= 40;
  } else for (const child of root.children.values()) child.open = child.children.size <= 40;
};

treeBox.addEventListener("click", (event) => {
  const row = event.target.closest(".row");
  if (!row) return;
  const node = lines[Number(row.id.slice(5))];
  if (event.target.dataset.strip) {
    const box = event.target.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * axis.labels.length);
    active = node;
    setGroup(Math.min(axis.labels.length - 1, Math.max(0, at)));
    if (node.own >= 0) choose(node.own, "tree");
  } else if (event.target.classList.contains("twist")) {
    active = node;
    fold(node, !node.unfolded);
  } else pick(node);
});
treeBox.addEventListener("keydown", (event) => {
  const at = Math.max(0, lines.indexOf(active));
  const go = (to) => {
    active = lines[Math.max(0, Math.min(lines.length - 1, to))];
    treeList.show(lines.indexOf(active));
    if (active.own >= 0) choose(active.own, "tree");
    scopeTo(active);
  };
  const node = lines[at];
  const keys = {
    ArrowDown: () => go(at + 1), ArrowUp: () => go(at - 1), Home: () => go(0), End: () => go(lines.length - 1),
    PageDown: () => go(at + treeList.perPage()), PageUp: () => go(at - treeList.perPage()),
    ArrowRight: () => node.unfolded ? go(at + 1) : node.children.size && fold(node, true),
    ArrowLeft: () => node.unfolded ? fold(node, false) : node.parent && go(lines.indexOf(node.parent)),
    Enter: () => pick(node), " ": () => pick(node),
  };
  if (keys[event.key] && node) {
    event.preventDefault();
    keys[event.key]();
  }
});
find("tree-open").addEventListener("click", () => {
  below(root, (node) => { node.open = true; node.shut = false; });
  drawTree();
});
find("tree-close").addEventListener("click", () => {
  closeToCulprit();
  drawTree();
});
if (!data.culprit) find("tree-close").textContent = "close all";
listen((what) => {
  if (what === "filter") summarise();
  if (what === "row" && state.row >= 0) {
    active = nodeOfRow(state.row);
    unfoldTo(active);
  }
  drawTree();
  if (what === "row" && state.row >= 0) treeList.show(lines.indexOf(active));
});
