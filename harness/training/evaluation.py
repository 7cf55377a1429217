"""Loss on a fixed part of a validation split, and what it means in bits per byte.

Nothing here draws a random number or moves a training stream: dropout is off, samples are read by position.
`loader.mask_boundary` does not count here, so that runs with another one are compared on the same targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from harness.distributed.ranks import ALONE, Ranks
from harness.errors import UserError
from harness.hardware.device_feed import DeviceFeed
from harness.loaders.contrastive_rows import pairs
from harness.loaders.padded_rows import inputs_and_targets
from harness.model import IGNORE
from harness.storage import PairStore, RowStore, Store, TokenStore
from harness.training.objectives import LanguageModelling, Objective, target_counts

if TYPE_CHECKING:
    from harness.model import GPT

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats a target token; of pairs it is the DPO loss, and `metrics` hold what comes with it.

    `tokens`: the targets that were counted. `bits_per_byte` is None where the manifest does not count bytes,
    and of pairs.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    metrics: dict[str, float] = field(default_factory=dict)

    def scores(self) -> dict[str, float | None]:
        """All results by name."""
        if self.metrics:
            return {"loss": self.loss, **self.metrics}
        return {"loss": self.loss, "bits_per_byte": self.bits_per_byte}


def bits_per_byte(loss: float, store: Store) -> float | None:
    """Nats a token -> bits a byte of text: `loss / ln 2 * tokens / bytes` of the whole split.

    Padded rows count as a stream does: each token of a document is a target once, and `tokens` counts those.
    """
    if isinstance(store, PairStore):
        return None
    split = store.manifest.splits[store.split]
    if not split.bytes:
        return None
    return loss / math.log(2) * split.total_tokens / split.bytes


@torch.no_grad()
def evaluate(
    model: GPT,
    store: Store,
    *,
    tokens: int | None,
    batch_size: int,
    seq_len: int,
    autocast: Callable[[], AbstractContextManager[object]],
    objective: Objective | None = None,
    between: Callable[[], object] = lambda: None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Mean loss over the samples that `batches` gives.

    `objective` None is the mean of the model's own loss; pairs need a `Preference`. `between` is called
    before each batch; what it raises abandons the evaluation. The model is left in the mode it was in.
    Several `ranks` take `batch_size` samples each, make equally many passes, and get the same result.
    """
    objective = objective or LanguageModelling(model.loss)
    feed = DeviceFeed(next(model.parameters()).device)
    totals: dict[str, Tensor] = {}
    weight = count = 0
    training = model.training
    model.eval()
    try:
        for inputs, targets in batches(store, tokens, batch_size * ranks.size, seq_len):
            between()
            counts = target_counts(targets)
            count += int(counts.sum())
            weight += objective.weight(counts)
            inputs, targets, counted = _share(objective, inputs, targets, batch_size, ranks)
            inputs, targets = feed.put(inputs, targets)
            with autocast():
                sums = objective.sums(inputs, targets)
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value.double() * counted
    finally:
        model.train(training)
    if not weight:
        raise UserError(
            f"{store.split} of {store.manifest.path} has no target to evaluate on: prepare more text, or "
            "name another set"
        )
    own = {name: total.item() for name, total in totals.items()}
    parts = ranks.gather(own)
    means = {name: sum(part[name] for part in parts) / weight for name in own}
    loss = means.pop("loss")
    return Evaluation(loss, count, bits_per_byte(loss, store), means)


def _share(
    objective: Objective, inputs: Tensor, targets: Tensor, size: int, ranks: Ranks
) -> tuple[Tensor, Tensor, bool]:
    """A rank's `size` samples of a batch, and whether they count: others stand in where none are left."""
    if not ranks.several:
        return inputs, targets, True
    parts = list(objective.split(inputs, targets, size))
    counted = ranks.rank < len(parts)
    return (*parts[ranks.rank if counted else 0], counted)


def batches(store: Store, tokens: int | None, batch_size: int, seq_len: int) -> Batches:
    """The first `tokens` targets of a split in file order (None: all of them), in batches of `batch_size`.

    Of a stream and of rows exactly so many targets, whatever `batch_size`; of a stream also whatever
    `seq_len`. The last batch is padded on the right. Of pairs whole ones, until both rows' targets are so
    many, and at least one pair: int64 `(2n, seq_len)`, n at most `batch_size`.
    """
    if isinstance(store, TokenStore):
        return _stream_batches(store, tokens, batch_size, seq_len)
    if isinstance(store, RowStore):
        return _row_batches(store, tokens, batch_size, seq_len)
    return _pair_batches(store, tokens, batch_size, seq_len)


def _stream_batches(store: TokenStore, tokens: int | None, batch_size: int, seq_len: int) -> Batches:
    count = min(tokens or store.total_tokens, store.total_tokens - 1)
    size = batch_size * seq_len
    for start in range(0, count, size):
        part = min(size, count - start)
        inputs, targets = _nothing(batch_size, seq_len)
        inputs.view(-1)[:part], targets.view(-1)[:part] = store.get_sequence(start, part)
        yield inputs, targets


def _row_batches(store: RowStore, tokens: int | None, batch_size: int, seq_len: int) -> Batches:
    columns, left = min(seq_len, store.row_width - 1), store.total_tokens if tokens is None else tokens
    for ids in _in_file_order(store.total_rows, batch_size):
        rows, row_targets = inputs_and_targets(store, ids, columns)
        counts = row_targets != IGNORE
        row_targets[counts & (counts.cumsum().reshape(counts.shape) > left)] = IGNORE
        inputs, targets = _nothing(batch_size, seq_len)
        inputs[: len(ids), :columns] = torch.from_numpy(rows)
        targets[: len(ids), :columns] = torch.from_numpy(row_targets)
        yield inputs, targets
        left -= int(counts.sum())
        if left <= 0:
            return


def _pair_batches(store: PairStore, tokens: int | None, batch_size: int, seq_len: int) -> Batches:
    left = store.total_tokens if tokens is None else tokens
    for ids in _in_file_order(store.total_rows, batch_size):
        inputs, targets = map(torch.from_numpy, pairs(store, ids, seq_len))
        counts = target_counts(targets).view(2, -1).sum(dim=0)
        wanted = counts.cumsum(0) - counts < left  # those before a pair do not reach it yet
        both = wanted.repeat(2)
        yield inputs[both], targets[both]
        left -= int(counts.sum())
        if left <= 0:
            return


def _in_file_order(samples: int, batch_size: int) -> Iterator[np.ndarray]:
    for start in range(0, samples, batch_size):
        yield np.arange(start, min(start + batch_size, samples))


def _nothing(batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """A batch without a target."""
    inputs = torch.zeros((batch_size, seq_len), dtype=torch.int64)
    return inputs, torch.full_like(inputs, IGNORE)
