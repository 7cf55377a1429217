"""Signals become a request: the loop stops and saves at the next step's end; a second one leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from harness.errors import EXIT_AT_ONCE

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Context in which SIGINT, SIGTERM and SIGUSR1 set `name` instead of ending the process.

    A second signal calls `at_once` and leaves.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.at_once: Callable[[], object] = lambda: None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            _say("left at once; the newest checkpoint is whole, resume= goes on from it")
            with contextlib.suppress(Exception):
                self.at_once()
            os._exit(EXIT_AT_ONCE)
        self.name = signal.Signals(number).name
        _say(f"{self.name}: stopping after this step, which is saved; a second signal leaves at once")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # unbuffered: the signal may have come in the middle of a print
        os.write(2, f"{text}\n".encode())
