"""Pairs of padded rows, one preferred to the other, in a seeded order of the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from harness.loaders.batch import IGNORE, Origin, check_sizes
from harness.loaders.hinting import HintingLoader, Pair
from harness.loaders.padded_rows import Array, as_targets, check_width, inputs_and_targets
from harness.loaders.permutation import Ids
from harness.storage.reading import Reading, together
from harness.storage.rows import PairStore


class ContrastivePaddedDataset(HintingLoader):
    """Pairs of the set, each once an epoch. `batch_size` counts pairs, so a batch has twice as many rows.

    `inputs` and `targets` are int64 `(2 * batch_size, seq_len)`: the `pos` rows, then the `neg` rows of the
    same pairs in the same order, each as in `PaddedDataset`. Where one side has fewer columns than
    `seq_len + 1`, its rows are padded on the right with the boundary token (0 where there is none) and
    targets of -100. Raises `UserError` where both have fewer; else as `SampledLoader`, ranks sharing pairs.
    """

    strategy = "contrastive_rows"
    sample_words = "pairs"

    def __init__(self, store: PairStore, batch_size: int, seq_len: int, **options: Any) -> None:
        check_sizes(batch_size, seq_len)
        check_width(store.manifest, self.strategy, store.row_width, seq_len)
        self._data = store
        super().__init__(store, store.total_rows, batch_size, seq_len, **options)

    @property
    def sample_tokens(self) -> int:
        """Of both rows of a pair: what a quick read may take is judged by them."""
        return 2 * self.seq_len

    @property
    def dropped_tokens(self) -> int:
        """As of `PaddedDataset`, of both rows of each pair."""
        return 2 * super().dropped_tokens

    @cached_property
    def lost_tokens(self) -> int:
        """As of `PaddedDataset`, of both sides."""
        return sum(side.count_tokens(self.seq_len + 1) for side in (self._data.pos, self._data.neg))

    @property
    def skipped_tokens(self) -> int:
        """As `lost_tokens`: no epoch reads them."""
        return self.lost_tokens

    def _read_samples(self, ids: Ids) -> Pair:
        return pairs(self._data, ids, self.seq_len)

    def _origins(self, ids: list[int]) -> list[Origin]:
        sides = (("pos", self._data.pos), ("neg", self._data.neg))
        return [Origin(name, row, None, [side.locate(row)]) for name, side in sides for row in ids]

    def _begin(self, ids: Ids, readers: bool) -> Reading[Pair]:
        sides = (self._data.pos, self._data.neg)
        begun = [
            side.begin_rows(ids, min(self.seq_len + 1, side.row_width), readers=readers) for side in sides
        ]
        return together(begun).then(
            lambda found: side_by_side(self._data, [as_targets(*side) for side in found], self.seq_len)
        )

    def _extra_state(self) -> dict[str, Any]:
        return {"row_width": self._data.row_width}


def pairs(store: PairStore, ids: Ids, seq_len: int) -> tuple[Array, Array]:
    """Inputs and targets of the pairs `ids` `(n,)`, int64 `(2n, seq_len)`: `pos` rows, then `neg` rows."""
    sides = (store.pos, store.neg)
    return side_by_side(
        store, [inputs_and_targets(side, ids, min(seq_len, side.row_width - 1)) for side in sides], seq_len
    )


def side_by_side(store: PairStore, sides: Sequence[tuple[Array, Array]], seq_len: int) -> tuple[Array, Array]:
    """The same of the inputs and targets of each side, `(n, seq_len)` or narrower, which were read."""
    count = len(sides[0][0])
    shape = (2 * count, seq_len)
    inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
    padding = store.manifest.tokenizer.boundary_token_id or 0
    for (ours, theirs), rows in zip(sides, (slice(count), slice(count, None)), strict=True):
        columns = ours.shape[1]
        inputs[rows, :columns], targets[rows, :columns] = ours, theirs
        inputs[rows, columns:], targets[rows, columns:] = padding, IGNORE
    return inputs, targets
