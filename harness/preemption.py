"""SIGTERM, SIGUSR1 and Ctrl-C in every phase of a command; only the standard library is imported here.

| when                                         | the first signal                                           |
|----------------------------------------------|------------------------------------------------------------|
| before the loop (import, preparation, model) | `Stopped` is raised: the process unwinds and exits with 75 |
| in the loop                                  | asks: `StopRequest.name` is set, the loop stops and saves  |
| after the loop                               | limits the wait for trackers                               |

Outside of the loop the process ends within seconds even where its main thread does not answer. A second
signal leaves at once with 130, in any phase. Of several ranks each gets the signal, from their launcher and
maybe from a job manager too: what comes within seconds is one, and rank 0 alone speaks of it.

Signals are counted by a thread, through `signal.set_wakeup_fd`: Python's own handlers wait until the main
thread is back from the call it is in, and two signals during one long product of matrices become one there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from harness.errors import EXIT_AT_ONCE, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED

STARTED = time.monotonic()  # when this process began, as nearly as this module can tell
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
UNWIND_SECONDS = 3.0  # for the main thread to answer where nothing has to be saved
ENDING_SECONDS = 7.0  # for what comes after the last save,
TRACKER_SECONDS = 5.0  # of which trackers may take these
_RECORD_SECONDS = 0.5
_POLL_SECONDS = 0.1
# `timeout` and job managers send a signal to the process and then to its group: that is one signal.
_SAME_SIGNAL_SECONDS = 0.02
_SAME_FOR_RANKS_SECONDS = 3.0
_SO_TIMESTAMP = 29  # of Linux; the socket module does not name it

_active: StopRequest | None = None


class Stopped(SystemExit):
    """A signal outside of the loop, raised in the main thread."""


class _Arrival(NamedTuple):
    number: int
    time: float  # seconds since the epoch


class StopRequest:
    """Context in which `signals` stop this process as the table above says.

    `name` says what asked the loop to stop. `interrupted`: `Stopped` was raised. `record(exit_code)` is
    called before the process is ended beside its main thread, and has half a second to say so in status.json.
    `code` is what a first signal outside of the loop exits with. `patient`: of a process that another one
    started, watches and ends, so it never ends beside its main thread, and a second signal says nothing new.
    """

    def __init__(
        self,
        code: int = EXIT_STOPPED,
        signals: tuple[signal.Signals, ...] = SIGNALS,
        *,
        patient: bool = False,
    ) -> None:
        self.name: str | None = None
        self.signalled = self.interrupted = False
        self.record: Callable[[int], object] = _nothing
        self._stop_code = self._code = code
        self._signals, self._patient = signals, patient
        self._is_rank = (os.environ.get("WORLD_SIZE") or "1") != "1"
        self._talks = not self._is_rank or os.environ.get("RANK") == "0"
        self._before: dict[int, Any] = {}
        self._in_loop = self._is_ending = self._is_held = False
        self._deadline = float("inf")
        self._saying, self._said = threading.Lock(), False

    def __enter__(self) -> StopRequest:
        global _active
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._writer.setblocking(False)
        with contextlib.suppress(OSError):
            self._reader.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMP, 1)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            # nohup, and & in a script, mean it: Ctrl-C is for others.
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        self._outer, _active = _active, self
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
        self._writer.send(b"\0")
        self._watcher.join()
        self._reader.close()
        self._writer.close()

    def give_back(self) -> None:
        """Let the signals mean what they meant before."""
        global _active
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        _active = self._outer

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """The loop: inside, a signal only sets `name`; one that came before is raised now."""
        self._in_loop = True
        try:
            self.raise_if_signalled()
            yield
            self.ends(EXIT_STOPPED)
        except Exception:
            self.ends(EXIT_FAILED)
            raise
        finally:
            self._in_loop = False

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """What must not be left half done: a signal that comes inside is raised at the end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if not (self._in_loop or self._is_ending or self.interrupted):
            self.raise_if_signalled()

    def ends(self, code: int) -> None:
        """All is saved: from here on a signal raises nothing, and the process ends with `code`, soon."""
        self._is_ending, self._code = True, code
        if self.signalled and not self._patient:
            self._deadline = min(self._deadline, time.monotonic() + ENDING_SECONDS)

    def begins(self) -> None:
        """One more job of this process: the table above from its first row."""
        self.raise_if_signalled()
        self.name, self.record = None, _nothing
        self._is_ending, self._code = False, self._stop_code

    def raise_if_signalled(self) -> None:
        """For where the loop is not: a signal that was not raised, or whose exception somebody swallowed."""
        if self.signalled:
            self.interrupted = True
            raise Stopped(self._stop_code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, as soon as it is back in Python."""
        self._note(number)
        if not (self._in_loop or self._is_ending or self.interrupted or self._is_held):
            self.raise_if_signalled()

    def _note(self, number: int) -> None:
        """The first signal, from whichever thread sees it first; the other one waits until it is said."""
        name = signal.Signals(number).name
        self.signalled, self.name = True, self.name or name
        if self._saying.acquire(timeout=_RECORD_SECONDS):
            is_quiet = self._said or self._is_ending or self._patient or not self._talks
            if not is_quiet and self._stop_code == EXIT_STOPPED:
                self._said = True
                what = (
                    "stopping at the next safe point, which is saved"
                    if self._in_loop
                    else "ending, the same command goes on from what is on disk"
                )
                _say(f"{name}: {what}; a second signal leaves at once")
            self._saying.release()

    def _watch(self) -> None:
        first: _Arrival | None = None
        while (arrival := self._receive(_POLL_SECONDS if first else None)) is None or arrival.number:
            if arrival is None:
                if time.monotonic() >= self._deadline:
                    self._leave(self._code, "ended without what did not end in time")
            elif first is None:
                first = arrival
                _aside(partial(self._note, arrival.number))
                if not (self._in_loop or self._patient):
                    self._deadline = time.monotonic() + UNWIND_SECONDS
            elif not self._patient and self._is_another(first, arrival):
                self._leave(EXIT_AT_ONCE, "left at once; what was saved before is whole")

    def _is_another(self, first: _Arrival, second: _Arrival) -> bool:
        """Whether the second signal was sent for itself."""
        apart = second.time - first.time
        if self._is_rank:
            return apart > _SAME_FOR_RANKS_SECONDS
        return first.number != second.number or apart > _SAME_SIGNAL_SECONDS

    def _receive(self, timeout: float | None) -> _Arrival | None:
        """The next signal, 0 for the end of the watch; None where none came in `timeout` seconds."""
        self._reader.settimeout(timeout)
        while True:
            try:
                data, notes, _, _ = self._reader.recvmsg(1, 64)
            except TimeoutError:
                return None
            if data[0] == 0 or data[0] in self._signals:  # others have handlers of their own
                return _Arrival(data[0], _stamp(notes))

    def _leave(self, code: int, message: str) -> None:
        try:
            if self._talks:
                _aside(lambda: _say(message))
            _aside(lambda: self.record(code))
        finally:
            os._exit(code)


def run(
    main: Callable[[], object], code: int = EXIT_STOPPED, signals: tuple[signal.Signals, ...] = SIGNALS
) -> None:
    """Run a command in a process of its own, to be called before anything large is imported.

    `code` is what a first signal exits with; whatever it does to the code it interrupts, nobody sees a
    traceback of it.
    """
    stop = StopRequest(code, signals).__enter__()  # as long as the process lives
    ended = EXIT_FAILED

    def leave() -> None:
        # What is left of the interpreter's end takes the modules apart: with torch a second of computing, in
        # which a signal would kill, and a thread that is still inside of it would abort.
        lost = False
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except OSError:
                lost = True  # a full disk, or nobody reads any more
        os._exit(EXIT_FAILED if lost and ended == EXIT_DONE else ended)

    atexit.register(leave)  # the first to be registered is the last to run
    try:
        main()
        ended = EXIT_DONE
    except BaseException as error:
        if stop.interrupted:
            ended = code
            raise SystemExit(code) from None
        if isinstance(error, SystemExit):
            ended = error.code if isinstance(error.code, int) else EXIT_FAILED if error.code else EXIT_DONE
        raise
    finally:
        stop.ends(ended)


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """The request that `run` made for this process; where there is none, one for this block."""
    if _active is None:
        with StopRequest() as stop:
            yield stop
        return
    _active.begins()
    yield _active


def holding() -> AbstractContextManager[None]:
    """`StopRequest.holding` of this process's request, where it has one."""
    return contextlib.nullcontext() if _active is None else _active.holding()


def _in_child() -> None:
    if _active is not None:
        _active.give_back()  # a forked child's signals are not its parent's


os.register_at_fork(after_in_child=_in_child)


def _stamp(notes: list[tuple[int, int, bytes]]) -> float:
    """When the kernel saw it: this thread may be late by more than what lies between two signals."""
    size = struct.calcsize("@ll")
    for _, kind, value in notes:
        if kind == _SO_TIMESTAMP and len(value) >= size:
            seconds, microseconds = struct.unpack("@ll", value[:size])
            return float(seconds) + microseconds / 1e6
    return time.time()


def _aside(action: Callable[[], object]) -> None:
    """Give `action`, which may wait for a disk or a reader, half a second."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_RECORD_SECONDS)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # unbuffered: the signal may have come in the middle of a print
        os.write(2, f"{text}\n".encode())


def _nothing(exit_code: int) -> None:
    pass
