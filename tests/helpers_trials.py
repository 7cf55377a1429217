"""One trial of exact resume: a run that is stopped on its way, against one that never was.

A stop is a real SIGTERM to this process, so that the loop saves and ends as it would under a scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from harness.checkpoints import checkpoint
from harness.config import TrainConfig, set_directory
from harness.errors import EXIT_STOPPED
from harness.launch import Outcome
from harness.loaders import make_loader
from harness.storage import open_split
from tests.helpers_exact import Evidence, Stop, evidence, first_difference
from tests.helpers_matrix import Sets
from tests.helpers_runs import rows, run
from tests.helpers_wrongs import tamper

# Where the stop comes: after which step, E steps being an epoch.
PLACES: dict[str, Callable[[int], int]] = {
    "first step": lambda epoch: 1,
    "mid-epoch": lambda epoch: epoch // 2,
    "one before the end": lambda epoch: epoch - 1,
    "epoch's end": lambda epoch: epoch,
    "one after it": lambda epoch: epoch + 1,
    "third epoch": lambda epoch: 2 * epoch + 2,
}
_TAIL = 7  # steps of the third epoch: four stops in a row from its second step on leave some to train


class Wrong(Exception):
    """A part of a trial did not even stop or end where it should; the words are for the table."""


@dataclasses.dataclass
class Course:
    """A storage, a loader and settings: the run that all trials of them are held against."""

    sets: Sets
    storage: str
    loader: str
    folder: Path
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.sets.config(self.storage, self.loader)
        with (
            contextlib.closing(open_split(set_directory(config), "train")) as store,
            contextlib.closing(make_loader(config.loader, store)) as loader,
        ):
            self.epoch = loader.batches_per_epoch
        assert self.epoch >= 4, self.epoch
        self.steps = 2 * self.epoch + _TAIL
        self.folder.mkdir(parents=True, exist_ok=True)
        self.straight = self._straight()

    def config(self, **changes: Any) -> TrainConfig:
        settings = {
            "trainer__max_steps": self.steps,
            "schedule__total_steps": self.steps,
            "optimizer__lr": 0.03,  # so large that the last step is not the best one
            "evaluation__interval": self.epoch,
            "checkpoint__interval": 1000,
            **self.settings,
            **changes,
        }
        return self.sets.config(self.storage, self.loader, **settings)

    def _straight(self) -> Evidence:
        self.go(self.folder / "straight")
        return evidence(self.folder / "straight")

    def go(self, path: Path, stop: Stop | None = None, **changes: Any) -> Outcome:
        """Start or go on in `path` until `stop`, or to the end.

        A run takes every signal as its own: one that `stop` has not sent was meant for all of us.
        """
        goes_on = {"resume": str(path)} if checkpoint.complete_steps(path) else {}
        config = self.config(**{**goes_on, **changes})
        try:
            with contextlib.nullcontext() if stop is None else stop.watching():
                outcome = run(config, path)
        except SystemExit as ended:  # before the loop, where nothing has to be saved
            if ended.code != EXIT_STOPPED:
                raise
            outcome = Outcome(path, max(checkpoint.complete_steps(path), default=0), None, stopped=True)
        sent = stop is not None and stop.sent
        if outcome.stopped and not sent:
            raise KeyboardInterrupt
        if stop is not None and not sent:
            raise Wrong(f"no line '{stop.words}' to stop at")
        return outcome

    def stopped(self, path: Path, step: int, stop: Stop | None = None, **changes: Any) -> None:
        """`go` to a stop that has to be after `step`."""
        outcome = self.go(path, stop or Stop.after(step), **changes)
        if (outcome.step, outcome.stopped) != (step, True):
            raise Wrong(f"a stop after step {step} ended at {outcome.step}, stopped: {outcome.stopped}")

    def finished(self, path: Path, *before: dict[str, Any], looks: bool = True, **changes: Any) -> str | None:
        """`go` to the end; the first difference from the straight run, in words."""
        outcome = self.go(path, **changes)
        if (outcome.step, outcome.stopped) != (self.steps, False):
            raise Wrong(f"the last resume ended at step {outcome.step}, stopped: {outcome.stopped}")
        found = first_difference(self.straight, evidence(path, *before), looks=looks)
        return None if found is None else str(found)


# Runs a trial in a folder, with the first stop after a step; the first difference in words.
Way = Callable[[Course, Path, int], str | None]


def one_resume(course: Course, path: Path, step: int) -> str | None:
    """The signal comes in the middle of the step."""
    course.stopped(path, step, Stop.during(step))
    return course.finished(path)


def four_resumes(course: Course, path: Path, step: int) -> str | None:
    """Stopped after `step` and after each of the next three, by one command that is given again and again."""
    for later in range(4):
        course.stopped(path, step + later, resume="auto")
    return course.finished(path, resume="auto")


def stop_at_once(course: Course, path: Path, step: int) -> str | None:
    """Resumed twice without a step before the resume that trains."""
    course.stopped(path, step)
    for _ in range(2):
        course.stopped(path, step, Stop.restored())
    return course.finished(path)


def saved_again(course: Course, path: Path, step: int) -> str | None:
    """What was restored is saved again without a step, into a branch, and the branch trained to the end."""
    course.stopped(path, step)
    branch = path.with_name(f"{path.name}-branch")
    due = {"evaluation__interval": step}
    course.stopped(branch, step, Stop.before_a_step(), resume=str(checkpoint.find(path)), **due)
    return course.finished(branch, *rows(path))


def evaluated_late(course: Course, path: Path, step: int) -> str | None:
    """The best step is saved without its evaluation, which is made at a resume that ends right after it.

    The checkpoint, which stays as it is, does not know what came of it.
    """
    best = course.straight.state["trainer"]["best_step"]
    assert best < course.steps
    course.stopped(path, best)
    course.stopped(path, best, Stop.sampling(best, course.steps))
    return course.finished(path)


WAYS: dict[str, Way] = {
    "one resume": one_resume,
    "four resumes": four_resumes,
    "stopped at once": stop_at_once,
    "saved again": saved_again,
}


def one_stop_at(make: Callable[[Course], Stop]) -> Way:
    """One resume after a stop that has a moment of its own, and is not held to a step."""

    def way(course: Course, path: Path, step: int) -> str | None:
        course.go(path, make(course))
        return course.finished(path)

    return way


# In a course of `LOOKED_AT`: mostly while it is evaluated or draws a sample.
LOOKED_AT = {"evaluation__interval": 1, "checkpoint__interval": 2}
MOMENTS: dict[str, Way] = {
    "evaluating": one_stop_at(lambda course: Stop.evaluating(course.epoch // 2)),
    "evaluating at an epoch's end": one_stop_at(lambda course: Stop.evaluating(course.epoch)),
    "evaluating at the last step": one_stop_at(lambda course: Stop.evaluating(course.steps)),
    "sampling": one_stop_at(lambda course: Stop.sampling(course.epoch // 2, course.steps)),
    "sampling at the last step": one_stop_at(lambda course: Stop.sampling(course.steps, course.steps)),
    "before the last evaluation": one_stop_at(lambda course: Stop.after(course.steps)),
    "evaluated late": evaluated_late,
    "an epoch begins": one_stop_at(lambda course: Stop("epoch 1 begins")),
    "a checkpoint is saved": one_stop_at(lambda course: Stop("saved ")),
}


def free_keys_changed(course: Course, path: Path, step: int) -> str | None:
    """Every resume has other cadences, and another way to read the same files or to save."""
    course.stopped(path, step, loader__prefetch=0, evaluation__interval=1, checkpoint__interval=1)
    course.stopped(path, step + 1, loader__prefetch=8, evaluation__interval=1000, data__mmap=False)
    course.stopped(path, step + 2, evaluation__sample_tokens=0, checkpoint__background=False)
    return course.finished(path, looks=False, trainer__log_batch_hash=False, trainer__log_interval=3)


def moved(course: Course, path: Path, step: int) -> str | None:
    """The data lies somewhere else at the resume, and the command is given in another folder."""
    course.stopped(path, step)
    old, new = course.sets.root, course.folder / "trial-data"
    os.rename(old, new)
    try:
        with contextlib.chdir(course.folder):
            return course.finished(path, data__root=str(new))
    finally:
        os.rename(new, old)


FREE: dict[str, Way] = {"free keys": free_keys_changed, "moved data": moved}

# Courses of their own: settings that are the same in the straight run and in the resumed one.
SETTINGS: dict[str, tuple[dict[str, Any], Way]] = {
    "micro-batches": ({"trainer__micro_batch_size": 3}, four_resumes),
    "deterministic": ({"deterministic": True}, one_resume),
}


@contextlib.contextmanager
def own_determinism() -> Iterator[None]:
    """A context after which torch's algorithms are chosen as before; a run only ever turns them on."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def wrong_resume(name: str) -> Way:
    """One resume, from a checkpoint that is made wrong."""

    def way(course: Course, path: Path, step: int) -> str | None:
        stopped = course.folder / "stopped"  # once for all of them
        if not stopped.exists():
            course.stopped(stopped, step)
        shutil.copytree(stopped, path)
        tamper(checkpoint.find(path), name)
        return course.finished(path)

    return way


def trial(course: Course, way: Way, step: int) -> str | None:
    """The first difference from the straight run, in words, or None; leaves nothing in the folder."""
    path = course.folder / "trial"
    try:
        return way(course, path, step)
    except Wrong as wrong:
        return str(wrong)
    finally:
        for folder in course.folder.glob("trial*"):
            shutil.rmtree(folder)
