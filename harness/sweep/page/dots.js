// Each setting's mean with its interval and its single seeds, best first. The axis is free: dots have no length.

const DOTS_FIRST = 40;

function dotsSection() {
  const usable = groups.filter((group) => group.mean !== null);
  let all = false;
  const shown = () => (all ? usable : usable.slice(0, DOTS_FIRST));
  const plot = figure((width) => dots(shown(), width));
  const more = el('button', {
    type: 'button',
    onclick: () => {
      all = !all;
      label();
      plot.redraw();
    },
  });
  const label = () => {
    more.textContent = all ? `Show the best ${DOTS_FIRST} only` : `Show all ${fixed(usable.length, 0)} (now the best ${DOTS_FIRST})`;
  };
  label();
  return section('spread', 'Spread over seeds',
    el('p', { class: 'soft small' }, `Dot: mean ${data.metric} of a setting, lower is better. `,
      usable.some((group) => group.half_width !== null) ? 'Line: its 95 % interval. ' : 'One seed a setting, so no interval. ',
      'Rings: single jobs. Arrows: goes on beyond the axis. ',
      groups.some((group) => group.is_tied) ? 'Ties are judged by the seeds of all settings together, a line by its own seeds alone.' : ''),
    plot,
    usable.length > DOTS_FIRST ? el('p', { class: 'more' }, more) : null);
}

// The axis holds all means and jobs but far ones; an interval may widen it, not rule it.
function dotsRange(shown) {
  const values = shown.flatMap((group) => [group.mean, ...group.entries.map((entry) => entry.values[data.metric])]);
  const [low, high] = reach(values);
  const slack = Math.max(high - low, Math.abs(low) * 1e-3) * 1.5;
  const ends = shown.filter((group) => group.mean <= high)
    .flatMap(({ mean: middle, half_width: half }) => (half === null ? [] : [middle - half, middle + half]));
  return padded([
    Math.min(low, Math.max(low - slack, Math.min(...ends))),
    Math.max(high, Math.min(high + slack, Math.max(...ends))),
  ]);
}

function dots(shown, width) {
  const wide = width >= 640;
  const row = wide ? 26 : 42;
  const top = 24;
  const bottom = top + shown.length * row;
  const narrowRoom = Math.floor((width - 130) / 7);
  const brief = !wide && shown.some((group) => setting(group.keys, groupKeys, ' ').length > narrowRoom);
  const texts = shown.map((group) => cellTexts(group, wide, brief));
  const columns = columnStarts(texts, wide, width, narrowRoom);
  const left = wide ? columns.end : 8;
  const right = width - (wide ? 150 : 8);
  const scale = linear(...dotsRange(shown), left + 6, right - 6);
  const best = shown.find((group) => group.is_best);
  const names = brief ? svg('text', { class: 'soft', x: 0, y: 12 }, namesAlone()) : wide ? groupKeys.map((key, index) => svg('text', { class: 'soft', x: columns.starts[index], y: 12 }, cut(shortNames.get(key), columns.characters))) : [];
  return svg('svg', {
    width, height: bottom + 40, viewBox: `0 0 ${width} ${bottom + 40}`, role: 'img',
    'aria-label': `Mean ${data.metric} of ${count(shown.length, 'setting')}, best first; the figures are in the table above.`,
  },
  names,
  wide ? svg('text', { class: 'soft', x: width, y: 12, 'text-anchor': 'end' }, 'mean ± 95 %') : null,
  shown.map((_, index) => (wide && index % 2 ? svg('rect', { class: 'stripe', x: 0, y: top + index * row, width, height: row }) : null)),
  axisX(scale, { top, bottom, left, right, label: `${data.metric} (${unit(data.metric)})` }),
  best ? svg('line', { class: 'reference', x1: scale(best.mean), x2: scale(best.mean), y1: top, y2: bottom }) : null,
  shown.map((group, index) => dotsRow(group, { texts: texts[index], columns, scale, left, right, width, wide, y: top + index * row, row })));
}

// On a narrow screen one line a setting, of its values alone where the keys' names have no room.
function cellTexts(group, wide, brief) {
  if (wide) return groupKeys.map((key) => keyText(group.keys[key]));
  return [brief ? valuesAlone(group.keys) : setting(group.keys, groupKeys, ' ')];
}

// Where the keys' values stand at the left: as wide as they need, the longest cut where all would not fit.
function columnStarts(texts, wide, width, narrowRoom) {
  if (!wide) return { starts: [0], end: 0, characters: narrowRoom };
  const room = width * 0.46;
  const lengths = groupKeys.map((key, index) => Math.max(shortNames.get(key).length, ...texts.map((row) => row[index].length)));
  let characters = Math.max(8, ...lengths);
  const widths = () => lengths.map((length) => Math.min(length, characters) * 7.2 + 16);
  const total = () => widths().reduce((sum, part) => sum + part, 0);
  while (characters > 6 && total() > room) characters -= 1;
  const starts = [];
  const end = widths().reduce((sum, part) => (starts.push(sum), sum + part), 0);
  return { starts, end: Math.max(end, 40), characters };
}

function dotsRow(group, { texts, columns, scale, left, right, width, wide, y, row }) {
  const middle = y + (wide ? row / 2 : row - 13);
  const baseline = wide ? middle + 4 : y + 15;
  const inside = (x) => Math.min(right, Math.max(left, x));
  const off = group.mean > scale.high;
  const half = group.half_width ?? 0;
  const [from, to] = [scale(group.mean - half), scale(group.mean + half)];
  const labels = texts.map((text, index) => svg('text', { x: columns.starts[index], y: baseline, class: group.is_best ? 'halo strong' : 'halo' },
    cut(text, columns.characters), svg('title', {}, text)));
  return svg('g', { class: group.is_best ? 'best' : group.is_tied ? 'tied' : null },
    svg('title', {}, `${setting(group.keys)}: ${showMean(group)} (${count(group.entries.length, 'job')})`),
    labels,
    svg('text', { x: width, y: baseline, 'text-anchor': 'end', class: `halo ${group.is_best ? 'strong accent' : group.is_tied ? 'accent' : 'soft'}` },
      `${showMean(group)}${groups.length < 2 ? '' : group.is_best ? ' best' : group.is_tied ? ' tied' : ''}`),
    group.half_width === null || off ? null : svg('line', { class: 'interval', x1: inside(from), x2: inside(to), y1: middle, y2: middle }),
    !off && from < left ? arrow(left, middle, -1) : null,
    off || to > right ? arrow(right, middle, 1) : null,
    group.entries.length < 2 ? null : group.entries.filter(({ values }) => inAxis(values[data.metric], scale))
      .map(({ values }) => svg('circle', { class: 'seed', cx: scale(values[data.metric]), cy: middle, r: 4 })),
    off ? null : svg('circle', { class: 'dot', cx: scale(group.mean), cy: middle, r: 5 }));
}

function inAxis(value, scale) {
  return value !== null && value !== undefined && value >= scale.low && value <= scale.high;
}

function arrow(x, y, sign) {
  return svg('path', { class: 'off', d: `M${x + sign * 6},${y}l${-sign * 7},-4v8z` });
}
