"""Extents: where the tokens of a split lie in its files, and what reads them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.storage.io import Descriptors, FileIdentity, read_exactly, will_need

TokenArray = np.ndarray[Any, Any]


class Extent(NamedTuple):
    """`tokens` consecutive tokens in the file `path` from byte `offset`.

    `file` is what the file was when its header was checked; nothing is read from any other.
    """

    path: Path
    offset: int
    tokens: int
    file: FileIdentity


class Piece(NamedTuple):
    """`length` tokens, or rows, of a shard that follow one another, from number `first` of the file on."""

    path: Path
    first: int
    length: int


class Located(NamedTuple):
    """Where windows lie in memory, when so many files were mapped.

    `windows` has an item as large as a window at every token of the memory: NumPy copies an item as a whole,
    where it would go along an inner axis token by token. `begins` are the windows' places in it, int64
    `(n,)`. Windows whose numbers are in `left`, in order, do not lie in memory.
    """

    windows: TokenArray
    begins: TokenArray
    left: list[int]
    dtype: np.dtype[Any]
    mapped_files: int

    def take(self, first: int, last: int) -> TokenArray:
        """The windows `[first, last)`, at least one and none of them left: owned `(last - first, length)`."""
        return self.windows[self.begins[first:last]].view(self.dtype).reshape(last - first, -1)


class Reader:
    """The extents of a split, opened in one process. Several threads may use it at once."""

    def __init__(self, extents: Sequence[Extent], dtype: np.dtype[Any]) -> None:
        self.extents = extents
        self.dtype = dtype
        self.mapped_files = 0

    def slice(self, index: int, start: int, count: int) -> TokenArray:
        """Tokens `[start, start+count)` of the extent `index`, `(count,)`; it may be a view: only read it."""
        raise NotImplementedError

    def in_memory(self, index: int) -> TokenArray | None:
        """All of the extent `index`, to be only read, if it lies in memory: taking it reads nothing."""
        return None

    def gather(self, starts: np.ndarray[Any, Any], length: int) -> tuple[TokenArray, Sequence[int]]:
        """The windows at `starts` as an owned `(len(starts), length)`, and its rows that are left to fill.

        `starts` are int64 places in the stream; `starts` and `length` are not empty. A reader that has no
        faster way than `slice` leaves all rows.
        """
        return np.empty((len(starts), length), self.dtype), range(len(starts))

    def locate(self, starts: np.ndarray[Any, Any], length: int) -> Located | None:
        """Where the windows lie in memory; arguments as of `gather`. None: not in memory, only `gather` can.

        What is left may be less once `mapped_files` has changed.
        """
        return None

    def will_need(self, index: int, start: int, count: int) -> None:
        """Hint that these tokens are read soon."""


# How a process opens the extents of a split: a `Reader`, or a function of a module, because it travels with
# a pickled store.
OpenReader = Callable[[Sequence[Extent], np.dtype[Any]], Reader]


class Positional(Reader):
    """Extents through positional reads: no mapping, a bounded number of descriptors."""

    def __init__(self, extents: Sequence[Extent], dtype: np.dtype[Any]) -> None:
        super().__init__(extents, dtype)
        self._files = Descriptors()

    def slice(self, index: int, start: int, count: int) -> TokenArray:
        """Tokens `[start, start+count)` of an extent, freshly read."""
        extent = self.extents[index]
        out = np.empty(count, self.dtype)
        offset = extent.offset + start * self.dtype.itemsize
        read_exactly(extent.path, self._files.get(extent.path, extent.file), out, offset)
        return out

    def will_need(self, index: int, start: int, count: int) -> None:
        """Ask the system to read these tokens ahead."""
        extent = self.extents[index]
        size = self.dtype.itemsize
        descriptor = self._files.get(extent.path, extent.file)
        will_need(descriptor.fd, extent.offset + start * size, count * size)
