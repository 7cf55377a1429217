"""The figures of a run that stand in a report's columns, at a count of tokens that the others reached too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.sweep.curves import Evaluated, number
from harness.sweep.records import Record

# In the order of a table: what a run reached, what it saw, what it cost.
COLUMNS = (
    "val_loss", "best_val_loss", "val_bits_per_byte", "best_val_bits_per_byte",
    "tokens", "unique_tokens", "mean_coverage", "epochs",
    "tokens_per_s", "data_wait_share", "peak_memory_mb", "wall_s",
)  # fmt: skip
_OF_SUMMARY = COLUMNS[COLUMNS.index("tokens") :]


def equal_tokens(records: Sequence[Record]) -> int | None:
    """The largest count of tokens that all these runs reached and were evaluated at; None of no runs."""
    return min((record.metrics.evaluations[-1].tokens for record in records), default=None)


def evaluation_at(record: Record, tokens: int | None) -> Evaluated | None:
    """The run's last evaluation after at most `tokens` tokens (None: at all), rounded up to a whole step.

    Budgets in tokens are rounded up so, and a run of larger steps is not to lose its last one for it.
    """
    reached = evaluations_up_to(record, tokens)
    return reached[-1] if reached else None


def evaluations_up_to(record: Record, tokens: int | None) -> list[Evaluated]:
    limit = math.inf if tokens is None else tokens + record.tokens_per_step - 1
    return [one for one in record.metrics.evaluations if one.tokens <= limit]


def figures(record: Record, tokens: int | None) -> dict[str, float | None]:
    """A value for each of COLUMNS: losses after `tokens` tokens, all else at the run's end."""
    reached = evaluations_up_to(record, tokens)
    bits = [one.bits_per_byte for one in reached]
    return {
        "val_loss": reached[-1].loss if reached else None,
        "best_val_loss": _least(one.loss for one in reached),
        "val_bits_per_byte": bits[-1] if bits else None,
        "best_val_bits_per_byte": _least(bit for bit in bits if bit is not None),
        **_totals(record),
    }


def _totals(record: Record) -> dict[str, float | None]:
    """What the run's summary says; where it has none, or one of an earlier end, what its metrics give."""
    metrics = record.metrics
    totals: dict[str, float | None] = dict.fromkeys(_OF_SUMMARY)
    if metrics.seconds > 0:
        totals |= {
            "tokens_per_s": metrics.tokens / metrics.seconds,
            "data_wait_share": metrics.waited_s / metrics.seconds,
        }
    if metrics.tokens:
        totals["tokens"] = metrics.tokens
    if record.summary.get("step") == record.status.get("step"):
        said = {key: number(record.summary.get(key)) for key in _OF_SUMMARY}
        totals |= {key: value for key, value in said.items() if value is not None}
    return totals


def _least(values: Iterable[float]) -> float | None:
    return min((value for value in values if math.isfinite(value)), default=None)
