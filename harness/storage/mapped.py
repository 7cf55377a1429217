"""Extents through mappings of their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.storage.extents import Extent, Positional, TokenArray
from harness.storage.io import map_file


class Mapped(Positional):
    """Extents through mappings: each file is mapped once, when it is first touched."""

    def __init__(self, extents: Sequence[Extent], dtype: np.dtype[Any]) -> None:
        super().__init__(extents, dtype)
        self._mappings: dict[Path, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._arrays: list[TokenArray | None] = [None] * len(extents)

    def slice(self, index: int, start: int, count: int) -> TokenArray:
        """Tokens `[start, start+count)` of an extent, as a read-only view of the mapping."""
        array = self._arrays[index]
        if array is None:
            array = self._arrays[index] = self._map(self._extents[index])
        return array[start : start + count]

    def _map(self, extent: Extent) -> TokenArray:
        file = self._mappings.get(extent.path)
        if file is None:
            file = self._mappings[extent.path] = map_file(extent.path, extent.file)
        end = extent.offset + extent.tokens * self._dtype.itemsize
        assert end <= len(file)
        return file[extent.offset : end].view(self._dtype)
