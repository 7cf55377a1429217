"""Many ranges of elements copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

import numpy as np

from harness.errors import UserError
from harness.storage.pool import run_all

_Array = np.ndarray[Any, Any]


class RangeSource(Protocol):
    """A row of elements that is not in memory; several threads may read from it at once."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of every element."""

    def __len__(self) -> int:
        """Number of elements."""

    def read_into(self, start: int, out: _Array) -> None:
        """Fill `out`, one row, with the elements `[start, start+len(out))`."""


def read_ranges(source: _Array | RangeSource, destination: _Array, ranges: Sequence[slice]) -> None:
    """Copy `source[s]` into `destination[s]` for each slice, eight at once; all else in it stays as it is.

    `source` and `destination` are one row each, of equal length and dtype; slices count elements, are
    disjoint, without a step and inside the row, in any order. Everything is checked before anything is
    copied: `UserError` for what cannot be copied exactly. The call returns, or raises, when no copy is under
    way any more; the error is that of the first failed slice in `ranges`, and the others are still copied.
    """
    _check_rows(source, destination)
    if not isinstance(ranges, Sequence):
        raise UserError(f"ranges must be a list of slices, not {ranges!r}; give [slice(start, stop), ...]")
    spans = [_checked_span(item, len(destination)) for item in ranges]
    filled = sorted(span for span in spans if span[0] < span[1])
    for before, after in pairwise(filled):
        if after[0] < before[1]:
            raise UserError(
                f"ranges [{before[0]}, {before[1]}) and [{after[0]}, {after[1]}) overlap: elements would be "
                "written twice at the same time. Give disjoint ranges"
            )
    run_all([partial(_copy, source, destination, *span) for span in spans])


def _copy(source: _Array | RangeSource, destination: _Array, start: int, stop: int) -> None:
    if start == stop:
        return
    if isinstance(source, np.ndarray):
        np.copyto(destination[start:stop], source[start:stop], casting="no")
    else:
        source.read_into(start, destination[start:stop])


def _check_rows(source: _Array | RangeSource, destination: _Array) -> None:
    if not isinstance(destination, np.ndarray) or destination.ndim != 1:
        raise UserError(f"the destination must be an array of one dimension, not {_shown(destination)}")
    if isinstance(source, np.ndarray) and source.ndim != 1:
        raise UserError(f"the source must be an array of one dimension, not {_shown(source)}")
    if not all(hasattr(source, name) for name in ("dtype", "__len__")):
        raise UserError(f"the source must be an array of one dimension, not {_shown(source)}")
    if source.dtype != destination.dtype:
        raise UserError(
            f"the source holds {source.dtype} and the destination {destination.dtype}: values would "
            "change on the way. Give both the same dtype"
        )
    if len(source) != len(destination):
        raise UserError(
            f"the source has {len(source)} elements and the destination {len(destination)}: a range names "
            "the same elements in both. Give slices of equal length"
        )
    if not destination.flags.c_contiguous or not destination.flags.writeable:
        raise UserError(
            "the destination must be contiguous and writable; give the array that owns the memory"
        )
    if isinstance(source, np.ndarray) and np.may_share_memory(source, destination):
        raise UserError(
            "source and destination lie in the same memory: what is copied would depend on which copy is "
            "first. Give a destination of its own"
        )


def _checked_span(item: slice, length: int) -> tuple[int, int]:
    if not isinstance(item, slice) or (item.step is not None and item.step != 1):
        raise UserError(f"{item!r} is no range of adjacent elements; give slice(start, stop)")
    start = 0 if item.start is None else item.start
    stop = length if item.stop is None else item.stop
    if not _is_integer(start) or not _is_integer(stop) or not 0 <= start <= stop <= length:
        raise UserError(
            f"{item!r} is not inside [0, {length}): ranges count elements from 0 and are never cut or wrapped"
        )
    return int(start), int(stop)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__
