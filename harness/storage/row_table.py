"""Rows of one width in several files as one table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from harness.storage.extents import Extent, Positional
from harness.storage.io import Descriptors
from harness.storage.mapped import Mapped
from harness.storage.pool import Job
from harness.storage.row_bytes import MappedFile, Strip, strip_jobs

Array = np.ndarray[Any, Any]


class RowTable:
    """Rows of `row_width` elements, numbered through the `extents` of their files: a source of a `RowReader`.

    Read directly, rows of all files are one indexing; with `mmap=False` nothing is mapped. Files are not
    compared with what they were before each read: a mapping keeps its file, and nothing is opened again that
    is not the file of its extent. For one process; `columns` gives a part of the columns.
    """

    # Nothing to compare before each read: there may be 1,000 files.
    files: tuple[MappedFile, ...] = ()

    def __init__(
        self, extents: Sequence[Extent], dtype: np.dtype[Any], row_width: int, *, mmap: bool = True
    ) -> None:
        self.dtype = dtype
        self._extents = extents
        self._row_width = row_width
        self._column, self._columns = 0, row_width
        self._reader = (Mapped if mmap else Positional)(extents, dtype)
        self._offsets = np.cumsum([0, *(extent.tokens // row_width for extent in extents)], dtype=np.int64)

    @property
    def name(self) -> str:
        """The first file's path, for messages."""
        return f"{self._extents[0].path}, ..." if self._extents else "no file"

    @property
    def rows(self) -> int:
        """Over all files."""
        return int(self._offsets[-1])

    @property
    def width(self) -> int:
        """Bytes of a row, of the chosen columns."""
        return self._columns * self.dtype.itemsize

    def columns(self, start: int, stop: int) -> RowTable:
        """The same rows, of each the columns `[start, stop)`."""
        assert 0 <= start < stop <= self._row_width
        part = copy.copy(self)
        part._column, part._columns = start, stop - start
        return part

    def gather(self, ids: Array) -> Array:
        """As in `row_bytes.Source`."""
        found, left = self._reader.gather(ids * self._row_width + self._column, self._columns)
        for place in left:
            found[place] = self._reader.slice(*self._locate(int(ids[place])), self._columns)
        return found.view(np.uint8)

    def jobs(self, unique: Array, out: Array, descriptors: Descriptors) -> list[Job]:
        """As in `row_bytes.Source`."""
        jobs = []
        size = self.dtype.itemsize
        cuts = unique.searchsorted(self._offsets).tolist()
        for extent, first, (start, stop) in zip(self._extents, self._offsets, pairwise(cuts), strict=False):
            if start < stop:
                offset = extent.offset + self._column * size
                strip = Strip(extent.path, extent.file, offset, self._row_width * size, self.width)
                jobs += strip_jobs(strip, unique[start:stop] - first, out[start:stop], descriptors)
        return jobs

    def _locate(self, row: int) -> tuple[int, int]:
        """The extent of a row, and the place in it where the row's chosen columns begin."""
        index = int(self._offsets.searchsorted(row, "right")) - 1
        return index, (row - int(self._offsets[index])) * self._row_width + self._column
