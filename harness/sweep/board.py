"""What a person sees of a sweep while it runs, and what its process exits with.

Read from the jobs' own files alone, so it holds for every launcher and for jobs of another launch as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UserError
from harness.run_files.run_dir import JOB_FILE, now
from harness.sweep.identity import find_job
from harness.sweep.job import REFUSED_FILE
from harness.sweep.states import DIED, DONE, FAILED, RUNNING, STOPPED, WAITING, JobState, read_state
from harness.tracking.jsonl import read_rows

_POLL_S = 1.0
_ORDER = (DONE, RUNNING, FAILED, DIED, STOPPED, WAITING)
_MOST_LINES = 40  # of the table at the end; beyond, done jobs are left out


@dataclass
class _Line:
    """One job: its own words, its identity where it is known, its directory once it has one."""

    label: str
    sha256: str | None
    path: Path | None = None
    state: JobState = field(default_factory=lambda: read_state(None))


class Board:
    """The jobs of one launch of the sweep in `folder`.

    `labels`: what to call each job, by its identity. Without them, where a sweeper finds its jobs as it goes,
    those are listed that have a directory.
    """

    def __init__(self, folder: Path, labels: dict[str, str] | None) -> None:
        self.folder, self.started = folder, now()
        self._lines: list[_Line] | None = None
        if labels is not None:
            self._lines = [_Line(label, sha256) for sha256, label in labels.items()]

    def look(self, *, anew: bool = False) -> list[_Line]:
        """Every job as it is now.

        One that was done is read once more only `anew`: its launch may have found that it no longer fits.
        """
        lines = self._lines if self._lines is not None else _found(self.folder)
        hashes = _hashes(self.folder)
        for line in lines:
            if line.path is None and line.sha256 is not None and line.sha256.startswith(hashes):
                line.path = find_job(self.folder, line.sha256)
            if (anew or line.state.state != DONE) and (line.path is not None or line.sha256 is not None):
                line.state = read_state(line.path)
        return lines

    def counts(self, lines: list[_Line], *, over: bool = False) -> str:
        """All jobs in a line: `sweep lr: 3 of 12 done, 1 running, 8 waiting`.

        Until the launch is `over`, what ended badly before it waits to be tried again.
        """
        counts = Counter(line.state.state if over or self._is_of_now(line) else WAITING for line in lines)
        rest = [f"{counts[word]} {word}" for word in _ORDER[1:] if counts[word]]
        return ", ".join([f"sweep {self.folder.name}: {counts[DONE]} of {len(lines)} done", *rest])

    def table(self, lines: list[_Line]) -> str:
        """A line for each job, and their counts; of a large sweep only those that are not done."""
        is_large = len(lines) > _MOST_LINES
        shown = [(i, line) for i, line in enumerate(lines) if not (is_large and line.state.state == DONE)]
        width = max((len(line.label) for _, line in shown), default=0)
        rows = [f"  #{i:<4} {line.label:<{width}}  {_in_words(line.state)}" for i, line in shown]
        return "\n".join([*rows, self.counts(lines, over=True)])

    def exit_code(self, lines: list[_Line]) -> int:
        """0: all are done; 1: one has failed; 75: one is not finished, here or in another launch.

        What a sweeper looked for in an earlier launch does not count.
        """
        has_grid = self._lines is not None
        states = {line.state.state for line in lines if has_grid or self._is_of_now(line)}
        if states <= {DONE}:
            return EXIT_DONE
        return EXIT_FAILED if states & {FAILED, DIED} else EXIT_STOPPED

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Print a line when a job has ended, whichever process it is in."""
        over = threading.Event()
        known = {line.label for line in self.look() if self._has_ended(line)}
        thread = threading.Thread(target=self._watch, args=(over, known), name="sweep", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event, known: set[str]) -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(_POLL_S)
            lines = self.look()
            for line in lines:
                if self._has_ended(line) and line.label not in known:
                    known.add(line.label)
                    print(f"{self.counts(lines)} | {line.label}: {_in_words(line.state)}", flush=True)

    def _has_ended(self, line: _Line) -> bool:
        return line.state.has_ended and self._is_of_now(line)

    def _is_of_now(self, line: _Line) -> bool:
        """Whether the state is no leaving of an earlier launch."""
        return line.state.state in (DONE, RUNNING) or line.state.started >= self.started


def _hashes(folder: Path) -> tuple[str, ...]:
    """What the names in the sweep's folder end with: one listing for all jobs that have no directory yet."""
    try:
        return tuple({name.rpartition("-")[2] for name in os.listdir(folder)} - {""})
    except OSError:
        return ()


def _found(folder: Path) -> list[_Line]:
    """The jobs that have a directory, in the order of their names."""
    lines = []
    for file in sorted(folder.glob(f"*/{JOB_FILE}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            words = json.loads(file.read_bytes())["words"]
            lines.append(_Line(" ".join(map(str, words)) or file.parent.name, None, file.parent))
    with contextlib.suppress(OSError, UserError):
        for row in read_rows(folder / REFUSED_FILE):
            state = JobState(FAILED, 0, 0, f"user: {row['error']}", row["time"])
            lines.append(_Line(" ".join(row["words"]), None, state=state))
    return lines


def _in_words(state: JobState) -> str:
    text = state.state
    if state.step:
        text += f" at step {state.step}"
    if state.resumed_from:
        text += f", resumed from {state.resumed_from}"
    return f"{text}: {state.reason}" if state.reason else text
