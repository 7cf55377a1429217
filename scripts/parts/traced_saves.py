"""The system calls of one save, read from a trace, each as a moment to kill at."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from parts.killing import CALLS

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
_HERE = re.compile(r"AT_FDCWD<[^>]*>")
_PATH = re.compile(r'"(/[^"]*)"|<(/[^>]*)>')
_KINDS = {name: kind for kind, calls in CALLS.items() for name in calls.split(",")}
TRACED = ",".join(["write", *_KINDS])


@dataclass(frozen=True)
class Call:
    """The `number`-th call of this name on this path by one thread.

    The path is below the run directory. `@NEW@` in it stands for the step that is saved, `@OLD@` for the one
    that is removed after it, `@PID@` for the process.
    """

    name: str
    path: str
    number: int

    @property
    def kind(self) -> str:
        return _KINDS[self.name]

    def path_in(self, run_dir: Path, new: int, old: int) -> str:
        """The path where step `new` of a run is saved, and `old` is the oldest that goes."""
        path = self.path.replace("@NEW@", f"{new:08d}").replace("@OLD@", f"{old:08d}")
        return str(run_dir / path)


def read_trace(path: Path, pid: int) -> str:
    """The trace of process `pid`, which has ended; strace may still be writing the last of it."""
    deadline = time.monotonic() + 30
    end = re.compile(rf"^{pid} +\+\+\+", re.MULTILINE)
    while not end.search(trace := path.read_text()):
        if time.monotonic() > deadline:
            raise SystemExit(f"strace did not write the end of {path}")
        time.sleep(0.01)
    return trace


def calls_of_save(trace: str, run_dir: Path, new: int, old: int) -> list[Call]:
    """What a process did in `run_dir` from the row of step `new` until the next step is saved.

    That is the save of `new`, and the removal of `old`. The loop goes on meanwhile: what its thread does
    after the next row belongs to the next save.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    calls: list[Call] = []
    loop, has_begun, is_over = "", False, False
    pid = trace.split(maxsplit=1)[0]
    for line in trace.splitlines():
        match = _LINE.match(line)
        where = _path(match[3]) if match else ""
        if match is None or not where:
            continue
        thread, name, words = match.groups()
        if name == "write" and where == f"{run_dir}/metrics.jsonl":
            loop = thread
            has_begun = has_begun or _row(new) in words
            is_over = is_over or _row(new + 1) in words
        if f"step-{new + 1:08d}" in where:
            break
        if name not in _KINDS:
            continue
        counts[thread, name, where] += 1
        if has_begun and not (is_over and thread == loop) and Path(where).is_relative_to(run_dir):
            below = str(Path(where).relative_to(run_dir))
            calls.append(Call(name, _with_marks(below, new, old, pid), counts[thread, name, where]))
    return list(dict.fromkeys(calls))


def _path(words: str) -> str:
    """The first path among a call's arguments, which is the one that `strace -P` looks at."""
    path = _PATH.search(_HERE.sub("", words))
    return (path[1] or path[2]) if path else ""


def _row(step: int) -> str:
    return f'{{\\"step\\": {step},'


def _with_marks(path: str, new: int, old: int, pid: str) -> str:
    path = path.replace(f"step-{new:08d}", "step-@NEW@").replace(f"step-{old:08d}", "step-@OLD@")
    return path.replace(f".{pid}.", ".@PID@.")
