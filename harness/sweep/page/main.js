// The page from top to bottom: what was compared, the answer, then the figures behind it.

const NAMED = 4;

function summary() {
  const parts = STATES.map((name) => [name, entries.filter((entry) => entry.state === name).length]).filter(([, number]) => number);
  const fact = (words, ...value) => el('li', {}, el('span', { class: 'soft' }, words, ' '), ...value);
  return el('header', {},
    el('h1', {}, data.name || 'Comparison of runs'),
    el('ul', { class: 'facts' },
      fact('jobs', el('b', {}, fixed(entries.length, 0)),
        parts.length ? [': ', parts.reverse().map(([name, number]) => `${fixed(number, 0)} ${name}`).join(', ')] : ''),
      data.swept.length ? fact('swept', el('b', {}, data.swept.join(', '))) : null,
      fact('metric', el('b', {}, data.metric), ` (${unit(data.metric)}, lower is better)`),
      data.equal_tokens === null ? null : fact('compared after', el('b', {}, fixed(data.equal_tokens, 0)), ' tokens')),
    data.notes.length ? el('ul', { class: 'notes' }, data.notes.map((note) => el('li', {}, note))) : null);
}

function answer() {
  return el('div', { class: 'answer', role: 'region', 'aria-label': 'Answer' }, sentences().map((parts) => el('p', {}, parts)));
}

function sentences() {
  if (!entries.length) return [['There are no jobs here yet.']];
  if (!groups.length) {
    return [[entries.some((entry) => entry.state === 'done') ? 'No done job has a result to compare; the reasons are below.' : 'No job is done yet, so there is nothing to compare.']];
  }
  if (groups.length > 1 && !bestGroup) return [['These jobs are too unlike for one to be called best; the notes above say why.']];
  if (groups.length === 1) return [['Reached: ', ...reached(groups[0])], ['Only one setting is done, so there is nothing to compare it with. ', commandLink()]];
  return [['Best: ', el('b', {}, longSetting(bestGroup)), ', with ', ...reached(bestGroup), commandLink()], noise()];
}

// "mean val_loss 2.396 ± 0.016 nats/token (95 % interval, 2 seeds) after 102,400 tokens. "
function reached(group) {
  const jobs = count(group.entries.length, 'seed');
  return [
    `${group.entries.length > 1 ? 'mean ' : ''}${data.metric} `,
    el('b', {}, `${showMean(group)} ${unit(data.metric)}`),
    ` (${group.half_width === null ? jobs : `95 % interval, ${jobs}`})`,
    data.equal_tokens === null ? '. ' : ` after ${fixed(data.equal_tokens, 0)} tokens. `,
  ];
}

function commandLink() {
  return data.best !== null && entries[data.best].command ? el('a', { href: '#command' }, 'Its command.') : null;
}

function longSetting(group) {
  return groupKeys.map((key) => `${key} = ${cut(keyText(group.keys[key]), 60)}`).join(', ');
}

function noise() {
  const tied = groups.filter((group) => group.is_tied);
  if (tied.length) {
    const names = tied.slice(0, NAMED).map((group) => `${setting(group.keys, groupKeys, ' ')} (${showMean(group)})`).join('; ');
    const rest = tied.length > NAMED ? `; and ${count(tied.length - NAMED, 'more', 'more')}, marked “tied” below` : '';
    return [`Inside the noise of the seeds, so not told apart from it: ${names}${rest}.`];
  }
  if (groups.every((group) => group.half_width === null)) {
    return ['Each setting has one seed, so what chance alone does to it is not known: a difference may be noise.'];
  }
  return ['No other setting is inside the noise of the seeds.'];
}

function bestCommand() {
  const best = data.best === null ? null : entries[data.best];
  if (!best) return null;
  const several = bestGroup && bestGroup.entries.length > 1;
  const line = (command, what) => el('div', { class: 'command' }, el('code', {}, command), copyButton(command, 'Copy', `Copy the command ${what}`));
  return section('command', entries.length > 1 ? 'The best job again' : 'The job again',
    best.command ? line(best.command, 'of the best job') : null,
    el('p', { class: 'soft small' }, 'To go on with it, in a directory of its own:'),
    line(data.onward, 'that goes on with the best job'),
    el('p', { class: 'soft small' }, `${data.metric} ${show(data.metric, best.values[data.metric])}${several ? ', the lowest of the best setting’s seeds' : ''}; its directory: `, el('code', {}, best.path)));
}

document.getElementById('page').replaceChildren(...[
  summary(),
  answer(),
  groups.length ? groupsTable() : null,
  groups.length > 1 || groups.some((group) => group.entries.length > 1) ? dotsSection() : null,
  curvesSection(),
  heatSection(),
  groups.length > 1 ? coverageSection() : null,
  leftOutSection(),
  entries.length ? jobsSection() : null,
  bestCommand(),
].filter(Boolean));
