"""Reads side by side: one pool of threads for everything that a process reads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

# Threads for jobs that somebody waits for: they copy as much as they wait, and more only get in each other's
# way.
WORKERS = 8
# Threads for reads begun ahead on slow storage, which do nothing but wait: 32 windows at once.
READERS = 32

Job = Callable[[], None]


def run_all(jobs: Sequence[Job], threads: int = WORKERS) -> None:
    """Run every job, `threads` at a time in the process's pool, and raise the first error in their order.

    No job is running any more when this returns or raises, so jobs may write to the caller's arrays; an
    interrupt drops the jobs that have not begun. A job must not call this: it would wait for its own thread.
    """
    run = Run(jobs)
    try:
        run.begin(threads)
        run.finish()
    finally:
        run.stop()


def start_all(jobs: Sequence[Job]) -> Run:
    """Begin every job and return at once; `Run.finish` of the result waits for them.

    Runs are served in the order in which they were begun. Jobs must own what they write to.
    """
    run = Run(jobs)
    run.begin(READERS)
    return run


class Run:
    """Jobs that threads take one after the other, and what became of them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._count = len(jobs)
        self._pending = deque(enumerate(jobs))
        self._running = 0
        self._failed: list[tuple[int, BaseException]] = []
        self._changed = threading.Condition()

    def begin(self, threads: int) -> None:
        """Have the pool's threads take these jobs, so many at a time at most."""
        threads = min(threads, self._count)
        queue = _queue(threads)
        for _ in range(threads):
            queue.put(self._work)

    def finish(self) -> None:
        """Return when every job has ended, or raise the error of the first that failed, in their order."""
        with self._changed:
            self._changed.wait_for(self._ended)
        if not self._failed:
            return
        error = min(self._failed, key=lambda item: item[0])[1]
        if len(self._failed) > 1:
            error.add_note(f"{len(self._failed)} of {self._count} reads failed; this is the first")
        raise error

    def drop(self) -> None:
        """Forget the jobs that have not begun; those that have go on."""
        with self._changed:
            self._pending.clear()

    def stop(self) -> None:
        """Forget the jobs that have not begun and wait for those that have."""
        self.drop()
        with self._changed:
            self._changed.wait_for(self._ended)

    def _work(self) -> None:
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
                        self._changed.notify_all()

    def _ended(self) -> bool:
        return not self._pending and not self._running


class _Pool:
    """Daemon threads that take their work from one queue; never fewer than were asked for so far.

    Not a `ThreadPoolExecutor`: an interrupt while it starts a thread leaves one that it does not know and for
    which the interpreter waits at its end for ever. Daemon threads that wait for work need no farewell.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[Job] = SimpleQueue()
        self._threads = 0

    def grow(self, threads: int) -> None:
        """Have at least so many threads."""
        while self._threads < threads:
            name = f"read-{self._threads}"
            threading.Thread(target=_serve, args=(self.queue,), name=name, daemon=True).start()
            self._threads += 1  # only now: one that is counted and is not there would be waited for


_pool: _Pool | None = None
_pool_lock = threading.Lock()


def _queue(threads: int) -> SimpleQueue[Job]:
    """Where the pool's threads take their work; those that are missing are started."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = _Pool()
        _pool.grow(threads)
        return _pool.queue


def _serve(queue: SimpleQueue[Job]) -> None:
    while True:
        queue.get()()


def _forget_pool() -> None:
    """In a forked child: the parent's threads are not here, and its lock may be held for ever."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
