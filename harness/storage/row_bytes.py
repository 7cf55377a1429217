"""Rows of files as bytes, and the two ways to fetch some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from harness.storage.io import Descriptors, FileIdentity, read_exactly, will_need
from harness.storage.pool import WORKERS, Job, run_all

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


class Strip(NamedTuple):
    """Rows of `width` bytes in a file: row i lies at byte `offset + i * stride`.

    `stride` is at least the width: rows follow one another and do not overlap.
    """

    path: Path
    identity: FileIdentity
    offset: int
    stride: int
    width: int


class Source(Protocol):
    """`rows` rows of `width` bytes, numbered from 0; `name` is what messages call it."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The files to compare with what they were, before each read."""

    def gather(self, ids: _Array) -> _Array:
        """The bytes of the rows `ids`, at least one, `(len(ids), width)`, through a mapping."""

    def jobs(self, unique: _Array, out: _Array, descriptors: Descriptors) -> list[Job]:
        """Reads that together fill `out` with the bytes of the ascending rows `unique`."""


class Rows(NamedTuple):
    """A source in one file, `data` `(rows, width)` bytes of its mapping."""

    file: MappedFile
    offset: int
    stride: int
    data: _Array
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        return str(self.file.path)

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def width(self) -> int:
        return self.data.shape[1]

    @property
    def files(self) -> tuple[MappedFile, ...]:
        return (self.file,)

    def gather(self, ids: _Array) -> _Array:
        """As in `Source`."""
        if self.data.flags.c_contiguous:
            return np.take(self.data, ids, axis=0, mode="clip")
        # take would copy a slice of columns as a whole first.
        found: _Array = self.data[ids]
        return found

    def jobs(self, unique: _Array, out: _Array, descriptors: Descriptors) -> list[Job]:
        """As in `Source`."""
        strip = Strip(self.file.path, self.file.identity, self.offset, self.stride, self.width)
        return strip_jobs(strip, unique, out, descriptors)


def read_parallel(sources: Sequence[Source], ids: _Array, descriptors: Descriptors) -> list[_Array]:
    """As `gather` of each source, by reads in the order of the files, eight at once."""
    jobs, finish = plan_reads(sources, ids, descriptors)
    run_all(jobs)
    return finish()


def plan_reads(
    sources: Sequence[Source], ids: _Array, descriptors: Descriptors
) -> tuple[list[Job], Callable[[], list[_Array]]]:
    """Reads in the order of the files, and what gives the answer of `gather` of each source after them.

    The system is told of all of them.
    """
    unique, places = np.unique(ids, return_inverse=True)
    jobs = []
    found = []
    for source in sources:
        out = np.empty((len(unique), source.width), np.uint8)
        found.append(out)
        jobs += source.jobs(unique, out, descriptors)

    def finish() -> list[_Array]:
        if np.array_equal(unique, ids):
            return found
        return [np.take(out, places, axis=0, mode="clip") for out in found]

    return jobs, finish


def strip_jobs(strip: Strip, unique: _Array, out: _Array, descriptors: Descriptors) -> list[Job]:
    """Reads that together fill `out` with the ascending rows `unique` of one file.

    The system is told of all of them first: where it reads ahead, that halves the wait of a cold disk.
    """
    runs = _runs(strip, unique)
    descriptor = descriptors.get(strip.path, strip.identity)
    for run in runs:
        will_need(descriptor.fd, run.offset, run.size)
    # A few jobs a thread, so that all end at about the same time; each costs as much as a small read.
    size = -(-len(runs) // (2 * WORKERS))
    return [
        partial(_read_runs, strip, unique, out, runs[start : start + size], descriptors)
        for start in range(0, len(runs), size)
    ]


class _Run(NamedTuple):
    """The places `[first, last)` of rows that are read at once, and the bytes of the file that hold them."""

    first: int
    last: int
    offset: int
    size: int


def _runs(strip: Strip, unique: _Array) -> list[_Run]:
    """The ascending rows `unique` in as many reads as are worth a wait of their own."""
    begins = (strip.offset + unique * strip.stride).tolist()
    runs = []
    first = 0
    for index in range(1, len(begins) + 1):
        end = begins[index - 1] + strip.width
        if (
            index == len(begins)
            or begins[index] - end > _GAP
            or begins[index] + strip.width - begins[first] > _SPAN
        ):
            runs.append(_Run(first, index, begins[first], end - begins[first]))
            first = index
    return runs


def _read_runs(
    strip: Strip, unique: _Array, out: _Array, runs: Sequence[_Run], descriptors: Descriptors
) -> None:
    """Fill `out` with the bytes of the rows `unique`, one read for each of these runs."""
    descriptor = descriptors.get(strip.path, strip.identity)
    for run in runs:
        part = out[run.first : run.last]
        if part.size == run.size:
            read_exactly(strip.path, descriptor, part, run.offset)
            continue
        scratch = np.empty(run.size, np.uint8)
        read_exactly(strip.path, descriptor, scratch, run.offset)
        places = unique[run.first : run.last] - unique[run.first]
        shape = (int(places[-1]) + 1, strip.width)
        part[:] = np.ndarray(shape, np.uint8, scratch, strides=(strip.stride, 1))[places]
