"""A file that lines are appended to, and that a full disk costs none of them."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class AppendFile:
    """Appends lines to `path`; those that cannot be written wait in memory and go, in order, with the next.

    Every line is whole or absent in the file: of one that was written in part, the part is cut off again.
    May be used by several threads.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()
        self._end: int | None = None  # where the last whole line ends, where there may be more
        self.waiting: list[bytes] = []

    def append(self, line: bytes) -> OSError | None:
        """Hand `line`, with its newline, to the operating system; what kept it from there, or None."""
        with self._lock:
            self.waiting.append(line)
            return self._write()

    def sync(self) -> None:
        """Make every line so far durable. Raises `OSError` where some are still waiting."""
        with self._lock:
            error = self._write()
        if error is not None:
            raise error
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Try what is waiting once more, and close the file."""
        with self._lock:
            self._write()
            os.close(self._descriptor)
            self._descriptor = -1  # a thread that comes late must not write into another file

    def _write(self) -> OSError | None:
        if not self.waiting:
            return None
        # One write of whole lines: a reader, or a crash of this process, never sees half of one.
        left = memoryview(b"".join(self.waiting))
        try:
            if self._end is not None:
                os.ftruncate(self._descriptor, self._end)
                self._end = None
            end = os.fstat(self._descriptor).st_size
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                self._end = end
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, end)
                raise
        except OSError as error:
            return error
        self.waiting = []
        return None
