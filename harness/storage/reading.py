"""Reads that are begun now and whose result is wanted later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from harness.storage.pool import Run, start_all

if TYPE_CHECKING:
    from harness.storage.tokens import TokenStore

T = TypeVar("T")
U = TypeVar("U")

_Array = np.ndarray[Any, Any]


class Reading(Generic[T]):
    """A read that was begun: `finish` gives its result, once the jobs of `run` have ended, if it has any.

    For the process that began it: in a forked child those jobs are nobody's.
    """

    def __init__(self, finish: Callable[[], T], run: Run | None = None) -> None:
        self._finish = finish
        self._run = run

    def result(self) -> T:
        """What was read, waiting for it; raises what went wrong. To be called once."""
        if self._run is not None:
            self._run.finish()
        return self._finish()

    def drop(self) -> None:
        """Nobody wants the result: what has not begun never does. Waits for nothing."""
        if self._run is not None:
            self._run.drop()

    def then(self, change: Callable[[T], U]) -> Reading[U]:
        """The same read with its result changed by the thread that asks for it."""
        return Reading(lambda: change(self._finish()), self._run)


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
    return Reading(lambda: windows, start_all(jobs))
