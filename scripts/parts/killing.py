"""Killing a process at a chosen system call, for the proofs that a kill loses nothing. Linux only."""

from __future__ import annotations

import signal
import time
from pathlib import Path

# What is named in tables -> the system calls that strace (Debian's package strace) calls so.
CALLS = {
    "fsync": "fsync,fdatasync",
    "rename": "rename,renameat,renameat2",
    "removal": "unlink,unlinkat,rmdir",
}
# The shell's process becomes strace, and under -D the one that is traced: so its number is known before it
# begins, and can stand in a path.
_SHELL = 'path=$(printf %s "$1" | sed "s/@PID@/$$/"); shift; exec strace -D ${path:+-P "$path"} "$@"'


def killed_at(call: str, number: int, command: list[str], path: str = "") -> list[str]:
    """`command`, killed as one of its threads enters its `number`-th system call `call`, before it acts.

    `call` may name several, with commas; each is counted for itself. `path`: only calls that name this
    file, or a descriptor of it, count; `@PID@` in it is the process's own number. The process that is
    started is the one that is killed.
    """
    inject = f"inject={call}:signal=KILL:when={number}"
    return _strace(path, ["-o", "/dev/null", "-e", f"trace={call}", "-e", inject], command)


def traced(command: list[str], output: str, calls: str) -> list[str]:
    """`command`, with a line in the file `output` for each of these system calls, descriptors as paths."""
    return _strace("", ["-y", "-s", "64", "-o", output, "-e", f"trace={calls}"], command)


def _strace(path: str, options: list[str], command: list[str]) -> list[str]:
    return ["sh", "-c", _SHELL, "sh", path, "-f", *options, *command]


def was_killed(returncode: int | None) -> bool:
    return returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)


def left_behind(session: int) -> list[str]:
    """What still lives of a process's session half a second after its end."""
    time.sleep(0.5)
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if rest.split()[3] == str(session) and rest.split()[0] != "Z":
            found.append(name.partition("(")[2])
    return found
