"""Loss on a fixed part of a validation split, and what it means in bits per byte.

Nothing here draws a random number or moves a training stream: dropout is off, tokens are read by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.model import IGNORE

if TYPE_CHECKING:
    from harness.model import GPT
    from harness.storage.tokens import TokenStore


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats a target token; `bits_per_byte` None where the manifest does not count bytes."""

    loss: float
    tokens: int
    bits_per_byte: float | None


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
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Evaluation:
    """Mean loss over the first `tokens` targets of a split (None: all of them), in rows of `seq_len`.

    The same targets count whatever `batch_size` and `seq_len` are; the last row is padded on the right.
    `loss` is the model's own or its compiled form. The model is left in the mode it was in.
    """
    count = min(tokens or store.total_tokens, store.total_tokens - 1)
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    try:
        for start in range(0, count, batch_size * seq_len):
            inputs, targets = _rows(
                store, start, min(batch_size * seq_len, count - start), batch_size, seq_len
            )
            with autocast():
                total += (loss or model.loss)(inputs.to(device), targets.to(device)).double()
    finally:
        model.train(training)
    mean = total.item() / count
    return Evaluation(mean, count, bits_per_byte(mean, store))


def _rows(store: TokenStore, start: int, count: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """`count` inputs and targets from `start` on as `(batch_size, seq_len)`; the rest is ignored."""
    inputs = torch.zeros(batch_size * seq_len, dtype=torch.int64)
    targets = torch.full((batch_size * seq_len,), IGNORE, dtype=torch.int64)
    inputs[:count], targets[:count] = store.get_sequence(start, count)
    return inputs.view(batch_size, seq_len), targets.view(batch_size, seq_len)
