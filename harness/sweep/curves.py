"""What a report keeps of metrics.jsonl, which is read once: the evaluations, and curves of few points."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.sweep.comparison import Point
from harness.tracking.jsonl import read_rows

_MOST_POINTS = 200  # a curve


class Evaluated(NamedTuple):
    """An evaluation after `tokens` tokens: `loss` in nats a token, not finite where the model diverged."""

    step: int
    tokens: int
    seconds: float
    loss: float
    bits_per_byte: float | None


@dataclass(frozen=True)
class Metrics:
    """`train`: at most 200 points, each the mean of the rows it stands for. `evaluations`: all, in order.

    `seconds`: of training, without evaluations and saves, of which `waited_s` were spent waiting for data.
    A branch's inherited steps count as if it had trained them at its first row's speed.
    """

    train: list[Point] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    @property
    def validation(self) -> list[Point]:
        """At most 200 of the evaluations, the last one among them."""
        finite = [e for e in self.evaluations if math.isfinite(e.loss)]
        every = -(-len(finite) // _MOST_POINTS) or 1
        return [Point(e.tokens, e.seconds, e.loss) for e in finite[::-1][::every][::-1]]


def read_metrics(path: Path) -> Metrics:
    """The metrics in the file `path`. Raises `UserError` where a line is no row or counts back, `OSError`."""
    train: list[Point] = []
    judged: list[dict[str, Any]] = []
    step, tokens, seconds, waited_s = 0, 0, 0.0, 0.0
    for row in read_rows(path):
        if type(row.get("tokens")) is not int or "step" not in row:
            continue
        if row["tokens"] < max(tokens, judged[-1]["tokens"] if judged else 0):
            raise UserError(
                f"{path}: step {row['step']} is after {row['tokens']:,} tokens, and a row before it after "
                "more: which results are at equal tokens cannot be told"
            )
        if "val_loss" in row:
            judged.append(row)
            continue
        speed = number(row.get("tokens_per_s"))
        spent = (row["tokens"] - tokens) / speed if speed else 0.0
        seconds += spent
        waited_s += _waited_s(row, row["step"] - step, spent)
        step, tokens = row["step"], row["tokens"]
        if (loss := number(row.get("loss"))) is not None:
            train.append(Point(tokens, seconds, loss))
    evaluations = [_evaluated(row, train) for row in judged]
    return Metrics(
        train=_thinned(train),
        evaluations=evaluations,
        tokens=max(tokens, evaluations[-1].tokens) if evaluations else tokens,
        seconds=seconds,
        waited_s=waited_s,
    )


def _evaluated(row: dict[str, Any], train: list[Point]) -> Evaluated:
    bits = number(row.get("val_bits_per_byte"))
    seconds = _seconds_at(train, row["tokens"])
    return Evaluated(row["step"], row["tokens"], seconds, float(row["val_loss"]), bits)


def _waited_s(row: dict[str, Any], steps: int, seconds: float) -> float:
    """What the steps of a row waited for their data, of the `seconds` they took."""
    share = number(row.get("data_wait_share"))
    if share is not None:
        return share * seconds
    # An older version's: its data_wait_ms is the mean.
    return steps * (number(row.get("data_wait_ms")) or 0.0) / 1e3


def number(value: Any) -> float | None:
    """A finite number as it is; None for anything else."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _seconds_at(points: list[Point], tokens: int) -> float:
    """The seconds after `tokens` tokens, between two points in proportion."""
    index = bisect.bisect_left(points, (tokens,))
    if index == len(points):
        return points[-1].seconds if points else 0.0
    after, before = points[index], points[index - 1] if index else Point(0, 0.0, 0.0)
    share = (tokens - before.tokens) / max(1, after.tokens - before.tokens)
    return before.seconds + share * (after.seconds - before.seconds)


def _thinned(points: list[Point]) -> list[Point]:
    """At most 200 points: each the mean loss of as many neighbours, at the place of the last of them."""
    every = -(-len(points) // _MOST_POINTS) or 1
    parts = [points[start : start + every] for start in range(0, len(points), every)]
    return [part[-1]._replace(loss=math.fsum(p.loss for p in part) / len(part)) for part in parts]
