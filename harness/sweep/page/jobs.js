// The jobs themselves: what went wrong, and every one with its command.

const STATES = ['failed', 'died', 'stopped', 'running', 'waiting', 'done'];

const STATE_WORDS = {
  failed: 'ended with an error', died: 'its process is gone without a word', stopped: 'saved and stopped; can go on',
  running: 'at work when this page was written', waiting: 'not begun', done: 'trained to the end',
};

function state(entry) {
  return el('span', { class: `state ${STATES.includes(entry.state) ? entry.state : ''}`, title: STATE_WORDS[entry.state] ?? null }, entry.state);
}

// Where all jobs lie: said once, and left out of each row.
const folder = commonFolder(entries.map((entry) => entry.path));

function commonFolder(paths) {
  const parts = paths.map((path) => path.split('/').slice(0, -1));
  let depth = 0;
  while (paths.length > 1 && parts.every((part) => part.length > depth && part[depth] === parts[0][depth])) depth += 1;
  return parts.length && depth ? `${parts[0].slice(0, depth).join('/')}/` : '';
}

const pathColumn = {
  name: 'path', unit: folder ? `in ${folder}` : null, kind: 'path mono', value: (entry) => entry.path,
  cell: (entry) => breakable(entry.path.slice(folder.length), 40),
};

const stateColumn = { name: 'state', kind: 'key', value: (entry) => STATES.indexOf(entry.state), cell: state };

function leftOutSection() {
  const rest = entries.filter((entry) => entry.state !== 'done' || entry.reason);
  if (!rest.length) return null;
  const counts = STATES.map((name) => [name, rest.filter((entry) => entry.state === name).length]).filter(([, number]) => number);
  const words = (name) => (name === 'done' ? 'not compared for the reason given' : STATE_WORDS[name]);
  return section('left-out', 'Not compared',
    el('p', { class: 'soft small' }, counts.map(([name, number]) => `${fixed(number, 0)} ${name} (${words(name)})`).join('; '),
      '. A sweep’s command, given again, takes up the jobs that are not done and leaves the others alone. One whose words were a mistake is gone from here when its directory is.'),
    table({
      caption: 'Jobs that are not compared', rows: rest, limit: 25, first: [stateColumn, false],
      columns: [
        stateColumn,
        { name: 'reason', kind: 'reason', value: (entry) => entry.reason, cell: (entry) => entry.reason || NONE },
        ...keyColumns(data.swept),
        figureColumn('tokens', (entry) => entry.values),
        pathColumn,
      ],
    }));
}

function jobsSection() {
  const words = el('input', { type: 'search', placeholder: 'stride=128 failed', oninput: () => filter() });
  const found = el('span', { class: 'soft', 'aria-live': 'polite' });
  const texts = new Map(entries.map((entry) => [entry,
    [entry.state, entry.path, entry.reason, ...data.swept.map((key) => `${key}=${keyText(entry.keys[key])}`), ''].join(' ').toLowerCase()]));
  const jobs = table({
    caption: 'All jobs', rows: entries, limit: 50,
    columns: [
      stateColumn,
      ...keyColumns(data.swept),
      figureColumn(data.metric, (entry) => entry.values),
      ...data.columns.filter((name) => ['tokens', 'tokens_per_s', 'wall_s'].includes(name)).map((name) => figureColumn(name, (entry) => entry.values)),
      { name: 'copy', kind: 'copying', cell: (entry) => [
        entry.command ? copyButton(entry.command, 'Command', `Copy the command of ${entry.path}`) : null,
        copyButton(entry.path, 'Path', `Copy the path ${entry.path}`)] },
      pathColumn,
      { name: 'command', kind: 'mono', cell: (entry) => el('span', { class: 'clip', title: entry.command }, entry.command || NONE) },
    ],
  });
  function filter() {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean)
      .map((word) => (word.includes('=') ? `${word} ` : word)); // seed=1 is not seed=10
    const left = entries.filter((entry) => wanted.every((word) => texts.get(entry).includes(word)));
    found.textContent = wanted.length ? count(left.length, 'job') : '';
    jobs.replaceRows(left);
  }
  return section('jobs', entries.length === 1 ? 'The job' : 'All jobs',
    entries.length > 8 ? el('div', { class: 'controls' }, el('label', {}, 'filter', words), found) : null, jobs);
}
