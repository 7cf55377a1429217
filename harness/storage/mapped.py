"""Extents through mappings: all files of a split in one range of addresses."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from harness.storage.addresses import AddressRange, places_for
from harness.storage.extents import Extent, Located, Positional, TokenArray

log = logging.getLogger("harness")

# Bytes of the largest item an array may have.
_MAX_ITEM = (1 << 31) - 1


class Mapped(Positional):
    """Extents through mappings; a file is mapped once, when it is first touched.

    Every file has its place in one reserved range of addresses. So the windows of all files are one array to
    NumPy, and a batch of them is one indexing, over 1,000 shards as over one. What cannot be mapped, for want
    of address space or because the file system does not map, is read at positions.
    """

    def __init__(self, extents: Sequence[Extent], dtype: np.dtype[Any]) -> None:
        super().__init__(extents, dtype)
        sizes = {str(extent.path): extent.file.size for extent in extents}
        places, size = places_for(list(sizes.values()))
        self._places = dict(zip(sizes, places, strict=True))
        self._range = _reserve(extents, size)
        self._tokens = np.empty(0, dtype) if self._range is None else self._range.bytes.view(dtype)
        self._of_file: dict[str, list[int]] = {name: [] for name in sizes}
        for index, extent in enumerate(extents):
            self._of_file[str(extent.path)].append(index)
        # Tokens from the start of the range to where an extent begins and, once it is mapped, ends; until
        # then no window fits in it.
        self._begins = [(self._places[str(e.path)] + e.offset) // dtype.itemsize for e in extents]
        self._ends = np.zeros(len(extents), np.int64)
        self._mapped: list[bool | None] = [None] * len(extents)
        self._lock = threading.Lock()

    def slice(self, index: int, start: int, count: int) -> TokenArray:
        """Tokens `[start, start+count)` of an extent, as a view if it is mapped: nobody may write to it."""
        mapped = self._mapped[index]
        if mapped is None:
            mapped = self._touch(index)
        if not mapped:
            return super().slice(index, start, count)
        begin = self._begins[index] + start
        return self._tokens[begin : begin + count]

    def in_memory(self, index: int) -> TokenArray | None:
        """As in `Reader`: what is mapped so far."""
        return self.slice(index, 0, self.extents[index].tokens) if self._mapped[index] else None

    def gather(self, starts: np.ndarray[Any, Any], length: int) -> tuple[TokenArray, Sequence[int]]:
        """As in `Reader`: left are windows that cross extents, and those in extents not mapped so far."""
        located = self.locate(starts, length)
        if located is None or len(located.left) == len(starts):
            return super().gather(starts, length)
        begins, left = located.begins, located.left
        if left:
            inside = np.ones(len(begins), np.bool_)
            inside[left] = False
            begins[left] = begins[inside.argmax()]  # any place that may be read
        return located.take(0, len(starts)), left

    def locate(self, starts: np.ndarray[Any, Any], length: int) -> Located | None:
        """As in `Reader`, in what is mapped so far."""
        size = self.dtype.itemsize
        if length * size > _MAX_ITEM:
            return None
        mapped_files = self.mapped_files
        borders, shifts = self._stream
        extents = borders.searchsorted(starts, "right")
        begins = starts + shifts.take(extents)
        left = np.flatnonzero(begins > self._ends.take(extents) - length).tolist()
        item = np.dtype((np.void, length * size))
        windows: TokenArray = np.ndarray(max(len(self._tokens) - length + 1, 0), item, self._tokens, 0, size)
        begins[left] = len(windows)  # an index error, should one of them ever be taken
        return Located(windows, begins, left, self.dtype, mapped_files)

    @cached_property
    def _stream(self) -> tuple[TokenArray, TokenArray]:
        """Places in the stream where the extents but the first begin; how far each is away in the range."""
        starts = np.array([0, *accumulate(extent.tokens for extent in self.extents[:-1])], np.int64)
        return starts[1:], np.array(self._begins, np.int64) - starts[: len(self.extents)]

    def _touch(self, index: int) -> bool:
        """Map the file of an extent, unless another thread just has; whether the extent is mapped."""
        extent = self.extents[index]
        with self._lock:
            if self._mapped[index] is None:
                file_is_mapped = self._map_file(extent)
                for other in self._of_file[str(extent.path)]:
                    neighbour = self.extents[other]
                    mapped = file_is_mapped and neighbour.offset % self.dtype.itemsize == 0
                    if mapped:
                        self._ends[other] = self._begins[other] + neighbour.tokens
                    self._mapped[other] = mapped
                self.mapped_files += file_is_mapped
            return bool(self._mapped[index])

    def _map_file(self, extent: Extent) -> bool:
        if self._range is None:
            return False
        try:
            self._range.map_file(extent.path, extent.file, self._places[str(extent.path)])
        except OSError as error:
            _warn(str(extent.path), error)
            return False
        return True


def _reserve(extents: Sequence[Extent], size: int) -> AddressRange | None:
    if not extents:
        return None
    try:
        return AddressRange(size)
    except OSError as error:
        _warn(f"{extents[0].path.parent} ({size / 1e6:.0f} MB)", error)
        return None


def _warn(what: str, error: OSError) -> None:
    log.warning(
        "%s cannot be mapped (%s%s): it is read at positions, which gives the same tokens, but more slowly",
        what,
        error.strerror,
        "; ulimit -v may be too low" if error.errno == errno.ENOMEM else "",
    )
