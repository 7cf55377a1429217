// Scales, ticks and axes for figures that are drawn again when their width changes.

function niceStep(span, wanted) {
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const off = (step) => Math.abs(Math.log(step / rough));
  return [1, 2, 5, 10].map((factor) => factor * power).reduce((best, step) => (off(step) < off(best) ? step : best));
}

function linear(low, high, from, to) {
  if (!(high > low)) [low, high] = [low - (Math.abs(low) || 1) * 0.01, high + (Math.abs(high) || 1) * 0.01];
  const scale = (value) => from + ((value - low) / (high - low)) * (to - from);
  scale.low = low;
  scale.high = high;
  scale.ticks = (wanted) => {
    const step = niceStep(high - low, wanted);
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => (first + index) * step);
  };
  scale.text = (value, wanted = 5) => {
    const step = niceStep(high - low, wanted);
    if (step >= 1 && Math.abs(high) >= 10000) return short(value);
    return fixed(value, Math.min(8, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))));
  };
  return scale;
}

function logarithmic(low, high, from, to) {
  if (!(high > low)) high = low * 10;
  const span = Math.log(high / low);
  const scale = (value) => from + (Math.log(Math.max(value, low) / low) / span) * (to - from);
  scale.low = low;
  scale.high = high;
  scale.ticks = (wanted) => {
    const decades = span / Math.LN10;
    const steps = decades < 0.8 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : decades < 3 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const step of steps) ticks.push(step * 10 ** power);
    }
    const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    const every = Math.ceil(inside.length / Math.max(2, wanted + 2));
    return inside.filter((_, index) => index % every === 0);
  };
  scale.text = short;
  return scale;
}

// The x axis under a plot of height `bottom`, with grid lines up to `top`.
function axisX(scale, { top, bottom, left, right, label, wanted = Math.max(2, Math.floor((right - left) / 90)) }) {
  const ticks = scale.ticks(wanted);
  return svg('g', { 'aria-hidden': 'true' },
    ticks.map((tick) => svg('line', { class: 'gridline', x1: scale(tick), x2: scale(tick), y1: top, y2: bottom })),
    svg('line', { class: 'baseline', x1: left, x2: right, y1: bottom, y2: bottom }),
    ticks.map((tick) => svg('text', { class: 'soft', x: scale(tick), y: bottom + 16, 'text-anchor': 'middle' }, scale.text(tick, wanted))),
    svg('text', { class: 'soft', x: right, y: bottom + 34, 'text-anchor': 'end' }, label));
}

function axisY(scale, { left, right, top, bottom, label, wanted = Math.floor((bottom - top) / 50) }) {
  const ticks = scale.ticks(wanted);
  return svg('g', { 'aria-hidden': 'true' },
    ticks.map((tick) => svg('line', { class: 'gridline', x1: left, x2: right, y1: scale(tick), y2: scale(tick) })),
    ticks.map((tick) => svg('text', { class: 'soft', x: left - 8, y: scale(tick) + 4, 'text-anchor': 'end' }, scale.text(tick, wanted))),
    svg('text', { class: 'soft', x: 0, y: top - 10 }, label));
}

// Up to where a free axis shows values: far ones (a run that went wrong) would press all others together.
function reach(values) {
  const sorted = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const low = sorted[0];
  const middle = sorted[Math.floor(sorted.length * 0.75)];
  const high = Math.min(sorted[sorted.length - 1], low + 4 * Math.max(middle - low, Math.abs(low) * 1e-3));
  return [low, high];
}

function padded([low, high], share = 0.05) {
  const pad = (high - low || Math.abs(low) * 0.02 || 1) * share;
  return [low - pad, high + pad];
}

// A place for a figure; `draw(width)` gives its svg, anew at each new width.
function figure(draw) {
  const frame = el('div', { class: 'figure' });
  let width = 0;
  let drawn = null;
  frame.redraw = () => {
    const figured = draw(width || 800);
    if (drawn) drawn.replaceWith(figured);
    else frame.append(figured);
    drawn = figured;
  };
  const fit = () => {
    const now = Math.floor(frame.clientWidth);
    if (now > 0 && now !== width) {
      width = now;
      frame.redraw();
    }
  };
  if ('ResizeObserver' in window) new ResizeObserver(fit).observe(frame);
  else window.addEventListener('resize', fit);
  requestAnimationFrame(fit);
  return frame;
}
