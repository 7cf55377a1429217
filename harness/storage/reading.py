"""Reads that are begun now and whose result is wanted later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from harness.storage.pool import Job
    from harness.storage.tokens import TokenStore

T = TypeVar("T")
U = TypeVar("U")

_Array = np.ndarray[Any, Any]


def _nothing() -> None:
    """There is nothing to drop."""


class Reading(Generic[T]):
    """A read that was begun. For the process that began it: in a forked child nobody goes on with it."""

    def __init__(self, result: Callable[[], T], drop: Callable[[], None] = _nothing) -> None:
        self.result = result  # what was read, waiting for it; raises what went wrong; to be called once
        self.drop = drop  # nobody wants it: what has not begun never does; waits for nothing

    def then(self, change: Callable[[T], U]) -> Reading[U]:
        """The same read with its result changed, by the thread that asks for it."""
        return Reading(lambda: change(self.result()), self.drop)


def begin_jobs(jobs: Sequence[Job], finish: Callable[[], T]) -> Reading[T]:
    """Jobs that the pool's readers begin now, and what gives the result once they have ended."""
    from harness.storage.pool import start_all

    run = start_all(jobs)

    def result() -> T:
        run.finish()
        return finish()

    return Reading(result, run.drop)


def together(readings: Sequence[Reading[T]]) -> Reading[list[T]]:
    """Several readings as one."""

    def drop() -> None:
        for reading in readings:
            reading.drop()

    return Reading(lambda: [reading.result() for reading in readings], drop)


def begin_windows(store: TokenStore, starts: _Array, length: int, *, readers: bool) -> Reading[_Array]:
    """As `TokenStore.read_windows`, begun now: the system is told of the windows, or `readers` read them.

    Give a store that reads at positions, so that an error of the storage is an error, and so that threads
    wait for it without each other.
    """
    if not readers:
        store.prefetch(starts, length)
        return Reading(partial(store.read_windows, starts, length))
    windows = np.empty((len(starts), length), store.dtype)
    jobs = [partial(store.read_into, start, row) for start, row in zip(starts.tolist(), windows, strict=True)]
    return begin_jobs(jobs, lambda: windows)
