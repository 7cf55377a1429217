"""Padded rows, one document or part of one each, in a seeded order; padding is no target."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.loaders.batch import IGNORE, Origin, check_sizes
from harness.loaders.hinting import HintingLoader, Pair
from harness.loaders.permutation import Ids
from harness.storage.manifest import Manifest
from harness.storage.opening import prepare_words
from harness.storage.reading import Reading
from harness.storage.rows import RowStore

Array = np.ndarray[Any, Any]


class PaddedDataset(HintingLoader):
    """Rows of the set, each once an epoch: `inputs` are the first `seq_len` columns, `targets` the next.

    A target outside of the mask is -100; inputs stay the ids that are stored, so a row that is nothing but
    padding is in a batch and counts for nothing. Of wider rows the first `seq_len + 1` columns are read.
    Raises `UserError` where rows are narrower than that; else as `SampledLoader`, whose `dropped_tokens`
    counts the places of targets, padding included.
    """

    strategy = "padded_rows"

    def __init__(self, store: RowStore, batch_size: int, seq_len: int, **options: Any) -> None:
        check_sizes(batch_size, seq_len)
        check_width(store.manifest, self.strategy, store.row_width, seq_len)
        self._data = store
        super().__init__(store, store.total_rows, batch_size, seq_len, **options)

    @cached_property
    def lost_tokens(self) -> int:
        """Targets beyond the first `seq_len + 1` columns of wider rows. Counting them reads all masks."""
        return self._data.count_tokens(self.seq_len + 1)

    @property
    def skipped_tokens(self) -> int:
        """As `lost_tokens`: no epoch reads them."""
        return self.lost_tokens

    def _read_samples(self, ids: Ids) -> Pair:
        return inputs_and_targets(self._data, ids, self.seq_len)

    def _origins(self, ids: list[int]) -> list[Origin]:
        return [Origin("row", row, None, [self._data.locate(row)]) for row in ids]

    def _begin(self, ids: Ids, readers: bool) -> Reading[Pair]:
        reading = self._data.begin_rows(ids, self.seq_len + 1, readers=readers)
        return reading.then(lambda found: as_targets(*found))

    def _extra_state(self) -> dict[str, Any]:
        return {"row_width": self._data.row_width}


def inputs_and_targets(store: RowStore, ids: Ids, seq_len: int) -> tuple[Array, Array]:
    """Inputs and targets of the rows `ids`, int64 `(n, seq_len)`; targets outside of the mask are -100."""
    return as_targets(*store.get_rows(ids, seq_len + 1))


def as_targets(rows: Array, mask: Array) -> tuple[Array, Array]:
    """The same of rows `(n, seq_len + 1)` and their mask, which were read."""
    targets = rows[:, 1:].copy()
    np.copyto(targets, IGNORE, where=~mask[:, 1:])  # two thirds of the time of copying where it is true
    return rows[:, :-1], targets


def check_width(manifest: Manifest, loader: str, row_width: int, seq_len: int) -> None:
    """Raise `UserError` where rows of `row_width` columns have no room for `seq_len` inputs and targets."""
    if row_width > seq_len:
        return
    raise UserError(
        f"loader.seq_len={seq_len} needs rows of {seq_len + 1} columns, one more for the last target, but "
        f"{manifest.path} has rows of {row_width}. Use loader.seq_len<={row_width - 1}, or prepare a set of "
        f"wider rows in a folder of its own: {prepare_words(manifest, loader)} loader.seq_len={seq_len}"
    )
