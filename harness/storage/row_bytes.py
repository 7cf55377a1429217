"""Rows of mapped files as bytes, and the two ways to fetch some of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.storage.io import Descriptors, FileIdentity, read_exactly
from harness.storage.ranges import run_all

_Array = np.ndarray[Any, Any]

# Two rows are read at once where what lies between them costs less than a read of its own would wait; what is
# read at once is bounded, so that eight threads have something to share and scratch memory stays small.
_GAP = 64 << 10
_SPAN = 4 << 20


class MappedFile(NamedTuple):
    """A mapped file; `data` are its bytes, `address` is where they begin in memory."""

    path: Path
    identity: FileIdentity
    data: _Array
    address: int


class Rows(NamedTuple):
    """A source as bytes, `data` `(rows, width)`; its row i lies at byte `offset + i * stride` of the file.

    `stride` is at least the width: rows follow one another and do not overlap.
    """

    file: MappedFile
    offset: int
    stride: int
    data: _Array
    dtype: np.dtype[Any]


def gather(rows: Rows, ids: _Array) -> _Array:
    """The bytes of the rows `ids`, `(len(ids), width)`, through the mapping."""
    if rows.data.flags.c_contiguous:
        return np.take(rows.data, ids, axis=0, mode="clip")
    # take would copy a slice of columns as a whole first.
    found: _Array = rows.data[ids]
    return found


def read_parallel(sources: Sequence[Rows], ids: _Array, descriptors: Descriptors) -> list[_Array]:
    """As `gather` for each source, by reads in the order of the files, eight at once."""
    unique, places = np.unique(ids, return_inverse=True)
    jobs = []
    found = []
    for rows in sources:
        out = np.empty((len(unique), rows.data.shape[1]), np.uint8)
        found.append(out)
        for first, last in _runs(rows, unique):
            jobs.append(partial(_read_run, rows, descriptors, unique[first:last], out[first:last]))
    run_all(jobs)
    if np.array_equal(unique, ids):
        return found
    return [np.take(out, places, axis=0, mode="clip") for out in found]


def _runs(rows: Rows, unique: _Array) -> list[tuple[int, int]]:
    """The places `[first, last)` in the ascending `unique` whose rows are read at once."""
    begins = (unique * rows.stride).tolist()
    width = rows.data.shape[1]
    runs = []
    first = 0
    for index in range(1, len(begins)):
        gap = begins[index] - begins[index - 1] - width
        if gap > _GAP or begins[index] + width - begins[first] > _SPAN:
            runs.append((first, index))
            first = index
    return [*runs, (first, len(begins))]


def _read_run(rows: Rows, descriptors: Descriptors, ids: _Array, out: _Array) -> None:
    """Fill `out` with the bytes of the ascending rows `ids` by one read."""
    descriptor = descriptors.get(rows.file.path, rows.file.identity)
    first, last = int(ids[0]), int(ids[-1])
    offset = rows.offset + first * rows.stride
    span = (last - first) * rows.stride + rows.data.shape[1]
    if span == out.size:
        read_exactly(rows.file.path, descriptor, out, offset)
        return
    scratch = np.empty(span, np.uint8)
    read_exactly(rows.file.path, descriptor, scratch, offset)
    shape = (last - first + 1, rows.data.shape[1])
    out[:] = np.ndarray(shape, np.uint8, scratch, strides=(rows.stride, 1))[ids - first]
