"""Which process this is, said so that another one can tell whether it still lives."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Process:
    """A process of some machine; None where the system does not say it.

    `start` is when it began, in the kernel's ticks since the machine did: a pid is given out again.
    `boot_id` is the machine's last start, `pid_namespace` the container whose pids these are.
    """

    pid: int
    host: str
    start: int | None
    boot_id: str | None
    pid_namespace: str | None

    @property
    def is_gone(self) -> bool | None:
        """Whether it has ended; None where that cannot be told from here."""
        ours = this_process()
        if dataclasses.replace(ours, pid=self.pid, start=self.start) != self:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # somebody else's, and alive
        stat = _stat(self.pid)
        if stat is None or self.start is None:
            return None
        return not stat.is_running or stat.start != self.start


def this_process() -> Process:
    pid = os.getpid()
    stat = _stat(pid)
    return Process(
        pid=pid,
        host=socket.gethostname(),
        start=None if stat is None else stat.start,
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
    )


def process_of(values: Any) -> Process | None:
    """The process that a record of `dataclasses.asdict` names, or None where it names none."""
    try:
        process = Process(**{field.name: values[field.name] for field in dataclasses.fields(Process)})
    except (KeyError, TypeError):
        return None
    texts = (process.host, process.boot_id or "", process.pid_namespace or "")
    numbers = (process.pid, process.start or 0)
    if not all(type(text) is str and text.isprintable() for text in texts):
        return None
    if not all(type(number) is int for number in numbers):
        return None
    return process if 0 < process.pid < 2**31 else None


def descendants(pid: int) -> set[int]:
    """The living processes that `pid` started, and those that they started; empty without /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for other in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if (stat := _stat(other)) is not None and stat.is_running:
                children.setdefault(stat.parent, []).append(other)
    found: set[int] = set()
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found.update(new)
    return found


def is_running(pid: int) -> bool:
    """Whether /proc shows a process of this pid that has not ended."""
    stat = _stat(pid)
    return stat is not None and stat.is_running


def command_of(pid: int) -> str:
    """The words of a process, each ended by a zero byte; empty where it is gone."""
    return _text(f"/proc/{pid}/cmdline") or ""


class _Stat(NamedTuple):
    state: str
    parent: int
    start: int

    @property
    def is_running(self) -> bool:
        return self.state not in "ZX"


def _stat(pid: int) -> _Stat | None:
    """What /proc says of a process; None where it shows none."""
    text = _text(f"/proc/{pid}/stat")
    if text is None:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return _Stat(fields[0], int(fields[1]), int(fields[19]))


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
