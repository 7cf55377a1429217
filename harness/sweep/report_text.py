"""A comparison as lines for a terminal: the groups, best first; what is not among them and why; the best."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from harness.commandline.commands import shown
from harness.sweep.again import onward_command
from harness.sweep.comparison import Comparison, Entry, Group
from harness.sweep.states import DIED, DONE, FAILED, RUNNING, STOPPED, WAITING
from harness.sweep.statistics import pooled

_WIDTH = 110
_WIDEST_KEYS = 60
_LONGEST_VALUE = 32
_MOST_GROUPS, _MOST_OTHERS = 40, 20  # lines; all of them are in report.csv
_STATES = (DONE, RUNNING, STOPPED, FAILED, DIED, WAITING)

# The order in which columns are taken into the width, of those that are not alike in all groups; and how a
# value is written.
_DETAILS: dict[str, Callable[[float], str]] = {
    "mean_coverage": "{:.3g}".format,
    "unique_tokens": "{:,.0f}".format,
    "epochs": "{:.3g}".format,
    "best_val_loss": "{:.4f}".format,
    "tokens_per_s": "{:,.0f}".format,
    "wall_s": "{:,.1f}".format,
    "peak_memory_mb": "{:,.0f}".format,
    "data_wait_share": "{:.1%}".format,
    "tokens": "{:,.0f}".format,
    "val_bits_per_byte": "{:.4f}".format,
    "best_val_bits_per_byte": "{:.4f}".format,
    "val_loss": "{:.4f}".format,
}


def text(comparison: Comparison) -> str:
    """The whole report. The table is at most 110 columns wide, unless the swept keys alone are wider."""
    parts = [_heading(comparison), _table(comparison), _marks(comparison)]
    parts += [_others(comparison), _notes(comparison), _best(comparison)]
    whole = "\n\n".join("\n".join(lines) for lines in parts if lines)
    return whole.encode("utf-8", "backslashreplace").decode()  # names of files may be no text


def word(value: Any) -> str:
    """A swept value as on the command line, with all of its digits."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _words(values: Sequence[Any]) -> list[str]:
    """As `word`, numbers with six digits where those tell all of them apart."""
    full = [word(value) for value in values]
    short = [
        f"{value:g}" if isinstance(value, float) else text for value, text in zip(values, full, strict=True)
    ]
    return short if len(set(short)) == len(set(full)) else full


def _heading(comparison: Comparison) -> list[str]:
    counts = Counter(entry.state for entry in comparison.entries)
    states = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
    line = f"{comparison.name}: {_plural(len(comparison.entries), 'job')}, {states}"
    if not comparison.groups:
        return [line, "nothing to compare yet: no job is done that has a result"]
    seeds = sorted({group.seeds for group in comparison.groups})
    jobs, groups = sum(group.seeds for group in comparison.groups), len(comparison.groups)
    each = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else _plural(seeds[0], "seed")
    order = "best" if comparison.best else "lowest"
    return [
        line,
        f"{comparison.metric} after {comparison.equal_tokens:,} tokens, {_plural(jobs, 'job')} in "
        f"{_plural(groups, 'group')} of {each}, the {order} first",
    ]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _table(comparison: Comparison) -> list[str]:
    groups = comparison.groups[:_MOST_GROUPS]
    if not groups:
        return []
    mark = _column("", [_mark(group) for group in groups], left=True)
    result = _column(comparison.metric, [_result(group) for group in groups], left=True)
    seeds = _column("seeds", [str(group.seeds) for group in groups])
    columns = [mark, *_key_columns(groups), seeds, result]
    for name in _telling(comparison):
        column = _column(name, [_cell(name, group.means[name]) for group in groups])
        if _width([*columns, column]) <= _WIDTH:
            columns.append(column)
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    hidden = len(comparison.groups) - len(groups)
    return [*lines, *([f"and {_plural(hidden, 'more group')}: report.csv"] if hidden else [])]


def _key_columns(groups: list[Group]) -> list[list[str]]:
    """The swept keys by their dotted names; by their last parts where those are too wide."""
    keys = list(groups[0].keys)
    cells = {key: [_cut(text) for text in _words([group.keys[key] for group in groups])] for key in keys}
    columns = [_column(key, cells[key]) for key in keys]
    short = [key.rpartition(".")[2] for key in keys]
    if _width(columns) <= _WIDEST_KEYS or len(set(short)) < len(keys):
        return columns
    return [_column(name, cells[key]) for key, name in zip(keys, short, strict=True)]


def _cut(value: str) -> str:
    """A long value by its end: paths differ there."""
    return value if len(value) <= _LONGEST_VALUE else f"...{value[3 - _LONGEST_VALUE :]}"


def _telling(comparison: Comparison) -> list[str]:
    """The columns that differ between groups, without the one that is compared."""
    names = [name for name in _DETAILS if name in comparison.columns and name != comparison.metric]
    return [name for name in names if len({_cell(name, g.means[name]) for g in comparison.groups}) > 1]


def _column(name: str, cells: Sequence[str], *, left: bool = False) -> list[str]:
    width = max(map(len, [name, *cells]))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in [name, *cells]]


def _width(columns: list[list[str]]) -> int:
    return sum(len(column[0]) + 2 for column in columns) - 2


def _mark(group: Group) -> str:
    return "*" if group.is_best else "~" if group.is_tied else " "


def _result(group: Group) -> str:
    return f"{group.mean:.4f}" + ("" if group.half_width is None else f" +- {group.half_width:.4f}")


def _cell(name: str, value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else _DETAILS[name](value)


def _marks(comparison: Comparison) -> list[str]:
    """What the marks and the intervals mean."""
    groups, lines = comparison.groups, []
    noise = pooled([[entry.values[comparison.metric] or 0.0 for entry in g.entries] for g in groups])
    if groups and noise is None:
        lines.append(
            "one seed each: how much a seed changes is not known, so a difference may be noise (seed=0,1,2)"
        )
    if noise is not None:
        lines.append(
            "+- 95 % interval of the mean over a group's seeds (Student's t); one seed's standard deviation "
            f"is {noise.deviation:.4f}"
        )
    if any(group.is_tied for group in groups):
        lines.append(
            "~ no further from the best (*) than the noise of the seeds: t-test at 95 %, its standard "
            "deviation pooled"
        )
        lines.append("  over all groups, as a group's own few seeds say too little of it")
    return lines


def _others(comparison: Comparison) -> list[str]:
    """The jobs that are not in the table, those of one reason together."""
    compared = {entry.path for group in comparison.groups for entry in group.entries}
    others = [entry for entry in comparison.entries if entry.path not in compared]
    alike: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in others[:_MOST_OTHERS]:
        alike[entry.state, entry.reason or _progress(entry)].append(entry)
    lines = []
    for (state, reason), entries in alike.items():
        names = [str(shown(entry.path)) for entry in entries]
        if len(names) == 1:
            lines.append(f"{state:8} {names[0]}: {reason}")
        else:
            lines += [f"{state:8} {len(names)} jobs: {reason}", *(f"{'':8}   {name}" for name in names)]
    if any(entry.state in (FAILED, DIED) for entry in others):
        lines.append(
            "The sweep's command tries again what failed. One whose words were a mistake stays until its "
            "directory is removed"
        )
    hidden = len(others) - _MOST_OTHERS
    return [*lines, *([f"and {_plural(hidden, 'more job')}: report.csv"] if hidden > 0 else [])]


def _progress(entry: Entry) -> str:
    return f"{entry.values['tokens'] or 0:,.0f} tokens so far"


def _notes(comparison: Comparison) -> list[str]:
    return [f"note: {note}" for note in comparison.notes]


def _best(comparison: Comparison) -> list[str]:
    best = comparison.best
    if best is None or not best.command:
        return []
    of = "" if comparison.groups[0].seeds == 1 else " of the best group"
    result = f"{comparison.metric} {best.values[comparison.metric]:.4f}"
    return [
        f"the best job{of}, {result}:",
        f"  {best.command}",
        "to go on with it:",
        f"  {onward_command(best)}",
    ]
