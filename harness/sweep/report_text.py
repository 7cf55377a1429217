"""A comparison as lines for a terminal: the groups, best first; what is not among them and why; the best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from harness.commands import shown
from harness.sweep.comparison import Comparison, Entry, Group
from harness.sweep.states import DIED, DONE, FAILED, RUNNING, STOPPED, WAITING

_WIDTH = 110
_MOST_GROUPS, _MOST_OTHERS = 40, 20  # lines; all of them are in report.csv
_STATES = (DONE, RUNNING, STOPPED, FAILED, DIED, WAITING)

# The order in which columns are taken into the width, of those that are not alike in all groups; and how a
# value is written.
_DETAILS: dict[str, Callable[[float], str]] = {
    "mean_coverage": "{:.3g}".format,
    "unique_tokens": "{:,.0f}".format,
    "val_bits_per_byte": "{:.4f}".format,
    "val_loss": "{:.4f}".format,
    "best_val_loss": "{:.4f}".format,
    "epochs": "{:.3g}".format,
    "tokens_per_s": "{:,.0f}".format,
    "wall_s": "{:,.1f}".format,
    "peak_memory_mb": "{:,.0f}".format,
    "data_wait_share": "{:.1%}".format,
    "best_val_bits_per_byte": "{:.4f}".format,
    "tokens": "{:,.0f}".format,
}


def text(comparison: Comparison) -> str:
    """The whole report; no line of the table is longer than a terminal of usual width."""
    parts = [_heading(comparison), _table(comparison), _marks(comparison)]
    parts += [_others(comparison), _notes(comparison), _best(comparison)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _heading(comparison: Comparison) -> list[str]:
    counts = Counter(entry.state for entry in comparison.entries)
    states = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
    line = f"{comparison.name}: {len(comparison.entries)} jobs, {states}"
    if not comparison.groups:
        return [line]
    seeds = sorted({group.seeds for group in comparison.groups})
    several = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    jobs = sum(group.seeds for group in comparison.groups)
    return [
        line,
        f"{comparison.metric} after {comparison.equal_tokens:,} tokens: {jobs} jobs in "
        f"{len(comparison.groups)} groups of {several} seed{'s' if several != '1' else ''}, the best first",
    ]


def _table(comparison: Comparison) -> list[str]:
    groups = comparison.groups[:_MOST_GROUPS]
    if not groups:
        return []
    columns = [_column("", [_mark(group) for group in groups], left=True)]
    columns += [_column(key, [word(group.keys[key]) for group in groups]) for key in _keys(comparison)]
    columns.append(_column("seeds", [str(group.seeds) for group in groups]))
    columns.append(_column(comparison.metric, [_result(group) for group in groups], left=True))
    for name in _telling(comparison):
        column = _column(name, [_cell(name, group.means[name]) for group in groups])
        if sum(len(cells[0]) + 2 for cells in [*columns, column]) <= _WIDTH:
            columns.append(column)
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    hidden = len(comparison.groups) - len(groups)
    return [*lines, *([f"and {hidden} more groups: report.csv"] if hidden else [])]


def _keys(comparison: Comparison) -> list[str]:
    return list(comparison.groups[0].keys)


def _telling(comparison: Comparison) -> list[str]:
    """The columns that differ between groups, the one that is compared apart."""
    names = [name for name in _DETAILS if name in comparison.columns and name != comparison.metric]
    return [name for name in names if len({_cell(name, g.means[name]) for g in comparison.groups}) > 1]


def _column(name: str, cells: Sequence[str], *, left: bool = False) -> list[str]:
    width = max(map(len, [name, *cells]))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in [name, *cells]]


def _mark(group: Group) -> str:
    return "*" if group.is_best else "~" if group.is_tied else " "


def _result(group: Group) -> str:
    return f"{group.mean:.4f}" + ("" if group.half_width is None else f" ± {group.half_width:.4f}")


def _cell(name: str, value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else _DETAILS[name](value)


def word(value: Any) -> str:
    """A swept value as on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _marks(comparison: Comparison) -> list[str]:
    """What the table's marks and intervals mean."""
    groups = comparison.groups
    if not groups:
        return []
    lines = ["* the best"] if groups[0].is_best and len(groups) > 1 else []
    if all(group.seeds == 1 for group in groups):
        return [
            *lines,
            "one seed each: how much a seed changes is unknown, so differences may be noise (seed=0,1,2)",
        ]
    lines.append("± 95 % interval of the mean over a group's seeds, by Student's t")
    if any(group.is_tied for group in groups):
        lines.append(
            "~ not told apart from the best by its seeds: two-sided t-test at 95 %, standard deviation "
            "pooled over groups"
        )
    return lines


def _others(comparison: Comparison) -> list[str]:
    """The jobs that are not in the table."""
    compared = {entry.path for group in comparison.groups for entry in group.entries}
    others = [entry for entry in comparison.entries if entry.path not in compared]
    lines = [_other(entry) for entry in others[:_MOST_OTHERS]]
    hidden = len(others) - len(lines)
    return [*lines, *([f"and {hidden} more: report.csv"] if hidden else [])]


def _other(entry: Entry) -> str:
    reason = entry.reason or f"{entry.values['tokens'] or 0:,.0f} tokens so far"
    return f"{entry.state:8} {shown(entry.path)}: {reason}"


def _notes(comparison: Comparison) -> list[str]:
    return [f"note: {note}" for note in comparison.notes]


def _best(comparison: Comparison) -> list[str]:
    best = comparison.best
    if best is None or not best.command:
        return []
    return [f"the best job, {comparison.metric} {best.values[comparison.metric]:.4f}:", f"  {best.command}"]
