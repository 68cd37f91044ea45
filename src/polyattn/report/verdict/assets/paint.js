// Colours and shapes. Each verdict has a shape of its own as well, for those who see other colours.
let palette = {};
const repaint = () => {
  const style = getComputedStyle(document.documentElement);
  const names = ["panel", "ink", "soft", "line", "grid", "zero", "accent", "chosen", "culprit", "differs",
    "inherited", "same", "unsure", "other", "added", "limit", "bad-paper"];
  palette = Object.fromEntries(names.map((name) => [`--${name}`, style.getPropertyValue(`--${name}`).trim()]));
};
const colourOf = (verdict) => palette[COLOURS[verdict] || "--other"];

const sized = (canvas, width, height) => {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
};

const shape = (context, verdict, x, y, r) => {
  context.beginPath();
  if (verdict === "culprit") {
    context.moveTo(x, y - r * 1.35); context.lineTo(x + r * 1.35, y);
    context.lineTo(x, y + r * 1.35); context.lineTo(x - r * 1.35, y); context.closePath();
  } else if (verdict === "differs") {
    context.moveTo(x, y + r * 1.1); context.lineTo(x + r * 1.1, y - r);
    context.lineTo(x - r * 1.1, y - r); context.closePath();
  } else if (verdict === "inherited") {
    context.moveTo(x, y - r * 1.1); context.lineTo(x + r * 1.1, y + r);
    context.lineTo(x - r * 1.1, y + r); context.closePath();
  } else if (verdict === "cannot say") {
    context.rect(x - r * 0.9, y - r * 0.9, r * 1.8, r * 1.8);
  } else if (verdict === "extra" || verdict === "missing") {
    context.rect(x - r, y - r * 0.3, 2 * r, r * 0.6);
    if (verdict === "extra") context.rect(x - r * 0.3, y - r, r * 0.6, 2 * r);
  } else {
    context.arc(x, y, verdict === "same" ? r * 0.9 : r * 0.5, 0, 7);
  }
};

const glyph = (verdict, faint) => {
  const canvas = make("canvas", "glyph");
  const context = sized(canvas, 14, 14);
  context.fillStyle = context.strokeStyle = colourOf(verdict);
  shape(context, verdict, 7, 7, 4.5);
  if (faint) {
    context.lineWidth = 1.4;
    context.stroke();
  } else context.fill();
  canvas.setAttribute("aria-hidden", "true");
  return canvas;
};

// How far from a threshold: blue and fainter below it, from orange to dark red above it.
const heat = (ratio) => {
  if (ratio === null) return null;
  const dark = palette["--panel"] !== "" && parseInt(palette["--panel"].slice(1, 3), 16) < 128;
  if (ratio <= 1) {
    const near = ratio > 0 ? Math.max(0, 1 + Math.log10(ratio) / 4) : 0;
    return dark ? `hsl(210 60% ${18 + 22 * near}%)` : `hsl(210 70% ${93 - 22 * near}%)`;
  }
  const far = ratio === Infinity ? 1 : Math.min(1, Math.log10(ratio) / 6);
  return dark
    ? `hsl(${42 - 42 * far} 90% ${48 + 16 * (1 - far)}%)`
    : `hsl(${40 - 40 * far} 92% ${64 - 34 * far}%)`;
};
