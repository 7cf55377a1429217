"""The process of `-m` while a launcher's own processes train its jobs: what a signal means for them.

The first signal lets no other job begin and stops those that are being trained, which save; then this process
ends with 75. The second one ends all of them and this process at once. Either way none of them is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.preemption import StopRequest, listening
from harness.sweep.lock import working
from harness.sweep.processes import command_of, descendants, is_running
from harness.sweep.workers import HELD_BACK, STOP_FILE

_POLL_S = 0.1
_QUIET_LOOKS = 5  # without any job: one that has just begun holds its lock by then
_LOOKS_AT_THE_KILLED = 500
_JOBLIB_S = 3.0
_TRACKER = "resource_tracker"  # joblib's, of shared memory: it ends with this process, or is started anew


@contextlib.contextmanager
def forwarding(folder: Path) -> Iterator[None]:
    """Stand between a user and the launcher that trains the jobs of the sweep in `folder`.

    Where a signal came, the block is left by `Stopped` once the jobs are saved. Must be entered by the main
    thread. Jobs that run on other machines are not told: a queue has them in its own keeping.
    """
    flag = folder / ".locks" / f"stop-{os.getpid()}"
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(listening())
        stack.enter_context(_environment(flag))
        stack.enter_context(_held_back())
        stack.enter_context(_left_by(stop))
        stop.record = _leave
        thread = threading.Thread(target=_forward, args=(stop, folder, flag, over), daemon=True)
        thread.start()
        try:
            with stop.asking(), _cleared_up(stop, folder):
                yield
        finally:
            over.set()
            thread.join()
            flag.unlink(missing_ok=True)
    stop.raise_if_signalled()


def _forward(stop: StopRequest, folder: Path, flag: Path, over: threading.Event) -> None:
    while not stop.signalled:
        if over.wait(_POLL_S):
            return
    flag.parent.mkdir(parents=True, exist_ok=True)
    flag.touch()
    told: set[int] = set()
    quiet = 0
    while quiet < _QUIET_LOOKS and not over.wait(_POLL_S):
        jobs = working(folder) & {*descendants(os.getpid()), os.getpid()}  # joblib's only worker is this one
        for pid in jobs - told - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        told |= jobs
        quiet = 0 if jobs else quiet + 1
    if not over.is_set():
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)


@contextlib.contextmanager
def _cleared_up(stop: StopRequest, folder: Path) -> Iterator[None]:
    """Where a launcher does not come to its end: nothing of it stays behind a signal, jobs end otherwise."""
    try:
        yield
    except BaseException:
        try:
            if not stop.signalled:
                _wait_for_jobs(folder)
        finally:
            if stop.signalled:
                _clear_up()
        raise


def _wait_for_jobs(folder: Path) -> None:
    """A launcher that gave up, for a job that was killed say, may have left others that are being trained."""
    while (found := descendants(os.getpid())) and (
        working(folder) & found or any("submitit" in command_of(pid) for pid in found)
    ):
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _left_by(stop: StopRequest) -> Iterator[None]:
    """SIGUSR2 in the main thread, which is inside of the launcher, leaves it by `Stopped`."""

    def leave(*_: Any) -> None:
        if stop.signalled:
            stop.raise_if_signalled()

    before = signal.signal(signal.SIGUSR2, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Processes that are started here have no signals until they can answer them.

    One that a signal ends before it has begun its first job would end the launcher, and so every other job.
    This process hears them still, by the thread of its `StopRequest`.
    """
    from multiprocessing import resource_tracker  # late: what it does at exit comes before preemption's end

    resource_tracker.ensure_running()  # joblib would, and that lets the signals through again (Python 3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(flag: Path) -> Iterator[None]:
    """What workers find in theirs: the file that says stop, and this package, from whichever folder."""
    new = {STOP_FILE: str(flag)}
    root = Path(__file__).resolve().parent.parent.parent
    if (root / "train.py").is_file():  # a checkout: what is installed is found
        new["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    before = {key: os.environ.get(key) for key in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _clear_up() -> None:
    """End what a launcher that was left leaves; joblib ends its workers itself, by a thread of its own."""
    deadline = time.monotonic() + _JOBLIB_S
    is_joblib = any("loky" in command_of(pid) for pid in descendants(os.getpid()))
    while is_joblib and _started(_TRACKER) and time.monotonic() < deadline:
        time.sleep(0.01)
    _kill_descendants(spare=_TRACKER)


def _kill_descendants(*, spare: str) -> None:
    """End all that this process has started, and wait until it is gone; but not what `spare` names."""
    killed: set[int] = set()
    for _ in range(_LOOKS_AT_THE_KILLED):
        found = _started(spare)
        _kill(found)
        killed |= found
        if not any(map(is_running, killed)):
            return
        time.sleep(0.01)


def _leave(code: int) -> None:
    """End all processes, this one too, before a thread of joblib's sees that workers are gone and says so."""
    started = descendants(os.getpid())
    _kill(started)
    os._exit(code)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _started(spare: str) -> set[int]:
    return {pid for pid in descendants(os.getpid()) if spare not in command_of(pid)}
