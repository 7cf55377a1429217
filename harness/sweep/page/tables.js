// Tables that are sorted by a click on a column's name, and show the first rows until asked for all.

// A name that may break after its dots, underscores and slashes, but into no shorter lines than `least`.
function breakable(name, least = 9) {
  const lines = [''];
  for (const part of name.split(/(?<=[._/])/)) {
    if (lines[lines.length - 1].length + part.length > least && lines[lines.length - 1].length) lines.push(part);
    else lines[lines.length - 1] += part;
  }
  return lines.flatMap((line, index) => (index ? [el('wbr'), line] : [line]));
}

// columns: [{ name, unit, kind, value(row), cell(row) }]; `value` null: not sortable. `first`: [column, descending].
function table({ caption, columns, rows, limit = 50, first = null, rowClass = () => null }) {
  let [sorted, descending] = first ?? [null, false];
  let all = false;
  const body = el('tbody');
  const more = el('button', { type: 'button', onclick: () => { all = !all; fill(); } });
  const moreLine = el('p', { class: 'more small' }, more);
  const heads = columns.map((column) => head(column));

  function head(column) {
    const label = breakable(column.name);
    const inside = column.value ? el('button', { type: 'button', onclick: () => sort(column) }, label) : label;
    return el('th', { scope: 'col', class: column.kind, title: column.title ?? null }, inside,
      column.unit ? el('span', { class: 'unit' }, column.unit) : null);
  }

  function sort(column) {
    [sorted, descending] = [column, sorted === column ? !descending : false];
    fill();
  }

  function inOrder() {
    if (!sorted) return rows;
    const sign = descending ? -1 : 1;
    const missing = (value) => value === undefined || (value === null && sorted.kind === 'number');
    return rows.map((row) => [sorted.value(row), row])
      .sort(([a], [b]) => missing(a) - missing(b) || (missing(a) ? 0 : sign * ordered(a, b)))
      .map(([, row]) => row);
  }

  function fill() {
    const shown = inOrder();
    body.replaceChildren(...shown.slice(0, all ? undefined : limit).map((row) => el('tr', { class: rowClass(row) },
      columns.map((column) => el('td', { class: column.kind }, column.cell(row))))));
    heads.forEach((cell, index) => {
      if (!columns[index].value) return;
      cell.setAttribute('aria-sort', columns[index] !== sorted ? 'none' : descending ? 'descending' : 'ascending');
    });
    moreLine.hidden = shown.length <= limit;
    more.textContent = all ? `Show the first ${limit} only` : `Show all ${fixed(shown.length, 0)} (now the first ${limit})`;
  }

  fill();
  const frame = el('div', {},
    el('div', { class: 'scroll', role: 'region', tabindex: 0, 'aria-label': caption },
      el('table', { 'aria-label': caption }, el('thead', {}, el('tr', {}, heads)), body)),
    moreLine);
  frame.replaceRows = (newRows) => {
    rows = newRows;
    fill();
  };
  return frame;
}

function keyColumns(names) {
  return names.map((key) => ({
    name: key,
    kind: valuesOf(key).every((value) => typeof value === 'number') ? 'number' : 'key',
    value: (row) => row.keys[key],
    cell: (row) => el('span', { title: keyText(row.keys[key]), class: key in row.keys ? null : 'none' }, cut(keyText(row.keys[key]), 32)),
  }));
}

function mark(group) {
  if (group.is_best) return el('span', { class: 'mark best' }, 'best');
  return group.is_tied ? el('span', { class: 'mark tied', title: 'nearer to the best than the noise of the seeds' }, 'tied') : null;
}

function figureColumn(name, of) {
  return { name, unit: unit(name), kind: 'number', value: (row) => of(row)[name] ?? null, cell: (row) => show(name, of(row)[name]) };
}

function groupsTable() {
  const meanColumn = {
    name: data.metric, unit: [unit(data.metric), el('br'), 'mean ± 95 %'], kind: 'number',
    value: (group) => group.mean, cell: (group) => el('b', {}, showMean(group)),
  };
  // The metric's own column would only say the mean again.
  const repeated = groups.every((group) => group.means[data.metric] === group.mean);
  const columns = [
    ...keyColumns(groupKeys),
    groups.length < 2 || !bestGroup ? null : { name: 'mark', kind: 'key', value: (group) => (group.is_best ? 0 : group.is_tied ? 1 : 2), cell: (group) => mark(group) },
    meanColumn,
    { name: 'seeds', kind: 'number', value: (group) => group.entries.length, cell: (group) => fixed(group.entries.length, 0) },
    ...data.columns.filter((name) => !(repeated && name === data.metric) && name !== 'seeds')
      .map((name) => figureColumn(name, (group) => group.means)),
  ].filter(Boolean);
  return section('settings', 'Settings',
    el('p', { class: 'soft small' },
      'One row for the done jobs that differ in their seed alone; figures are means over them. ',
      'A click on a column’s name sorts. ',
      groups.some((group) => group.is_tied) ? '“tied”: not told apart from the best by more than the noise of the seeds.' : ''),
    table({
      caption: 'Settings, with the mean of every figure', columns, rows: groups, first: [meanColumn, false],
      rowClass: (group) => (group.is_best ? 'best' : null),
    }));
}
