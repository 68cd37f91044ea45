// The growth of the error: each input and output in the order of execution, on a logarithmic axis.
const canvas = find("curve");
const EDGE = { left: 62, right: 18, top: several ? 44 : 30, bottom: 46 };
const MINI = 12;
let events = new Int32Array(0);
let view = [0, 1]; // the part of the events in sight
let place = null; // how errors and events become pixels, as last drawn
let drag = null;
let hovered = -1;

const scale = () => {
  let low = Infinity, high = -Infinity, zero = false, endless = false;
  const take = (value) => {
    if (value > 0 && value < Infinity) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  };
  for (const event of events) {
    const error = errorOf(event);
    if (error === 0) zero = true;
    else if (Number.isNaN(error) || error === Infinity) endless = true;
    else take(error);
    const limit = rows.threshold[rowOf(event)];
    if (limit !== null) take(limit);
  }
  if (low === Infinity) [low, high] = [1e-8, 1];
  let from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  from = Math.max(from, -300);
  if (to - from < 2) [from, to] = [from - 1, to + 1];
  return { from, to, zero, endless };
};

const placed = (width, height) => {
  const { from, to, zero, endless } = scale();
  const bottom = height - EDGE.bottom - (zero ? 18 : 0);
  const top = EDGE.top + (endless ? 18 : 0);
  const y = (error) => {
    if (error === 0) return height - EDGE.bottom - 7;
    if (Number.isNaN(error) || error === Infinity) return EDGE.top + 7;
    const at = (Math.log10(error) - from) / (to - from);
    return bottom - Math.min(1, Math.max(0, at)) * (bottom - top);
  };
  const inner = width - EDGE.left - EDGE.right;
  const x = (at) => EDGE.left + ((at + 0.5 - view[0]) / (view[1] - view[0])) * inner;
  const atX = (px) => view[0] + ((px - EDGE.left) / inner) * (view[1] - view[0]) - 0.5;
  return { width, height, from, to, zero, endless, top, bottom, x, y, atX, inner };
};

let waiting = false;
const drawCurve = () => { // once a frame, however often it is asked for
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    paintCurve();
  });
};
const paintCurve = () => {
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return;
  const context = sized(canvas, width, height);
  context.font = "11.5px system-ui, sans-serif";
  place = placed(width, height);
  const inside = [Math.max(0, Math.floor(view[0]) - 1), Math.min(events.length, Math.ceil(view[1]) + 1)];
  context.save();
  context.beginPath();
  context.rect(EDGE.left, 0, place.inner, height - EDGE.bottom + 6);
  context.clip();
  drawBands(context, inside);
  context.restore();
  drawAxes(context);
  context.save();
  context.beginPath();
  context.rect(EDGE.left - 1, 0, place.inner + 2, height - EDGE.bottom + 6);
  context.clip();
  drawGroups(context, inside);
  drawLimits(context, inside);
  drawLines(context, inside);
  drawMarks(context, inside);
  drawFlag(context);
  context.restore();
  drawMini(context);
  if (!events.length) {
    context.fillStyle = palette["--soft"];
    context.fillText("No error passes the filter.", EDGE.left + 20, height / 2);
  }
};

// The calls in the subtree that was chosen, the row that was chosen, the culprit.
const drawBands = (context, [first, last]) => {
  const band = (from, to, colour) => {
    context.fillStyle = colour;
    const left = place.x(from - 0.5);
    context.fillRect(left, EDGE.top, Math.max(2, place.x(to + 0.5) - left), place.height - EDGE.bottom - EDGE.top);
  };
  const within = new Set();
  if (state.scope && state.scope !== root) below(state.scope, (one) => one.rows.forEach((row) => within.add(row)));
  let start = -1;
  for (let at = first; at <= last; at++) {
    const marked = at < last && within.has(rowOf(events[at]));
    if (marked && start < 0) start = at;
    if (!marked && start >= 0) {
      band(start, at - 1, palette["--zero"]);
      start = -1;
    }
  }
  for (let at = first; at < last; at++) {
    if (rowOf(events[at]) === state.row) band(at, at, palette["--chosen"]);
  }
};

const drawAxes = (context) => {
  const { from, to, height, width } = place;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const label = (text, y, strong) => {
    context.strokeStyle = palette[strong ? "--line" : "--grid"];
    context.beginPath();
    context.moveTo(EDGE.left, Math.round(y) + 0.5);
    context.lineTo(width - EDGE.right, Math.round(y) + 0.5);
    context.stroke();
    context.fillStyle = palette["--soft"];
    context.fillText(text, EDGE.left - 8, y);
  };
  const every = Math.max(1, Math.ceil((to - from) / 9));
  for (let power = from; power <= to; power += every) label(`1e${power}`, place.y(10 ** power), false);
  if (place.zero) label("0", place.y(0), true);
  if (place.endless) label("\u221e, NaN", place.y(Infinity), true);
  context.textAlign = "center";
  context.textBaseline = "top";
  context.fillStyle = palette["--soft"];
  const whole = view[1] - view[0] >= events.length;
  const said = whole ? `${events.length} inputs and outputs in the order of execution`
    : `${Math.round(view[0]) + 1} to ${Math.round(view[1])} of ${events.length} inputs and outputs`;
  context.fillText(said, EDGE.left + place.inner / 2, height - EDGE.bottom + 10);
};

const drawGroups = (context, [first, last]) => {
  if (!several || state.group >= 0) return;
  context.fillStyle = palette["--soft"];
  context.strokeStyle = palette["--line"];
  context.textAlign = "left";
  context.textBaseline = "top";
  let free = -Infinity, before = null;
  for (let at = first; at < last; at++) {
    const group = axis.group[rowOf(events[at])];
    if (group === before) continue;
    before = group;
    const x = place.x(at - 0.5);
    context.beginPath();
    context.moveTo(x, EDGE.top - 14);
    context.lineTo(x, place.height - EDGE.bottom);
    context.stroke();
    const text = group < 0 ? "" : `${axis.name} ${axis.labels[group]}`;
    if (x >= free) {
      context.fillText(text, x + 4, EDGE.top - 14);
      free = x + context.measureText(text).width + 10;
    }
  }
};

const drawLimits = (context, [first, last]) => {
  context.strokeStyle = palette["--limit"];
  context.setLineDash([5, 4]);
  context.lineWidth = 1.3;
  context.beginPath();
  let before = null;
  for (let at = first; at < last; at++) {
    const limit = rows.threshold[rowOf(events[at])];
    if (!(limit > 0 && limit < Infinity)) {
      before = null;
      continue;
    }
    const y = place.y(limit);
    if (before === null) context.moveTo(place.x(at - 0.5), y);
    else if (Math.abs(before - y) > 8) context.moveTo(place.x(at - 0.5), y);
    context.lineTo(place.x(at + 0.5), y);
    before = y;
  }
  context.stroke();
  context.setLineDash([]);
};

// What a call adds to what it was given is a stem; what it was given, a fainter one below it.
const drawLines = (context, [first, last]) => {
  const floor = place.height - EDGE.bottom;
  const each = place.inner / (view[1] - view[0]);
  const wide = Math.max(1, Math.min(7, each * 0.6));
  for (let at = first; at < last; at++) {
    const row = rowOf(events[at]);
    if (!isOut(events[at])) continue;
    const out = rows.out[row], given = rows.inherited[row], added = rows.added[row];
    const x = place.x(at) - wide / 2;
    const from = given === null || given === 0 ? floor : Math.min(floor, place.y(given));
    if (each >= 3 && given > 0) {
      context.globalAlpha = 0.3;
      context.fillStyle = palette["--other"];
      const top = Math.max(from, place.y(out));
      context.fillRect(x, top, wide, Math.max(0, floor - top));
    }
    if (added > 0 && !(given === Infinity)) {
      context.globalAlpha = isCulprit(row) ? 1 : 0.65;
      context.fillStyle = palette[isCulprit(row) ? "--culprit" : "--added"];
      const top = place.y(out);
      context.fillRect(x, top, wide, Math.max(1, from - top));
    }
    context.globalAlpha = 1;
  }
  context.strokeStyle = palette["--soft"];
  context.globalAlpha = 0.55;
  context.lineWidth = 1;
  context.beginPath();
  let before = null;
  for (let at = first; at < last; at++) {
    if (!isOut(events[at])) continue;
    const group = axis.group[rowOf(events[at])];
    const x = place.x(at), y = place.y(errorOf(events[at]));
    const error = errorOf(events[at]);
    const drawn = error > 0 && error < Infinity;
    if (drawn && before === group) context.lineTo(x, y);
    else if (drawn) context.moveTo(x, y);
    before = drawn ? group : null;
  }
  context.stroke();
  context.globalAlpha = 1;
};

const drawMarks = (context, [first, last]) => {
  const each = place.inner / (view[1] - view[0]);
  const painted = new Set(); // where there are many, one mark a pixel
  const fresh = (verdict, x, y) => {
    const key = (Math.round(x) * 8192 + Math.round(y)) * 8 + SEVERITY.indexOf(verdict);
    if (painted.has(key)) return false;
    painted.add(key);
    return true;
  };
  const r = each > 9 ? 4.2 : each > 3 ? 3.2 : each > 0.6 ? 2.2 : 1.6;
  for (const severe of [false, true]) {
    for (let at = first; at < last; at++) {
      const event = events[at], row = rowOf(event);
      if ((isCulprit(row)) !== severe) continue;
      const verdict = verdictAt(event);
      const x = place.x(at), y = place.y(errorOf(event));
      if (each < 0.6 && !severe && row !== state.row && at !== hovered) {
        if (!fresh(verdict, x, y)) continue;
        context.fillStyle = colourOf(verdict);
        context.fillRect(x - 1.5, y - 1.5, 3, 3);
        continue;
      }
      context.fillStyle = context.strokeStyle = colourOf(verdict);
      shape(context, verdict, x, y, severe ? Math.max(4.5, r) : isOut(event) ? r : r * 0.8);
      if (isOut(event)) context.fill();
      else {
        context.fillStyle = palette["--panel"];
        if (each > 0.6) context.fill();
        context.lineWidth = each > 3 ? 1.4 : 0.9;
        context.stroke();
      }
      if (row === state.row || at === hovered) {
        context.strokeStyle = palette["--ink"];
        context.lineWidth = 1.8;
        context.beginPath();
        context.arc(x, y, r + 5, 0, 7);
        context.stroke();
      }
    }
  }
};

// An input that agrees is drawn as the same, whatever becomes of its call.
const verdictAt = (event) => {
  const row = rowOf(event);
  const ratio = over(errorOf(event), rows.threshold[row]);
  return verdictOf(row) === "inherited" && ratio !== null && ratio <= 1 ? "same" : verdictOf(row);
};
const eventOf = (row, side) => {
  const wanted = 2 * row + (side === "out" ? 1 : 0);
  return events.indexOf(wanted);
};
const drawFlag = (context) => {
  if (!data.culprit) return;
  let at = eventOf(data.culprit.shows, data.culprit.side);
  if (at < 0) at = eventOf(data.culprit.row, "out");
  if (at < 0) return;
  const x = place.x(at), y = place.y(errorOf(events[at]));
  if (x < EDGE.left - 1 || x > EDGE.left + place.inner + 1) return;
  context.strokeStyle = context.fillStyle = palette["--culprit"];
  context.lineWidth = 1.6;
  context.beginPath();
  context.moveTo(x, 20);
  context.lineTo(x, y);
  context.stroke();
  const name = shown(nameOf(data.culprit.row));
  const short = name.length > 44 ? `...${name.slice(-42)}` : name;
  const text = `culprit: ${short}`;
  context.font = "600 12px system-ui, sans-serif";
  const wide = context.measureText(text).width + 12;
  const left = Math.max(EDGE.left, Math.min(x - wide / 2, EDGE.left + place.inner - wide));
  context.fillRect(left, 4, wide, 18);
  context.fillStyle = palette["--panel"];
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(text, left + 6, 13.5);
  context.font = "11.5px system-ui, sans-serif";
};

// All events in a strip below, with the part in sight marked: it is dragged to move.
const drawMini = (context) => {
  const top = place.height - MINI - 4, n = Math.max(1, events.length);
  context.fillStyle = palette["--zero"];
  context.fillRect(EDGE.left, top, place.inner, MINI);
  const worst = new Array(Math.ceil(place.inner)).fill(null);
  for (let at = 0; at < events.length; at++) {
    const px = Math.floor((at / n) * place.inner);
    const row = rowOf(events[at]);
    worst[px] = larger(worst[px], over(errorOf(events[at]), rows.threshold[row]));
  }
  const wide = Math.max(1, place.inner / n + 0.5);
  for (let px = 0; px < worst.length; px++) {
    const colour = heat(worst[px]);
    if (colour === null) continue;
    context.fillStyle = colour;
    context.fillRect(EDGE.left + px, top, wide, MINI);
  }
  context.strokeStyle = palette["--ink"];
  context.lineWidth = 1.4;
  const left = EDGE.left + (view[0] / n) * place.inner;
  context.strokeRect(left, top - 1, Math.max(3, ((view[1] - view[0]) / n) * place.inner), MINI + 2);
};

const look = (from, to) => {
  const n = Math.max(1, events.length);
  const size = Math.min(n, Math.max(Math.min(8, n), to - from));
  const start = Math.max(0, Math.min(n - size, (from + to - size) / 2));
  view = [start, start + size];
  drawCurve();
};
const zoom = (factor, at) => {
  const middle = at ?? (view[0] + view[1]) / 2;
  look(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
};
const lookAt = (row) => {
  const at = [eventOf(row, "in"), eventOf(row, "out")].filter((one) => one >= 0);
  if (!at.length) return;
  const [first, last] = [Math.min(...at), Math.max(...at)];
  if (last >= view[0] && first < view[1] && (first >= view[0] || last < view[1])) return;
  const size = view[1] - view[0];
  look(first - size / 2, first + size / 2);
};
const reexecute = () => {
  events = executed(state.visible);
  look(0, events.length);
};
