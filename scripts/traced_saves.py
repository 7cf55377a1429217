"""The system calls of one save, read from a trace, each as a moment to kill at."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from killing import CALLS

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
_HERE = re.compile(r"AT_FDCWD<[^>]*>")
_PATH = re.compile(r'"(/[^"]*)"|<(/[^>]*)>')
_KINDS = {name: kind for kind, calls in CALLS.items() for name in calls.split(",")}
TRACED = ",".join(["write", *_KINDS])


@dataclass(frozen=True)
class Call:
    """The `number`-th call of this name on this path by one thread.

    In the path `@NEW@` stands for the step that is saved, `@OLD@` for the one two before it, and `@PID@` for
    the process.
    """

    name: str
    path: str
    number: int

    @property
    def kind(self) -> str:
        return _KINDS[self.name]

    def path_at(self, step: int) -> str:
        """The path where `step` is the one that is saved."""
        return self.path.replace("@NEW@", f"{step:08d}").replace("@OLD@", f"{step - 2:08d}")


def read_trace(path: Path, pid: int) -> str:
    """The trace of process `pid`, which has ended; strace may still be writing the last of it."""
    deadline = time.monotonic() + 30
    while f"{pid} +++" not in (trace := path.read_text()):
        if time.monotonic() > deadline:
            raise SystemExit(f"strace did not write the end of {path}")
        time.sleep(0.01)
    return trace


def calls_of_save(trace: str, run_dir: Path, step: int) -> list[Call]:
    """What a process did in `run_dir` from the row of `step` until the next step is saved.

    That is the save of `step`, and what clears up after it. The loop goes on meanwhile: what its thread does
    after the next row belongs to the next save.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    calls: list[Call] = []
    loop, has_begun, is_over = "", False, False
    pid = trace.split(maxsplit=1)[0]
    for line in trace.splitlines():
        match = _LINE.match(line)
        where = _path(match[2], match[3]) if match else ""
        if match is None or not where:
            continue
        thread, name, words = match.groups()
        if name == "write" and where == f"{run_dir}/metrics.jsonl":
            loop = thread
            has_begun = has_begun or _row(step) in words
            is_over = is_over or _row(step + 1) in words
        if f"step-{step + 1:08d}" in where:
            break
        if name not in _KINDS:
            continue
        counts[thread, name, where] += 1
        if has_begun and not (is_over and thread == loop) and where.startswith(str(run_dir)):
            calls.append(Call(name, _with_marks(where, step, pid), counts[thread, name, where]))
    return calls


def _path(name: str, words: str) -> str:
    """The file that a call is about; of a renaming the new name, as the old one may be a random one."""
    paths = [quoted or opened for quoted, opened in _PATH.findall(_HERE.sub("", words))]
    return (paths[-1] if name.startswith("rename") else paths[0]) if paths else ""


def _row(step: int) -> str:
    return f'{{\\"step\\": {step},'


def _with_marks(path: str, step: int, pid: str) -> str:
    path = path.replace(f"step-{step:08d}", "step-@NEW@").replace(f"step-{step - 2:08d}", "step-@OLD@")
    return path.replace(f".{pid}.", ".@PID@.")
