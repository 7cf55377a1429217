"""A comparison as CSV: a line a job, with what its group has in common in the last columns."""

from __future__ import annotations

import csv
import io
from typing import Any

from harness.sweep.comparison import Comparison, Group
from harness.sweep.report_text import word

_OF_GROUP = ("seeds", "mean", "interval_95", "is_best", "is_tied")


def csv_text(comparison: Comparison) -> str:
    """The swept keys by their dotted names, state, figures in full precision, the group's, path and command.

    `mean` is of the compared metric over the group's seeds, `interval_95` half of its 95 % interval. What is
    not known is empty; a key that is null says so.
    """
    group_of = {entry.path: group for group in comparison.groups for entry in group.entries}
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        [*comparison.swept, "state", *comparison.columns, *_OF_GROUP, "reason", "path", "command"]
    )
    for entry in comparison.entries:
        writer.writerow(
            [
                *(word(entry.keys[key]) if key in entry.keys else "" for key in comparison.swept),
                entry.state,
                *(entry.values.get(name) for name in comparison.columns),
                *_group_cells(group_of.get(entry.path)),
                entry.reason,
                entry.path,
                entry.command,
            ]
        )
    return file.getvalue()


def _group_cells(group: Group | None) -> list[Any]:
    if group is None:
        return [None] * len(_OF_GROUP)
    return [group.seeds, group.mean, group.half_width, word(group.is_best), word(group.is_tied)]
