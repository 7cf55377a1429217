"""Loss on a fixed part of a validation split, and what it means in bits per byte.

Nothing here draws a random number or moves a training stream: dropout is off, tokens are read by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.model import IGNORE
from harness.objectives import LanguageModelling, Objective, target_counts

if TYPE_CHECKING:
    from harness.model import GPT
    from harness.storage.tokens import TokenStore


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats a target token; `bits_per_byte` None where the manifest does not count bytes.

    `metrics`: what the objective gives beside the loss.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    metrics: dict[str, float] = field(default_factory=dict)


def bits_per_byte(loss: float, store: TokenStore) -> float | None:
    """Nats a token -> bits a byte of text: `loss / ln 2 * tokens / bytes` of the whole split."""
    split = store.manifest.splits[store.split]
    if not split.bytes:
        return None
    return loss / math.log(2) * split.total_tokens / split.bytes


@torch.no_grad()
def evaluate(
    model: GPT,
    store: TokenStore,
    *,
    tokens: int | None,
    batch_size: int,
    seq_len: int,
    autocast: Callable[[], AbstractContextManager[object]],
    objective: Objective | None = None,
) -> Evaluation:
    """Mean loss over the first `tokens` targets of a split (None: all of them), in rows of `seq_len`.

    The same targets count whatever `batch_size` and `seq_len` are; the last row is padded on the right.
    `objective` None is the mean of the model's own loss. The model is left in the mode it was in.
    """
    objective = objective or LanguageModelling(model.loss)
    device = next(model.parameters()).device
    totals: dict[str, Tensor] = {}
    weight = count = 0
    training = model.training
    model.eval()
    try:
        for inputs, targets in _stream_batches(store, tokens, batch_size, seq_len):
            counts = target_counts(targets)
            count += int(counts.sum())
            weight += objective.weight(counts)
            with autocast():
                sums = objective.sums(inputs.to(device), targets.to(device))
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value.double()
    finally:
        model.train(training)
    means = {name: total.item() / weight for name, total in totals.items()}
    loss = means.pop("loss")
    return Evaluation(loss, count, bits_per_byte(loss, store), means)


def _stream_batches(
    store: TokenStore, tokens: int | None, batch_size: int, seq_len: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `tokens` targets of a stream in file order."""
    count = min(tokens or store.total_tokens, store.total_tokens - 1)
    size = batch_size * seq_len
    for start in range(0, count, size):
        yield _rows(store, start, min(size, count - start), batch_size, seq_len)


def _rows(store: TokenStore, start: int, count: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """`count` inputs and targets from `start` on as `(batch_size, seq_len)`; the rest is ignored."""
    inputs = torch.zeros(batch_size * seq_len, dtype=torch.int64)
    targets = torch.full((batch_size * seq_len,), IGNORE, dtype=torch.int64)
    inputs[:count], targets[:count] = store.get_sequence(start, count)
    return inputs.view(batch_size, seq_len), targets.view(batch_size, seq_len)
