"""What reads the rows of a split in one process: a `RowReader` over all shards, or h5py shard by shard."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from harness.storage.chunk_cache import ChunkedRows
from harness.storage.reading import Reading, begin_jobs
from harness.storage.row_bytes import plan_reads
from harness.storage.row_files import RowShard
from harness.storage.row_reader import RowReader
from harness.storage.row_table import RowTable

Array = np.ndarray[Any, Any]


class RowsReader(Protocol):
    """Rows by number, at least one, over all shards. Several threads may use it at once."""

    def read(self, ids: Array, width: int) -> tuple[Array, Array]:
        """The first `width` columns of rows and mask, owned `(n, width)`; the mask as stored bytes."""

    def mask(self, ids: Array, first_column: int) -> Array:
        """The mask of the rows `ids` from a column on, as stored bytes."""

    def begin(self, ids: Array, width: int, *, readers: bool) -> Reading[tuple[Array, Array]]:
        """As `read`, begun now: the system is told of the rows, or `readers` read them."""


class PlainRows:
    """Rows that lie in their files as they are, through a `RowReader`: two tables over all shards."""

    def __init__(self, shards: Sequence[RowShard], row_width: int, dtype: np.dtype[Any], mmap: bool) -> None:
        self._reader = RowReader(parallel=None if mmap else True)
        self._rows = RowTable([shard.rows for shard in shards], dtype, row_width, mmap=mmap)
        self._mask = RowTable([shard.mask for shard in shards], np.dtype(np.uint8), row_width, mmap=mmap)
        self._row_width = row_width
        self._lock = threading.Lock()  # a RowReader is for one thread at a time

    def read(self, ids: Array, width: int) -> tuple[Array, Array]:
        """As in `RowsReader`."""
        with self._lock:
            rows, mask = self._reader.read((self._rows.columns(0, width), self._mask.columns(0, width)), ids)
        return rows, mask

    def mask(self, ids: Array, first_column: int) -> Array:
        """As in `RowsReader`."""
        with self._lock:
            return self._reader.read((self._mask.columns(first_column, self._row_width),), ids)[0]

    def begin(self, ids: Array, width: int, *, readers: bool) -> Reading[tuple[Array, Array]]:
        """As in `RowsReader`; always at positions, so that an error of the storage is an error."""
        sources = (self._rows.columns(0, width), self._mask.columns(0, width))
        jobs, finish = plan_reads(sources, ids, self._reader.descriptors())

        def rows_and_mask() -> tuple[Array, Array]:
            rows, mask = finish()
            return rows.view(self._rows.dtype), mask

        if readers:
            return begin_jobs(jobs, rows_and_mask)

        def read() -> tuple[Array, Array]:
            for job in jobs:
                job()
            return rows_and_mask()

        return Reading(read)


class DecodedRows:
    """Rows that only h5py can read, shard by shard; decoded chunks are kept within bounds."""

    def __init__(self, shards: Sequence[RowShard], row_width: int, dtype: np.dtype[Any]) -> None:
        self._files = ChunkedRows([(shard.rows.path, shard.rows.file) for shard in shards])
        self._row_width = row_width
        self._dtype = dtype
        self._ends = _ends(shards, row_width)

    def read(self, ids: Array, width: int) -> tuple[Array, Array]:
        """As in `RowsReader`."""
        rows, mask = np.empty((len(ids), width), self._dtype), np.empty((len(ids), width), np.bool_)
        for shard, places, local in by_shard(ids, self._ends):
            part, part_mask = self._files.read(shard, local)
            rows[places], mask[places] = part[:, :width], part_mask[:, :width]
        return rows, mask.view(np.uint8)

    def mask(self, ids: Array, first_column: int) -> Array:
        """As in `RowsReader`."""
        mask = np.empty((len(ids), self._row_width - first_column), np.bool_)
        for shard, places, local in by_shard(ids, self._ends):
            mask[places] = self._files.read_mask(shard, local)[:, first_column:]
        return mask.view(np.uint8)

    def begin(self, ids: Array, width: int, *, readers: bool) -> Reading[tuple[Array, Array]]:
        """As in `RowsReader`; of whole chunks, and always by hints: h5py reads for one thread at a time."""
        for shard, _, local in by_shard(ids, self._ends):
            self._files.will_need(shard, local)
        return Reading(partial(self.read, ids, width))


def by_shard(ids: Array, ends: Array) -> Iterator[tuple[int, Array, Array]]:
    """Shard by shard: which places of `ids` are rows of it, and their numbers inside of it.

    `ends` are the prefix sums of the shards' rows.
    """
    shards = ends.searchsorted(ids, "right")
    order = np.argsort(shards, kind="stable")
    cuts = np.flatnonzero(np.diff(shards[order])) + 1
    for places in np.split(order, cuts):
        shard = int(shards[places[0]])
        yield shard, places, ids[places] - (ends[shard - 1] if shard else 0)


def _ends(shards: Sequence[RowShard], row_width: int) -> Array:
    return np.cumsum([shard.rows.tokens // row_width for shard in shards], dtype=np.int64)
