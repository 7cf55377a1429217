"""Pairs of padded rows, one preferred to the other, in a seeded order of the pairs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from harness.loaders.batch import IGNORE, Origin, check_sizes
from harness.loaders.hinting import HintingLoader
from harness.loaders.padded_rows import Array, check_width, inputs_and_targets
from harness.loaders.permutation import Ids
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

    def _read_samples(self, ids: Ids) -> tuple[Any, Any]:
        return pairs(self._data, ids, self.seq_len)

    def _origins(self, ids: list[int]) -> list[Origin]:
        sides = (("pos", self._data.pos), ("neg", self._data.neg))
        return [Origin(name, row, None, [side.locate(row)]) for name, side in sides for row in ids]

    def _will_need(self, ids: Ids) -> None:
        for side in (self._data.pos, self._data.neg):
            side.prefetch(ids, min(self.seq_len + 1, side.row_width))

    def _extra_state(self) -> dict[str, Any]:
        return {"row_width": self._data.row_width}


def pairs(store: PairStore, ids: Ids, seq_len: int) -> tuple[Array, Array]:
    """Inputs and targets of the pairs `ids` `(n,)`, int64 `(2n, seq_len)`: `pos` rows, then `neg` rows."""
    inputs = np.full((2 * len(ids), seq_len), store.manifest.tokenizer.boundary_token_id or 0, np.int64)
    targets = np.full((2 * len(ids), seq_len), IGNORE, np.int64)
    for side, rows in ((store.pos, slice(len(ids))), (store.neg, slice(len(ids), None))):
        columns = min(seq_len, side.row_width - 1)
        inputs[rows, :columns], targets[rows, :columns] = inputs_and_targets(side, ids, columns)
    return inputs, targets
