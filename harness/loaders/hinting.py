"""Loaders of numbered samples that tell slow storage ahead what they read next."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from harness.loaders.lookahead import SlowStorage
from harness.loaders.permutation import Ids
from harness.loaders.sampled import PreparedSplit, SampledLoader

# Measured on a cold local disk: 1 batch ahead halves the wait, 8 quarter it; slower storage needs more.
_HINTED_BATCHES = 8


class HintingLoader(SampledLoader):
    """A `SampledLoader` that asks for the samples of the next batches once reads were seen to wait.

    A subclass reads in `_read_samples` and asks in `_will_need`.
    """

    def __init__(
        self, store: PreparedSplit, samples: int, batch_size: int, seq_len: int, **options: Any
    ) -> None:
        self._storage = SlowStorage()
        self._hinted = 0  # place in the order up to which samples were asked for
        super().__init__(store, samples, batch_size, seq_len, **options)

    @abstractmethod
    def _read_samples(self, ids: Ids) -> tuple[Any, Any]:
        """As `SampledLoader._read`."""

    @abstractmethod
    def _will_need(self, ids: Ids) -> None:
        """Ask the storage for the samples `ids` ahead; changes no result."""

    def _read(self, ids: Ids) -> tuple[Any, Any]:
        started = time.perf_counter()
        pair = self._read_samples(ids)
        if self._storage.wants_hints(time.perf_counter() - started, ids.size * self.seq_len):
            self._hint()
        return pair

    def _hint(self) -> None:
        """Ask for the samples of the next batches that were not asked for yet."""
        end = self._position + _HINTED_BATCHES * self.batch_size
        if not self._position < self._hinted <= end:
            self._hinted = self._position + self.batch_size
        while self._hinted <= min(end, self.samples - self.batch_size):
            self._will_need(self._ids(self._hinted, ahead=True))
            self._hinted += self.batch_size
