// What every part needs: the data, elements (text only, never markup), and how keys are named and ordered.

const data = JSON.parse(document.getElementById('data').textContent);
const entries = data.entries.map((entry, place) => ({ ...entry, place }));
const groups = data.groups.map((group) => ({ ...group, entries: group.entries.map((place) => entries[place]) }))
  .sort((a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity));
const bestGroup = groups.find((group) => group.is_best) ?? null;
const compared = groups.flatMap((group) => group.entries);
const groupKeys = data.swept.filter((key) => key !== 'seed');

const SVG = 'http://www.w3.org/2000/svg';

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === '--c') node.style.setProperty('--c', value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function section(id, heading, ...children) {
  return el('section', { id, 'aria-labelledby': `${id}-heading` }, el('h2', { id: `${id}-heading` }, heading), ...children);
}

// ---- keys

// The last part of a dotted name where that is enough to tell the keys apart.
const shortNames = new Map(data.swept.map((key) => {
  const last = key.split('.').pop();
  return [key, data.swept.some((other) => other !== key && other.split('.').pop() === last) ? key : last];
}));

function keyText(value) {
  if (value === undefined) return '–';
  if (typeof value === 'string') return value === '' ? "''" : value;
  if (typeof value === 'number' && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential();
  return typeof value === 'object' || typeof value === 'boolean' ? JSON.stringify(value) : String(value);
}

function setting(keys, names = groupKeys, separator = '  ') {
  return names.filter((key) => key in keys)
    .map((key) => `${shortNames.get(key)}=${keyText(keys[key])}`).join(separator) || 'all settings equal';
}

// The names and the values of a setting without one another, for where there is little room.
function namesAlone() {
  return groupKeys.map((key) => shortNames.get(key)).join(' · ');
}

function valuesAlone(keys) {
  return groupKeys.map((key) => keyText(keys[key])).join(' · ');
}

// A long text with its middle left out: the beginning and the end tell values apart.
function cut(text, length) {
  if (text.length <= length) return text;
  const head = Math.ceil((length - 1) / 2);
  return `${text.slice(0, head)}…${text.slice(text.length - (length - 1 - head))}`;
}

// Numbers by size, then words; null first of the words; what is missing last.
function ordered(a, b) {
  const rank = (value) => (value === undefined ? 4 : typeof value === 'number' ? 1 : value === null ? 2 : 3);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  if (rank(a) === 1) return a - b;
  return keyText(a).localeCompare(keyText(b), 'en', { numeric: true });
}

function valuesOf(key, of = entries) {
  const seen = new Map();
  for (const entry of of) if (key in entry.keys) seen.set(JSON.stringify(entry.keys[key]), entry.keys[key]);
  return [...seen.values()].sort(ordered);
}

// ---- copying

function copyButton(text, words = 'Copy', name = words) {
  return el('button', { type: 'button', 'aria-label': name, onclick: () => copy(text) }, words);
}

async function copy(text) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = copyOld(text); // pages opened from a file have no clipboard in some browsers
  }
  tell(copied ? 'Copied.' : 'This browser does not let a page copy: please select the text.');
}

function copyOld(text) {
  const focused = document.activeElement;
  const area = el('textarea', { class: 'keyboard', readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand('copy');
  area.remove();
  focused?.focus();
  return copied;
}

let hiding = 0;
function tell(text) {
  const hint = document.getElementById('hint');
  hint.textContent = text;
  hint.classList.add('shown');
  clearTimeout(hiding);
  hiding = setTimeout(() => hint.classList.remove('shown'), 1800);
}
