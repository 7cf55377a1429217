// Loss against tokens or seconds: a curve a job, coloured by a key; a point under the pointer says what it is.

const COLOURS = 13;
const MANY = 40;
const CROWD = 300;
const LEGEND_FIRST = 24;

const withCurve = entries.filter((entry) => entry.train.loss.length || entry.validation.loss.length);

function curvesSection() {
  if (!withCurve.length) return null;
  const hasValidation = withCurve.some((entry) => entry.validation.loss.length);
  const hasTraining = withCurve.some((entry) => entry.train.loss.length);
  const view = {
    which: hasValidation ? 'validation' : 'train', x: 'tokens', log: false, late: false,
    by: groupKeys.length > 1 && groups.length <= COLOURS ? 'setting' : groupKeys[0] ?? data.swept[0] ?? 'setting',
    picked: new Set(),
  };
  const legend = el('ul', { class: 'legend', 'aria-label': 'Colours; a click shows that one alone' });
  const plot = curvesPlot(view);
  const change = (changes) => {
    Object.assign(view, changes);
    if ('by' in changes) {
      view.picked.clear();
      fillLegend(legend, view, plot.redraw);
    }
    plot.redraw();
  };
  fillLegend(legend, view, plot.redraw);
  const colourings = [['setting', 'setting'], ...data.swept.map((key) => [key, key])];
  return section('curves', 'Loss on the way',
    el('div', { class: 'controls' },
      hasValidation && hasTraining ? choice('Loss', [['validation', 'validation'], ['train', 'training']], view.which, (which) => change({ which })) : null,
      choice('Against', [['tokens', 'tokens'], ['seconds', 'seconds']], view.x, (x) => change({ x })),
      data.swept.length ? select('colour', colourings, view.by, (by) => change({ by })) : null,
      tick('log x', (log) => change({ log })),
      tick('second half only', (late) => change({ late }))),
    el('div', { class: 'whole' }, data.swept.length ? legend : null, plot),
    el('p', { class: 'soft small' },
      withCurve.some((entry) => entry.state !== 'done') ? 'Broken lines: jobs that are not done. ' : '',
      'Point at a curve, or focus the figure and use the arrow keys, to see which job it is.'));
}

// ---- controls

function choice(name, options, chosen, change) {
  return el('fieldset', {}, el('legend', {}, name), options.map(([value, words]) => el('label', {},
    el('input', { type: 'radio', name, value, checked: value === chosen, onchange: () => change(value) }), words)));
}

function select(name, options, chosen, change) {
  return el('label', {}, name, el('select', { onchange: (event) => change(options[event.target.selectedIndex][0]) },
    options.map(([value, words]) => el('option', { selected: value === chosen }, words))));
}

function tick(name, change) {
  return el('label', {}, el('input', { type: 'checkbox', onchange: (event) => change(event.target.checked) }), name);
}

// ---- colours

function classOf(entry, by) {
  return by === 'setting' ? setting(entry.keys) : keyText(entry.keys[by]);
}

// The classes in order: settings best first, values by size.
function classes(by) {
  const names = by === 'setting'
    ? [...groups.map((group) => setting(group.keys)), ...withCurve.map((entry) => setting(entry.keys))]
    : [...valuesOf(by).map(keyText), ...withCurve.map((entry) => classOf(entry, by))];
  const used = new Set(withCurve.map((entry) => classOf(entry, by)));
  return [...new Set(names)].filter((name) => used.has(name));
}

function coloursOf(names) {
  const step = names.length > 1 ? (COLOURS - 1) / (names.length - 1) : 0;
  return new Map(names.map((name, index) => [name, `var(--line-${Math.round(index * step)})`]));
}

function fillLegend(legend, view, redraw) {
  const names = classes(view.by);
  const colours = coloursOf(names);
  legend.replaceChildren(
    ...names.slice(0, LEGEND_FIRST).map((name) => {
      const button = el('button', { type: 'button', 'aria-pressed': 'false' }, el('span', { class: 'swatch', '--c': colours.get(name) }), name);
      button.addEventListener('click', () => {
        if (!view.picked.delete(name)) view.picked.add(name);
        button.setAttribute('aria-pressed', view.picked.has(name));
        redraw();
      });
      return el('li', {}, button);
    }),
    names.length > LEGEND_FIRST ? el('li', { class: 'soft' }, `and ${fixed(names.length - LEGEND_FIRST, 0)} more`) : '',
    names.length > COLOURS ? el('li', { class: 'soft' }, 'Neighbours share a colour.') : '');
}

// ---- the plot

function curvesPlot(view) {
  const box = el('div', { class: 'hover', hidden: true });
  const spoken = el('div', { class: 'keyboard', 'aria-live': 'polite' });
  let lines = [];
  const plot = figure((width) => {
    const drawn = drawCurves(view, width);
    lines = drawn.lines;
    box.hidden = true;
    pointing(drawn, box, spoken);
    return drawn.root;
  });
  plot.append(box, spoken);
  return plot;
}

// The points of a curve in the axes' terms; a loss or time that is not known breaks the line.
function series(view) {
  return withCurve.map((entry) => {
    const { loss, [view.x]: xs } = entry[view.which];
    const points = xs.map((x, index) => ({ x, y: loss[index], index })).filter(({ x }) => x !== null && (!view.log || x > 0));
    return { entry, name: classOf(entry, view.by), points };
  }).filter(({ points }) => points.some(({ y }) => y !== null));
}

function drawCurves(view, width) {
  const [left, right, top, bottom] = [54, width - 10, 28, width < 640 ? 300 : 400];
  const colours = coloursOf(classes(view.by));
  const all = series(view);
  const faint = (line) => view.picked.size > 0 && !view.picked.has(line.name);
  const [x, y, beyond] = curveScales(view, all, { left, right, top, bottom });
  // The best on top: where hundreds of curves lie on one another, theirs are looked for.
  const lines = [...all].sort((a, b) => lastOf(b) - lastOf(a)).map((line) => {
    const points = line.points.filter((point) => point.x >= x.low)
      .map((point) => ({ ...point, px: x(point.x), py: point.y === null ? null : y(point.y) }));
    const kind = ['curve', all.length > CROWD ? 'crowd' : all.length > MANY ? 'many' : '', line.entry.state === 'done' ? '' : 'unfinished', faint(line) ? 'faint' : ''];
    const colour = colours.get(line.name);
    return { ...line, points, colour, faint: faint(line), path: svg('path', { class: kind.filter(Boolean).join(' '), d: trace(points), style: `stroke:${colour}` }) };
  });
  const few = lines.length <= MANY;
  const root = svg('svg', {
    class: 'plot', width, height: bottom + 42, viewBox: `0 0 ${width} ${bottom + 42}`, tabindex: 0, role: 'application',
    'aria-roledescription': 'figure',
    'aria-label': `${view.which === 'train' ? 'Training' : 'Validation'} loss of ${count(lines.length, 'job')} against ${view.x}; arrow keys walk along and between curves.`,
  },
  svg('clipPath', { id: 'curves-clip' }, svg('rect', { x: left - 4, y: top, width: right - left + 8, height: bottom - top })),
  axisX(x, { top, bottom, left, right, label: `${beyond ? `${count(beyond, 'job')} above the axis; ` : ''}${view.x === 'tokens' ? 'tokens trained on' : 'seconds of training'}` }),
  axisY(y, { left, right, top, bottom, label: 'nats/token' }),
  svg('g', { 'clip-path': 'url(#curves-clip)' }, lines.map((line) => line.path), few ? lines.flatMap((line) => (line.faint || line.points.length > 40 && view.which === 'train' ? [] : line.points.filter(({ py }) => py !== null)
    .map(({ px, py }) => svg('circle', { class: 'point', cx: px, cy: py, r: 2.4, style: `fill:${line.colour}` })))) : null));
  return { root, lines, view, width, top };
}

function curveScales(view, all, { left, right, top, bottom }) {
  let [low, high] = [Infinity, -Infinity];
  for (const { points } of all) for (const { x } of points) [low, high] = [Math.min(low, x), Math.max(high, x)];
  if (view.late) low = view.log ? Math.sqrt(low * high) : (low + high) / 2;
  else if (!view.log) low = 0;
  const x = (view.log ? logarithmic : linear)(low, high, left, right);
  // Jobs that ended far above the others leave the figure at its top.
  const usual = reach(all.map(lastOf))[1];
  const beyond = all.filter((line) => lastOf(line) > usual);
  let [least, most] = [Infinity, -Infinity];
  for (const line of all) {
    if (lastOf(line) > usual) continue;
    for (const point of line.points) {
      if (point.x >= low && point.y !== null) [least, most] = [Math.min(least, point.y), Math.max(most, point.y)];
    }
  }
  if (least > most) [least, most] = [0, usual];
  return [x, linear(...padded([least, most], 0.03), bottom, top), beyond.length];
}

function lastOf({ points }) {
  let last = points.length - 1;
  while (points[last].y === null) last -= 1;
  return points[last].y;
}

function trace(points) {
  let pen = 'M';
  let path = '';
  for (const { px, py } of points) {
    if (py === null) {
      pen = 'M';
      continue;
    }
    path += `${pen}${px.toFixed(1)},${py.toFixed(1)}`;
    pen = 'L';
  }
  return path;
}

// ---- what is under the pointer, or chosen by the arrow keys

function pointing({ root, lines, view, width, top }, box, spoken) {
  const ring = svg('circle', { class: 'ring', r: 5, visibility: 'hidden' });
  const above = svg('path', { class: 'curve over', 'clip-path': 'url(#curves-clip)' });
  const usable = lines.filter((line) => !line.faint).map((line) => ({ ...line, points: line.points.filter(({ py }) => py !== null).map((point) => ({ ...point, py: Math.max(top, point.py) })) }))
    .filter((line) => line.points.length);
  let over = null;
  let at = 0;
  root.append(above, ring);

  function to(line, index) {
    over = line;
    at = index;
    if (!line) {
      ring.setAttribute('visibility', 'hidden');
      above.setAttribute('d', '');
      box.hidden = true;
      return;
    }
    const { px, py } = line.points[index];
    filled(above, { d: line.path.getAttribute('d'), style: `stroke:${line.colour}` }, []);
    filled(ring, { cx: px, cy: py, visibility: 'visible', style: `stroke:${line.colour}` }, []);
    box.replaceChildren(...told(line, line.points[index], view));
    box.hidden = false;
    box.style.left = `${Math.max(0, Math.min(px + 14, width - box.offsetWidth))}px`;
    box.style.top = `${py + 14}px`;
    if (px + 14 + box.offsetWidth > width) box.style.left = `${Math.max(0, px - 14 - box.offsetWidth)}px`;
  }

  root.addEventListener('pointermove', (event) => {
    const frame = root.getBoundingClientRect();
    const [mx, my] = [event.clientX - frame.left, event.clientY - frame.top];
    let nearest = 40 * 40;
    let found = [null, 0];
    for (const line of usable) {
      line.points.forEach(({ px, py }, index) => {
        const distance = (px - mx) ** 2 + (py - my) ** 2;
        if (distance < nearest) [nearest, found] = [distance, [line, index]];
      });
    }
    to(...found);
  });
  root.addEventListener('pointerleave', () => to(null, 0));
  root.addEventListener('blur', () => to(null, 0));
  root.addEventListener('keydown', (event) => {
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
    const across = { ArrowUp: 1, ArrowDown: -1 }[event.key] ?? 0;
    if (event.key === 'Escape') to(null, 0);
    if ((!along && !across) || !usable.length) return;
    event.preventDefault();
    step(along, across);
    spoken.textContent = [...box.childNodes].map((node) => (node.nodeName === 'BR' ? '; ' : node.textContent)).join('');
  });

  // Up and down go to the next higher or lower curve at this place, by its nearest point.
  function step(along, across) {
    if (!over) return to(usable[0], usable[0].points.length - 1);
    if (along) return to(over, Math.min(over.points.length - 1, Math.max(0, at + along)));
    const { px } = over.points[at];
    const nearest = (line) => line.points.reduce((best, point, index) => (Math.abs(point.px - px) < Math.abs(line.points[best].px - px) ? index : best), 0);
    const stack = usable.map((line) => [line, nearest(line)]).sort(([a, i], [b, j]) => b.points[j].py - a.points[i].py);
    const place = stack.findIndex(([line]) => line === over) + across;
    return to(...stack[Math.min(stack.length - 1, Math.max(0, place))]);
  }
}

function told(line, point, view) {
  const { entry } = line;
  const { tokens, seconds } = entry[view.which];
  return [
    el('b', {}, `${view.which === 'train' ? 'training' : 'validation'} ${fixed(point.y, 4)} nats/token`), el('br'),
    `after ${fixed(tokens[point.index], 0)} tokens${seconds[point.index] === null ? '' : `, ${duration(seconds[point.index])}`}`, el('br'),
    ...data.swept.filter((key) => key in entry.keys).flatMap((key) => [`${key} = ${cut(keyText(entry.keys[key]), 60)}`, el('br')]),
    el('span', { class: 'soft' }, `${entry.state}: ${entry.path}`),
  ];
}
