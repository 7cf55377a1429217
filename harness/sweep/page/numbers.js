// Figures for people: sensible digits, thousands apart, units beside the names.

const NONE = '–';

const UNITS = {
  val_loss: 'nats/token', best_val_loss: 'nats/token', loss: 'nats/token', train_loss: 'nats/token',
  val_bits_per_byte: 'bits/byte', best_val_bits_per_byte: 'bits/byte',
  mean_coverage: 'times a token',
  tokens_per_s: 'tokens/s', data_wait_share: '% of time', peak_memory_mb: 'MB', wall_s: 'time',
};
const INTEGERS = new Set(['tokens', 'unique_tokens', 'target_tokens', 'tokens_per_s', 'peak_memory_mb', 'step', 'steps']);

const metricDigits = digitsOfMetric();

// Enough digits to show the noise of the seeds with two figures, and the differences with three.
function digitsOfMetric() {
  const widths = groups.map((group) => group.half_width).filter((width) => width > 0).sort((a, b) => a - b);
  const means = groups.map((group) => group.mean).filter((mean) => mean !== null);
  const scale = widths.length ? widths[widths.length >> 1] / 10 : (Math.max(...means) - Math.min(...means)) / 100;
  return scale > 0 && Number.isFinite(scale) ? Math.min(5, Math.max(3, Math.ceil(-Math.log10(scale)))) : 4;
}

function unit(name) {
  const known = Object.keys(UNITS).find((suffix) => name === suffix || name.endsWith(`/${suffix}`));
  return known ? UNITS[known] : name.includes('loss') ? 'nats/token' : name.includes('bits_per_byte') ? 'bits/byte' : '';
}

function fixed(number, digits) {
  return number.toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace('-', '−');
}

function figures(number, count = 4) {
  if (number === 0) return '0';
  const size = Math.abs(number);
  if (size >= 1e15 || size < 1e-4) return number.toExponential(count - 1).replace('-', '−');
  return fixed(number, Math.max(0, count - 1 - Math.floor(Math.log10(size))));
}

function duration(seconds) {
  if (seconds < 60) return `${figures(seconds, 3)} s`;
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, '0');
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${fixed(Math.floor(whole / 3600), 0)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

function show(name, value) {
  if (value === null || value === undefined) return NONE;
  if (name === data.metric) return fixed(value, metricDigits);
  if (name === 'wall_s') return duration(value);
  if (name === 'data_wait_share') return fixed(100 * value, 1);
  if (INTEGERS.has(name)) return fixed(value, 0);
  if (name === 'mean_coverage' || name === 'epochs') return value < 1 ? figures(value, 2) : fixed(value, 2);
  if (name.includes('loss') || name.includes('bits_per_byte')) return fixed(value, 4);
  return Number.isInteger(value) ? fixed(value, 0) : figures(value);
}

function showMean(group) {
  return group.half_width === null ? show(data.metric, group.mean)
    : `${show(data.metric, group.mean)} ± ${fixed(group.half_width, metricDigits)}`;
}

// For axes: 100 k, 1.5 M.
function short(number) {
  for (const [size, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (Math.abs(number) >= size) return `${+(number / size).toPrecision(4)} ${letter}`;
  }
  return `${+number.toPrecision(4)}`.replace('-', '−');
}

function count(number, one, many = `${one}s`) {
  return `${fixed(number, 0)} ${number === 1 ? one : many}`;
}

function mean(numbers) {
  const finite = numbers.filter((number) => number !== null && number !== undefined);
  return finite.length ? finite.reduce((sum, number) => sum + number, 0) / finite.length : null;
}
