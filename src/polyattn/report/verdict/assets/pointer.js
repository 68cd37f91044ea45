// The curve under a pointer and a keyboard: hover says what it is, a click chooses, a drag zooms.
const tip = find("tip");
const nearest = (px, py) => {
  const middle = place.atX(px);
  const reach = Math.max(1, (14 / place.inner) * (view[1] - view[0]));
  let best = -1, least = 26 * 26;
  const last = Math.min(events.length - 1, Math.ceil(middle + reach));
  for (let at = Math.max(0, Math.floor(middle - reach)); at <= last; at++) {
    const dx = place.x(at) - px, dy = place.y(errorOf(events[at])) - py;
    const far = dx * dx + dy * dy / 4;
    if (far < least) [best, least] = [at, far];
  }
  return best;
};
const describe = (event) => {
  const row = rowOf(event);
  const found = document.createDocumentFragment();
  const line = (text, cls) => found.append(make("div", cls, text));
  line(shown(nameOf(row)), "name");
  const kind = classOf(row);
  line(`${kind ? `${kind}, ` : ""}${whenOf(row)}: ${isOut(event) ? "output" : "input"}`);
  const limit = rows.threshold[row], ratio = over(errorOf(event), limit);
  line(`error ${number(errorOf(event))}` + (limit === null ? "" : `, threshold ${number(limit)} (${times(ratio)}\u00d7)`));
  if (isOut(event) && rows.added[row] !== null) {
    line(`inherited ${number(rows.inherited[row]) || "unknown"}, added ${number(rows.added[row])}`);
  }
  const note = data.words[rows.note[row]];
  line(verdictOf(row) + (note ? `: ${note}` : ""));
  return found;
};
const showTip = (event, x, y) => {
  tip.replaceChildren(describe(event));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 16, window.innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + box.height + 24 > window.innerHeight ? y - box.height - 14 : y + 16}px`;
};
const hideTip = () => {
  tip.hidden = true;
  if (hovered >= 0) {
    hovered = -1;
    drawCurve();
  }
};

const local = (event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};
const panTo = (px) => {
  const size = view[1] - view[0];
  const middle = ((px - EDGE.left) / place.inner) * events.length;
  look(middle - size / 2, middle + size / 2);
};
canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !place) return;
  const [x, y] = local(event);
  drag = { x, y, mini: y > place.height - MINI - 8, to: x };
  canvas.setPointerCapture(event.pointerId);
  hideTip();
  if (drag.mini) panTo(x);
});
canvas.addEventListener("pointermove", (event) => {
  if (!place) return;
  const [x, y] = local(event);
  if (drag) {
    drag.to = x;
    if (drag.mini) panTo(x);
    else {
      paintCurve();
      const context = canvas.getContext("2d");
      context.globalAlpha = 0.2;
      context.fillStyle = palette["--accent"];
      context.fillRect(Math.min(drag.x, x), EDGE.top, Math.abs(x - drag.x), place.height - EDGE.bottom - EDGE.top);
      context.globalAlpha = 1;
    }
    return;
  }
  const at = y > place.height - EDGE.bottom + 6 ? -1 : nearest(x, y);
  if (at < 0) hideTip();
  else {
    if (at !== hovered) {
      hovered = at;
      drawCurve();
    }
    showTip(events[at], event.clientX, event.clientY);
  }
});
canvas.addEventListener("pointerup", (event) => {
  if (!drag) return;
  const { x, to, mini } = drag;
  drag = null;
  if (mini) return;
  if (Math.abs(to - x) > 6) {
    look(place.atX(Math.min(x, to)) + 0.5, place.atX(Math.max(x, to)) + 0.5);
    return;
  }
  const at = nearest(...local(event));
  if (at >= 0) choose(rowOf(events[at]));
  else drawCurve();
});
canvas.addEventListener("pointercancel", () => { drag = null; drawCurve(); });
canvas.addEventListener("pointerleave", () => { if (!drag) hideTip(); });
canvas.addEventListener("dblclick", () => look(0, events.length));
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
  event.preventDefault();
  const turned = event.deltaY || event.deltaX;
  if (event.shiftKey) {
    const by = Math.sign(turned) * (view[1] - view[0]) * 0.12;
    look(view[0] + by, view[1] + by);
  } else zoom(turned > 0 ? 1.25 : 0.8, place.atX(local(event)[0]));
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const go = (by) => {
    const now = events.findIndex((one) => rowOf(one) === state.row);
    let at = now < 0 ? (by > 0 ? Math.ceil(view[0]) : Math.floor(view[1]) - 1) : now + by;
    while (now >= 0 && events[at] !== undefined && rowOf(events[at]) === state.row) at += by;
    if (events[at] !== undefined) choose(rowOf(events[at]));
  };
  const keys = {
    ArrowRight: () => go(1), ArrowLeft: () => go(-1), "+": () => zoom(0.6), "=": () => zoom(0.6),
    "-": () => zoom(1.7), 0: () => look(0, events.length),
  };
  if (keys[event.key] && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    keys[event.key]();
  }
});
find("curve-in").addEventListener("click", () => zoom(0.5));
find("curve-out").addEventListener("click", () => zoom(2));
find("curve-all").addEventListener("click", () => look(0, events.length));
const toCulprit = () => {
  const { row, shows, side } = data.culprit;
  if (!state.visible.includes(row)) clear();
  choose(row);
  const at = eventOf(shows, side);
  if (at >= 0) look(at - 24, at + 24);
};
if (data.culprit) find("curve-culprit").addEventListener("click", toCulprit);
else find("curve-culprit").hidden = true;

const legend = (verdict, text, outline) => {
  const line = make("span");
  line.append(glyph(verdict, outline), text);
  return line;
};
const drawLegend = () => {
  const kinds = SEVERITY.filter((one) => severity.includes(SEVERITY.indexOf(one)) &&
    !["extra", "missing", "not compared"].includes(one));
  const lines = kinds.map((one) => legend(one, `${one} (output)`, false));
  lines.push(legend("same", "hollow: input", true));
  const drawn = (colour, text, faint) => {
    const line = make("span");
    const box = make("canvas");
    const context = sized(box, 16, 12);
    box.style.width = "16px";
    context.fillStyle = palette[colour];
    context.globalAlpha = faint ? 0.3 : 0.8;
    if (colour === "--limit") for (const x of [0, 9]) context.fillRect(x, 5, 6, 2);
    else context.fillRect(5, 0, 6, 12);
    line.append(box, text);
    return line;
  };
  lines.push(drawn("--added", "added by the call", false), drawn("--other", "inherited", true));
  lines.push(drawn("--limit", "threshold", false));
  lines.push(make("span", "how", "drag to zoom, double click for all"));
  find("legend").replaceChildren(...lines);
};
listen((what) => {
  if (what === "filter") reexecute();
  if (state.row >= 0 && what !== "filter" && what !== "scope") lookAt(state.row);
  drawCurve();
  const culprit = data.culprit ? ` The culprit is ${shown(nameOf(data.culprit.row))}.` : "";
  canvas.setAttribute("aria-label", `Growth of the error over ${events.length} inputs and outputs.` +
    `${culprit} Arrow keys go from call to call, plus and minus zoom, 0 shows all.`);
});
new ResizeObserver(drawCurve).observe(canvas);
