"""Loaders of numbered samples that look ahead of slow storage."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from harness.loaders.lookahead import LookAhead
from harness.loaders.permutation import Ids
from harness.loaders.sampled import PreparedSplit, SampledLoader
from harness.storage.reading import Reading

Pair = tuple[Any, Any]


class HintingLoader(SampledLoader):
    """A `SampledLoader` that begins the next batches once reads were seen to wait: a `lookahead.Source`.

    A subclass reads in `_read_samples` and begins a read in `_begin`; both give the same.
    """

    def __init__(
        self, store: PreparedSplit, samples: int, batch_size: int, seq_len: int, **options: Any
    ) -> None:
        self._ahead: LookAhead[Pair] = LookAhead()
        super().__init__(store, samples, batch_size, seq_len, **options)

    @abstractmethod
    def _read_samples(self, ids: Ids) -> Pair:
        """As `SampledLoader._read`."""

    @abstractmethod
    def _begin(self, ids: Ids, readers: bool) -> Reading[Pair]:
        """The same read, begun now: the system is told of it, or `readers` read it."""

    @property
    def rows(self) -> int:
        """Samples of this rank's part of a batch."""
        return self._rows

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample's inputs: of one row."""
        return self.seq_len

    @property
    def batch_tokens(self) -> int:
        """Tokens of this rank's part of a batch."""
        return self._rows * self.sample_tokens

    def read_at(self, place: int) -> Pair:
        """As in `lookahead.Source`."""
        return self._read_samples(self._ids(place))

    def begin_at(self, place: int, *, readers: bool) -> Reading[Pair]:
        """As in `lookahead.Source`."""
        return self._begin(self._ids(place, ahead=place != self._position), readers)

    def probe_at(self, place: int, sample: int = 0) -> int:
        """As in `lookahead.Source`."""
        ids = self._ids(place, ahead=place != self._position)
        self._begin(ids[sample : sample + 1], readers=False).result()
        return self.sample_tokens

    def _read(self, ids: Ids) -> Pair:
        return self._ahead.read(self, self._position)

    def _go_to(self, epoch: int, position: int) -> None:
        super()._go_to(epoch, position)
        self._ahead.drop()
