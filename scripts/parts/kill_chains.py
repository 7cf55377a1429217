"""Run directories that are killed again and again until their run has ended, and what was found."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from parts.killed_runs import KEEP_LAST, Attempt, Course, Left, Straight, differences, look, oldest_to_go


@dataclass
class Tally:
    """What was found after the kills of one kind."""

    kills: int = 0
    in_a_save: int = 0
    lost: Counter[int] = field(default_factory=Counter)
    doing: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self, left: Left) -> None:
        self.kills += 1
        self.in_a_save += left.is_saving
        self.lost[left.lost] += 1
        self.doing[left.doing] += 1

    def row(self, name: str) -> str:
        lost = ", ".join(f"{steps}: {count}" for steps, count in sorted(self.lost.items()))
        return f"| {name} | {self.kills} | {self.in_a_save} | {lost} | {self.ended} | {len(self.wrong)} |"


class Chain:
    """One run directory after another, each killed until it has ended, and compared then."""

    def __init__(self, course: Course, folder: Path, straight: Straight, tally: Tally) -> None:
        self.course, self.straight, self.tally = course, straight, tally
        self._folder, self._number = folder, 0
        self._begin()

    def _begin(self) -> None:
        self._number += 1
        self.run_dir = self._folder / f"run-{self._number}"
        self.newest = 0

    def attempt(self, wrapped: list[str] | None = None) -> Attempt:
        """Start the command, or what it is wrapped in."""
        return Attempt(wrapped or self.course.command(self.run_dir), self.course.folder / "output.txt")

    def killed(self, attempt: Attempt, full_disk: bool = False, counts: bool = True) -> None:
        """A process that was killed: what it left is checked, and counted."""
        self._check_beginning(attempt)
        left = look(self.run_dir, self.straight, self.newest)
        if counts:
            self.tally.count(left)
        print(f"  step {left.logged} logged, {left.newest} saved, killed: {left.doing}", file=sys.stderr)
        for fault in left.faults:
            self.wrong(f"killed while {left.doing}: {fault}")
        if not full_disk and left.lost > self.course.most_lost:
            self.wrong(f"killed while {left.doing}: step {left.logged} logged, {left.newest} is the newest")
        if left.newest < max([self.newest, *attempt.saved()]):
            self.wrong(f"killed while {left.doing}: step {left.newest} is the newest, a later one was saved")
        self.newest = left.newest

    def ended(self, attempt: Attempt) -> None:
        """A process that was not killed: the run is compared, and the next begins in a new directory."""
        self._check_beginning(attempt)
        code = attempt.wait()
        if code != 0:
            self.wrong(f"ended with exit code {code}: {attempt.said()[-2000:]}")
        else:
            for difference in differences(self.run_dir, self.straight):
                self.wrong(f"at the end: {difference}")
            self.tally.ended += 1
            print(f"  run {self._number} has ended and was compared", file=sys.stderr)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self._begin()

    def finish(self) -> None:
        """Let the run get to its end."""
        self.ended(self.attempt())

    def go_to_save(self) -> tuple[int, int]:
        """Have so many steps saved that the next save, which is not the last, removes one; both steps."""
        if self.newest + 2 > self.course.steps:
            self.finish()
        if self.newest < KEEP_LAST:
            attempt = self.attempt()
            attempt.saves(KEEP_LAST)
            attempt.kill(whole_group=True)
            self.killed(attempt, counts=False)
        return self.newest + 1, oldest_to_go(self.run_dir)

    def wrong(self, what: str) -> None:
        print(f"  wrong: {what}", file=sys.stderr)
        self.tally.wrong.append(f"run {self._number}: {what}")

    def _check_beginning(self, attempt: Attempt) -> None:
        if attempt.steps() and attempt.began_at() != self.newest:
            self.wrong(f"went on from step {attempt.began_at()}, the newest complete one was {self.newest}")
