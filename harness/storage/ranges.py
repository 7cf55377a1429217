"""Many reads at once: one pool of eight threads for everything that a process reads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Protocol, TypeGuard

import numpy as np

from harness.errors import UserError

WORKERS = 8

_Array = np.ndarray[Any, Any]

_pool: SimpleQueue[Callable[[], None]] | None = None
_pool_lock = threading.Lock()


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


def run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Run every job, `WORKERS` at a time in the process's pool, and raise the first error in their order.

    No job is running any more when this returns or raises, so jobs may write to the caller's arrays; an
    interrupt drops the jobs that have not begun. A job must not call this: it would wait for its own thread.
    """
    run = _Run(jobs)
    queue = _queue()
    try:
        for _ in range(min(WORKERS, len(jobs))):
            queue.put(run.work)
        run.wait()
    finally:
        run.stop()
    run.raise_first()


class _Run:
    """Jobs that threads take one after the other, and what became of them."""

    def __init__(self, jobs: Sequence[Callable[[], None]]) -> None:
        self._count = len(jobs)
        self._pending = deque(enumerate(jobs))
        self._running = 0
        self._failed: list[tuple[int, BaseException]] = []
        self._changed = threading.Condition()

    def work(self) -> None:
        """Run jobs until none is left."""
        while True:
            with self._changed:
                if not self._pending:
                    return
                index, job = self._pending.popleft()
                self._running += 1
            try:
                job()
            except BaseException as error:
                self._failed.append((index, error))
            finally:
                with self._changed:
                    self._running -= 1
                    if self._ended():
                        self._changed.notify()

    def wait(self) -> None:
        """Return when every job has ended."""
        with self._changed:
            self._changed.wait_for(self._ended)

    def stop(self) -> None:
        """Drop the jobs that have not begun and wait for those that have."""
        with self._changed:
            self._pending.clear()
        self.wait()

    def raise_first(self) -> None:
        """Raise the error of the job that came first in their order, if any failed."""
        if not self._failed:
            return
        error = min(self._failed, key=lambda item: item[0])[1]
        if len(self._failed) > 1:
            error.add_note(f"{len(self._failed)} of {self._count} reads failed; this is the first")
        raise error

    def _ended(self) -> bool:
        return not self._pending and not self._running


def _queue() -> SimpleQueue[Callable[[], None]]:
    """Where the pool's threads take their work; they are started with the first.

    Not a `ThreadPoolExecutor`: an interrupt while it starts a thread leaves one that it does not know and for
    which the interpreter waits at its end for ever. Daemon threads that wait for work need no farewell.
    """
    global _pool
    with _pool_lock:
        if _pool is None:
            queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
            for index in range(WORKERS):
                threading.Thread(target=_serve, args=(queue,), name=f"read-{index}", daemon=True).start()
            _pool = queue
        return _pool


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


def _forget_pool() -> None:
    """In a forked child: the parent's threads are not here, and its lock may be held for ever."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


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
