"""What a person sees of a sweep while it runs, and what its process exits with."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from harness.sweep.grid import Job
from harness.sweep.identity import JOB_FILE, find_job
from harness.sweep.states import DIED, DONE, FAILED, RUNNING, STOPPED, WAITING, JobState, read_state

_POLL_S = 1.0
_ORDER = (DONE, RUNNING, FAILED, DIED, STOPPED, WAITING)


class Board:
    """The jobs of one launch of the sweep in `folder`; `jobs` None: whatever is in the folder."""

    def __init__(self, name: str, folder: Path, jobs: list[Job] | None) -> None:
        self.name, self.folder, self.jobs = name, folder, jobs

    def paths(self) -> Sequence[Path | None]:
        """The directory of each job, None where it has none yet."""
        if self.jobs is None:
            return sorted(path.parent for path in self.folder.glob(f"*/{JOB_FILE}"))
        return [find_job(self.folder, job.sha256) for job in self.jobs]

    def states(self) -> list[JobState]:
        return [read_state(path) for path in self.paths()]

    def line(self, states: list[JobState]) -> str:
        """All jobs in a line: `sweep lr: 3 of 12 done, 1 running, 8 waiting`."""
        counts = Counter(state.state for state in states)
        rest = [f"{counts[word]} {word}" for word in _ORDER[1:] if counts[word]]
        return ", ".join([f"sweep {self.name}: {counts[DONE]} of {len(states)} done", *rest])

    def exit_code(self) -> int:
        """0 all are done, 1 one has failed, 75 one is not finished."""
        states = {state.state for state in self.states()}
        if states <= {DONE}:
            return EXIT_DONE
        return EXIT_FAILED if FAILED in states else EXIT_STOPPED

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Print a line whenever a job has ended."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="sweep", daemon=True)
        self._before = self.states()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            print(self.line(self.states()), flush=True)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_POLL_S):
            states = self.states()
            if sum(s.has_ended for s in states) > sum(s.has_ended for s in self._before):
                print(self.line(states), flush=True)
            self._before = states
