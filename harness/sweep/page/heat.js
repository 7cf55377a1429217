// A map of the metric over two swept keys: the mean of the compared jobs over all other keys and seeds.

const SHADES = 9;

function heatSection() {
  const varied = data.swept.filter((key) => valuesOf(key).length > 1);
  if (varied.length < 2 || !compared.length) return null;
  // Not the seed first: few ask for it.
  const first = [...new Set([...varied.filter((key) => groupKeys.includes(key)), ...varied])];
  const view = { row: first[0], column: first[1] };
  const place = el('div');
  const draw = () => place.replaceChildren(...heatMap(view));
  const options = varied.map((key) => [key, key]);
  const selects = el('div', { class: 'controls' });
  const change = (side, other) => (key) => {
    if (key === view[other]) view[other] = view[side];
    view[side] = key;
    fill();
  };
  // Both anew: a key taken by one side goes to the other.
  const fill = () => {
    const focused = [...selects.querySelectorAll('select')].indexOf(document.activeElement);
    selects.replaceChildren(select('rows', options, view.row, change('row', 'column')), select('columns', options, view.column, change('column', 'row')));
    if (focused >= 0) selects.querySelectorAll('select')[focused].focus();
    draw();
  };
  fill();
  return section('map', 'Map of two keys', selects, place);
}

function heatMap({ row, column }) {
  const [rows, columns] = [valuesOf(row), valuesOf(column)];
  const cells = new Map();
  const name = (a, b) => JSON.stringify([a ?? null, b ?? null]);
  for (const entry of compared) {
    const cell = name(entry.keys[row], entry.keys[column]);
    cells.set(cell, [...(cells.get(cell) ?? []), entry.values[data.metric]]);
  }
  const means = [...cells.values()].map(mean);
  const [low, high] = padHigh(reach(means));
  const counts = new Set([...cells.values()].map((values) => values.length));
  const uneven = counts.size > 1;
  const shade = (value) => (high > low ? Math.min(SHADES - 1, Math.max(0, Math.round(((high - value) / (high - low)) * (SHADES - 1)))) : SHADES - 1);
  const lowest = means.length ? Math.min(...means) : null;

  function cellOf(a, b) {
    const values = cells.get(name(a, b));
    if (!values) return el('td', { class: 'missing', title: 'no job to compare' }, el('span', { 'aria-label': 'no job to compare' }, NONE));
    const value = mean(values);
    const step = shade(value);
    return el('td', {
      class: `${inkOn(step)}${value === lowest ? ' top' : ''}`, '--c': `var(--heat-${step})`,
      title: `${row} = ${keyText(a)}, ${column} = ${keyText(b)}: mean of ${count(values.length, 'job')}`,
    }, show(data.metric, value), uneven ? el('small', {}, `n = ${values.length}`) : null);
  }

  return [
    el('div', { class: 'scroll', role: 'region', tabindex: 0, 'aria-label': `Mean ${data.metric} over ${row} and ${column}` },
      el('table', { class: 'heat' },
        el('thead', {},
          el('tr', {}, el('td', { class: 'axis corner' }), el('th', { class: 'axis', colspan: columns.length }, `${column} →`)),
          el('tr', {}, el('th', { class: 'axis' }, `${row} ↓`), columns.map((value) => el('th', { scope: 'col', title: keyText(value) }, cut(keyText(value), 18))))),
        el('tbody', {}, rows.map((a) => el('tr', {},
          el('th', { scope: 'row', title: keyText(a) }, cut(keyText(a), 24)), columns.map((b) => cellOf(a, b))))))),
    means.length ? heatScale(low, high, means.some((value) => value > high), cells.size < rows.length * columns.length) : null,
    el('p', { class: 'soft small' },
      `Each cell: mean ${data.metric} of the jobs with these two values`, uneven ? ', n of them' : counts.size ? ` (${count([...counts][0], 'job')} each)` : '',
      '. The lowest is framed. ',
      uneven ? 'Cells with unlike numbers of jobs may average over unlike other keys: compare them with care.' : ''),
  ].filter(Boolean);
}

// Which text can be read on a shade; the colours of both themes are in the style sheet.
function inkOn(step) {
  return ['pale', 'middle', 'strong'][(step > 4) + (step > 5)];
}

function padHigh([low, high]) {
  return high > low ? [low, high] : [low, low];
}

function heatScale(low, high, beyond, missing) {
  const steps = Array.from({ length: SHADES }, (_, index) => el('i', { '--c': `var(--heat-${SHADES - 1 - index})` }));
  return el('div', { class: 'scale' },
    el('span', {}, `${data.metric} (${unit(data.metric)}): ${show(data.metric, low)}`),
    el('span', { class: 'steps', 'aria-hidden': 'true' }, steps),
    el('span', {}, `${show(data.metric, high)}${beyond ? ' and more' : ''}`),
    missing ? el('span', {}, el('i', { class: 'missing' }), ' no job to compare') : null);
}
