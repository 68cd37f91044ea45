// A list of which only the rows in sight are in the document, so that thousands stay fast.
const virtual = (box, height, render, above) => {
  const space = box.appendChild(make("div", "space"));
  const list = { count: 0, shown: new Map() };
  const draw = () => {
    list.waiting = false;
    const first = Math.max(0, Math.floor((box.scrollTop - above) / height) - 4);
    const last = Math.min(list.count, Math.ceil((box.scrollTop + box.clientHeight) / height) + 4);
    for (const [at, element] of list.shown) {
      if (at < first || at >= last) {
        element.remove();
        list.shown.delete(at);
      }
    }
    for (let at = first; at < last; at++) {
      if (list.shown.has(at)) continue;
      const element = render(at);
      element.style.top = `${at * height}px`;
      list.shown.set(at, element);
      space.append(element);
    }
  };
  list.redraw = () => {
    for (const element of list.shown.values()) element.remove();
    list.shown.clear();
    draw();
  };
  list.set = (length) => {
    list.count = length;
    space.style.height = `${length * height}px`;
    list.redraw();
  };
  list.show = (at) => {
    const top = at * height + above;
    const low = box.scrollTop + above;
    const high = box.scrollTop + box.clientHeight - height;
    if (top < low || top > high) box.scrollTop = Math.max(0, top - box.clientHeight / 3);
    draw();
  };
  box.addEventListener("scroll", () => {
    if (!list.waiting) {
      list.waiting = true;
      requestAnimationFrame(draw);
    }
  });
  new ResizeObserver(draw).observe(box);
  list.space = space;
  list.perPage = () => Math.max(1, Math.floor((box.clientHeight - above) / height) - 1);
  return list;
};
