// How much text a setting saw, and how often, beside what it reached.

const LABELS_FIT = 14;

function coverageSection() {
  const figuresOf = [
    ['unique_tokens', 'Unique tokens', 'tokens that were a target at least once'],
    ['mean_coverage', 'Mean coverage', 'how often such a token was a target, on average'],
  ].filter(([name]) => groups.some((group) => group.mean !== null && (group.means[name] ?? null) !== null));
  if (!figuresOf.length) return null;
  const [varied, same] = [figuresOf.filter(([name]) => varies(name)), figuresOf.filter(([name]) => !varies(name))];
  return section('coverage', 'Coverage',
    el('p', { class: 'soft small' },
      'The same budget can be spent on more text or on the same text again. ',
      varied.length ? `Each dot is a setting; lower ${data.metric} is better. ` : '',
      varied.length && groups.length <= LABELS_FIT && groupKeys.length ? `Labels: ${namesAlone()}. ` : '',
      figuresOf.map(([name, , words]) => `${name}: ${words}. `)),
    same.length ? el('p', {}, `Here all settings have the same ${same.map(([name]) => `${name}, ${show(name, groups[0].means[name])}`).join(', and ')}.`) : null,
    el('div', { class: 'panels' }, varied.map(([name, heading]) => el('div', {},
      el('h3', {}, `${data.metric} against ${heading.toLowerCase()}`),
      figure((width) => scatter(name, width))))));
}

function varies(name) {
  const [low, high] = extent(groups.map((group) => group.means[name] ?? null).filter((value) => value !== null));
  return high - low > 1e-3 * Math.abs(high);
}

function scatter(name, width) {
  const shown = groups.filter((group) => group.mean !== null && (group.means[name] ?? null) !== null);
  const [left, right, top, bottom] = [62, width - 12, 26, 250];
  const high = reach(shown.map((group) => group.mean))[1];
  const inside = shown.filter((group) => group.mean <= high);
  const x = linear(...padded(extent(inside.map((group) => group.means[name])), 0.08), left, right);
  const y = linear(...padded(extent(inside.map((group) => group.mean)), 0.1), bottom, top);
  const hidden = shown.length - inside.length;
  const labels = inside.length <= LABELS_FIT ? placed(inside, name, x, y, right) : [];
  return svg('svg', {
    width, height: bottom + 42, viewBox: `0 0 ${width} ${bottom + 42}`, role: 'img',
    'aria-label': `${data.metric} against ${name}; the figures are in the table of settings.`,
  },
  axisX(x, { top, bottom, left, right, label: `${name}${hidden ? ` (${count(hidden, 'setting')} above the axis)` : ''}` }),
  axisY(y, { left, right, top, bottom, label: data.metric }),
  inside.map((group) => svg('g', { class: group.is_best ? 'best' : group.is_tied ? 'tied' : null },
    svg('title', {}, `${setting(group.keys)}: ${data.metric} ${showMean(group)}, ${name} ${show(name, group.means[name])}`),
    svg('circle', { class: 'dot', cx: x(group.means[name]), cy: y(group.mean), r: 5 }))),
  labels);
}

// Labels beside the dots, at the side that has room; one that would lie on another is left out.
function placed(shown, name, x, y, right) {
  const taken = [];
  return shown.map((group) => {
    const text = cut(valuesAlone(group.keys), 26);
    const wide = text.length * 6.6;
    const at = x(group.means[name]);
    const fits = at + 9 + wide <= right;
    const box = { from: fits ? at + 9 : at - 9 - wide, to: fits ? at + 9 + wide : at - 9, y: y(group.mean) };
    if (box.from < 62 || taken.some((other) => Math.abs(other.y - box.y) < 13 && other.from < box.to && box.from < other.to)) return null;
    taken.push(box);
    return svg('text', { class: 'soft', x: box.from, y: box.y + 4, 'aria-hidden': 'true' }, text);
  });
}

function extent(numbers) {
  return [Math.min(...numbers), Math.max(...numbers)];
}
