"""What runs say together: one entry a job, one group for the jobs that differ in their seed alone.

Plain data, which the table on the terminal, report.csv and report.html are made from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A loss in nats a token, after so many tokens and seconds of training."""

    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Entry:
    """One job.

    `state`: done, running, stopped, failed, died or waiting; `reason`: why, in a line, else "".
    `keys`: the value of each swept key by its dotted name. `values`: the figures of the columns by name, None
    where there is none. `train` and `validation` are curves of few points. `command`: trains it again.
    """

    path: Path
    state: str
    reason: str
    keys: dict[str, Any]
    values: dict[str, float | None]
    train: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    command: str = ""


@dataclass(frozen=True)
class Group:
    """The done jobs of equal keys but for the seed: `mean` of `metric`, `half_width` of its 95 % interval.

    `half_width` is None with one seed. `is_best`: the best mean; `is_tied`: not the best, but nearer to it
    than the noise of the seeds. `means`: of every column.
    """

    keys: dict[str, Any]
    entries: list[Entry]
    mean: float
    half_width: float | None
    means: dict[str, float | None]
    is_best: bool = False
    is_tied: bool = False

    @property
    def seeds(self) -> int:
        return len(self.entries)


@dataclass(frozen=True)
class Comparison:
    """All of it. `swept`: the keys that tell jobs apart, the seed last; `columns`: the names in `values`.

    `metric` is compared after `equal_tokens` tokens (None: no job has an evaluation). `notes`: lines that a
    reader has to know, such as jobs that were trained on other data.
    """

    name: str
    swept: list[str]
    columns: list[str]
    metric: str
    equal_tokens: int | None
    entries: list[Entry]
    groups: list[Group]
    notes: list[str] = field(default_factory=list)
    best: Entry | None = None
