"""Jobs in a process that a launcher started: how it stops, and that it then begins no other job.

Such a process is the launcher's to end. A signal saves the job that it trains; the process itself goes on to
answer the launcher, which for joblib's would take a worker that vanished for the end of all. Where a launcher
of joblib's was killed, its workers end too, once the jobs that they train are done.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import EXIT_STOPPED
from harness.preemption import Stopped, StopRequest
from harness.sweep.job import Ended
from harness.sweep.processes import command_of
from harness.sweep.states import STOPPED

# Of the environment: a file that is there once no job may begin any more, named by the launcher's pid.
STOP_FILE = "HARNESS_SWEEP_STOP_FILE"
# Ctrl-C reaches the launcher too, which forwards it; USR2 is how submitit says that the time is nearly over.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
HELD_BACK = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_POLL_S = 0.5

_turns: _Turns | None = None


def is_one() -> bool:
    """Whether a launcher that is another process started this one."""
    path = os.environ.get(STOP_FILE)
    return path is not None and not path.endswith(f"-{os.getpid()}")


def in_turn(job: Callable[[], Ended]) -> Ended:
    """Do a job in this worker; "stopped", with nothing begun, where it or the launcher was told to stop."""
    global _turns
    if _turns is None:
        _turns = _Turns()
    return _turns.take(job)


class _Turns:
    """The jobs of one worker, one after another."""

    def __init__(self) -> None:
        self._requeue = signal.getsignal(signal.SIGUSR2)
        self._over = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._stop = StopRequest(signals=_SIGNALS, patient=True).__enter__()  # as long as the process lives
        self._stop.ends(EXIT_STOPPED)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        self._at_work = threading.Lock()
        threading.Thread(target=self._end_alone, daemon=True).start()

    def take(self, job: Callable[[], Ended]) -> Ended:
        with self._at_work:
            return self._take(job)

    def _take(self, job: Callable[[], Ended]) -> Ended:
        if self._over or self._stop.signalled or _is_told_to_stop() or _is_left_alone():
            return Ended(None, STOPPED)
        try:
            try:
                ended = job()
            finally:
                self._stop.ends(EXIT_STOPPED)  # between jobs a signal raises nothing
        except Stopped:
            ended = Ended(None, STOPPED)
        self._over = ended.state == STOPPED
        if self._stop.name == "SIGUSR2":
            _call(self._requeue)
        return ended

    def _end_alone(self) -> None:
        """End the process between jobs once nobody waits for its answers: joblib's would stay for ever."""
        while not _is_left_alone():
            time.sleep(_POLL_S)
        with self._at_work:
            os._exit(EXIT_STOPPED)


def _is_left_alone() -> bool:
    """Whether the launcher of this worker of joblib's is gone; submitit's jobs have no need of theirs."""
    path = os.environ.get(STOP_FILE)
    is_child = path is None or path.endswith(f"-{os.getppid()}")
    return not is_child and "loky" in command_of(os.getpid())


def _is_told_to_stop() -> bool:
    path = os.environ.get(STOP_FILE)
    return path is not None and Path(path).exists()


def _call(handler: Any) -> None:
    """What the signal meant to the launcher: submitit's own handler queues the job again."""
    if callable(handler):
        handler(signal.SIGUSR2, None)
