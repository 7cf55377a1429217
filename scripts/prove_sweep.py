"""Kills, stops, doubles and breaks sweeps, gives the same command again, and compares every job.

    python scripts/prove_sweep.py [--quick] [--trials killed,grown] [--folder /tmp]

A tiny grid of loader.stride and seed is swept once undisturbed. Then, each in a folder of its own:

    killed   SIGKILL at random moments, to the process and to its group; the same command until exit code 0
    grown    the overrides of a done sweep in another order, a default spelt out, one value more
    at once  two launches of one sweep at the same time
    joblib   two jobs at a time by Hydra's joblib launcher, and SIGTERM to its parent
    stopped  SIGTERM at a random moment: 75; the same command until exit code 0
    plan     sweep.py plan, and run --index in random order, three at a time, one SIGKILLed and repeated
    failing  a job that is impossible, one that raises in its middle, one that diverges; the same command
             after their causes were mended

Every job must come, bit for bit, to what it came to undisturbed (weights, optimizer, random state, rows, data
chain), no done job may be touched (the contents and times of all its files), and a killed one repeats one
interval at most, or two where a save was under way. Prints a line for each trial; exit code 1 with what
differs. Linux only; four minutes on 2 cores, with --quick less than three.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from parts import failing_jobs  # noqa: E402
from parts.killed_runs import Attempt, Straight  # noqa: E402
from parts.killing import left_behind, was_killed  # noqa: E402
from parts.swept_jobs import Sweep, check_went_on, common_words, look, make_set  # noqa: E402

_GRID = ("loader.stride=8,16", "seed=0,1")
_GROWN = ("loader.stride=8,16,12", "seed=0,1")
_JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


@dataclass
class Course:
    """Where the trials are, what came of the undisturbed sweep, and how many lines of steps a job says."""

    folder: Path
    chance: random.Random
    kills: int
    straight: dict[str, Straight]
    lines: int

    def sweep(self, name: str, *words: str) -> Sweep:
        return Sweep(self.folder / name, [*common_words(self.folder / "data" / "set"), *words])

    def of(self, sweep: Sweep) -> dict[str, Straight]:
        """The undisturbed results of the smaller grid."""
        return {sha256: self.straight[sha256] for sha256 in sweep.jobs() if sha256 in self.straight}

    def at_random(self, attempt: Attempt, jobs: int) -> bool:
        """Wait for a random moment in the first half of `jobs` jobs; False where it ended before."""
        if not attempt.logs_more_than(self.chance.randrange(max(1, self.lines * jobs // 2))):
            return False
        time.sleep(self.chance.random() * 0.1)
        return attempt.process.poll() is None


def begin(folder: Path, options: argparse.Namespace) -> Course:
    """Prepare the data, and sweep the grown grid undisturbed."""
    make_set(folder / "data", texts=12)
    course = Course(folder, random.Random(options.seed), 1 if options.quick else 3, {}, 0)
    sweep = course.sweep("straight", *_GROWN)
    attempt = sweep.start()
    sweep.ended(attempt, 0)
    if sweep.wrong or len(sweep.jobs()) != 6:
        raise SystemExit("the undisturbed sweep: " + "\n".join([*sweep.wrong, f"{len(sweep.jobs())} jobs"]))
    course.straight, course.lines = sweep.results(), len(attempt.steps()) // 6
    return course


def check_end(course: Course, sweep: Sweep, jobs: int = 4, interrupted: Counter[str] | None = None) -> None:
    """All `jobs` are there, with the undisturbed results, begun no more often than they had to."""
    if len(sweep.jobs()) != jobs:
        sweep.wrong.append(f"{len(sweep.jobs())} jobs, not {jobs}")
    sweep.check_starts(interrupted)
    sweep.check_results(course.of(sweep))


def interrupted(
    course: Course, sweep: Sweep, end: Callable[[Attempt, int], bool], times: int, *more: str
) -> str:
    """Start the command and `end` it `times` times, then let it finish; what is left is checked each time."""
    begun, ends = Counter[str](), 0
    left = look(sweep)
    for number in range(times):
        attempt = sweep.start(*more)
        if not (course.at_random(attempt, 4 - len(left.done)) and end(attempt, number)):
            sweep.ended(attempt, 0)
            break
        ends += 1
        check_went_on(sweep, left)
        left = look(sweep)
        begun.update(left.half_done.keys())
    sweep.ends(0, *more)
    check_went_on(sweep, left)
    check_end(course, sweep, interrupted=begun)
    if not ends:
        sweep.wrong.append("it ended each time before it was interrupted")
    return f"interruptions: {ends}, half-done jobs: {begun.total()}, done before the last: {len(left.done)}"


def trial_killed(course: Course) -> tuple[Sweep, str]:
    sweep = course.sweep("killed", *_GRID)

    def kill(attempt: Attempt, number: int) -> bool:
        return was_killed(attempt.kill(whole_group=number % 3 == 1))

    return sweep, interrupted(course, sweep, kill, 3 * course.kills)


def trial_stopped(course: Course) -> tuple[Sweep, str]:
    sweep = course.sweep("stopped", *_GRID)
    return sweep, interrupted(course, sweep, stopping(sweep), course.kills)


def stopping(sweep: Sweep) -> Callable[[Attempt, int], bool]:
    def stop(attempt: Attempt, number: int) -> bool:
        attempt.process.send_signal(signal.SIGTERM)
        sweep.ended(attempt, 75)
        if left := left_behind(attempt.process.pid):
            sweep.wrong.append(f"processes were left behind: {left}")
        return True

    return stop


def trial_grown(course: Course) -> tuple[Sweep, str]:
    """What was done in a folder stays; only the jobs of the new value are trained."""
    sweep = course.sweep("grown", *_GRID)
    sweep.ends(0)
    before = sweep.done()
    stride, seed = _GROWN
    sweep.words = [seed, "trainer.grad_clip=1.0", *reversed(sweep.words[:-2]), stride]
    sweep.ends(0)
    sweep.check_untouched(before)
    check_end(course, sweep, jobs=6)
    return sweep, f"{len(before)} jobs done before, {len(sweep.jobs())} then"


def trial_at_once(course: Course) -> tuple[Sweep, str]:
    sweep = course.sweep("at-once", *_GROWN)
    attempts = [sweep.start(), sweep.start()]
    said = [sweep.ended(attempt, 0, 75) for attempt in attempts]
    check_end(course, sweep, jobs=6)
    before = sweep.done()
    sweep.ends(0)
    sweep.check_untouched(before)
    codes = " and ".join(str(attempt.process.returncode) for attempt in attempts)
    shares = " and ".join(str(words.count("\ntrains ")) for words in said)
    return sweep, f"{shares} jobs trained, exit codes {codes}"


def trial_joblib(course: Course) -> tuple[Sweep, str]:
    sweep = course.sweep("joblib", *_GRID)
    if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        return sweep, "skipped, hydra-joblib-launcher is not installed"
    said = interrupted(course, sweep, stopping(sweep), course.kills, *_JOBLIB)
    whole = course.sweep("joblib-whole", *_GRID)
    attempt = whole.start(*_JOBLIB)
    whole.ended(attempt, 0)
    if left := left_behind(attempt.process.pid):
        whole.wrong.append(f"processes were left behind: {left}")
    check_end(course, whole)
    sweep.wrong += whole.wrong
    return sweep, f"once undisturbed; {said}"


def trial_plan(course: Course) -> tuple[Sweep, str]:
    sweep = course.sweep("plan", *_GROWN)
    sweep.ended(sweep.command("scripts/sweep.py", "plan", *sweep.words), 0)
    waiting = course.chance.sample(range(6), 6)
    running: dict[int, Attempt] = {}
    killed: Counter[str] = Counter()
    victim = waiting[0]
    while waiting or running:
        while waiting and len(running) < 3:
            index = waiting.pop(0)
            running[index] = sweep.command("scripts/sweep.py", "run", "sweep.jsonl", "--index", str(index))
        index, attempt = next(iter(running.items()))
        if index == victim and attempt.logs_more_than(0) and was_killed(attempt.kill(whole_group=False)):
            victim = -1
            waiting.append(index)
        else:
            sweep.ended(attempt, 0)
        del running[index]
    killed.update(sha256 for sha256, count in sweep.starts().items() if count == 2)
    if victim != -1 or killed.total() != 1:
        sweep.wrong.append(f"{killed.total()} jobs were begun twice, one was to be killed")
    sweep.ended(sweep.command("scripts/report.py", str(sweep.folder)), 0)
    check_end(course, sweep, jobs=6, interrupted=killed)
    return sweep, "6 jobs by their numbers, one of them twice"


def trial_failing(course: Course) -> tuple[Sweep, str]:
    return failing_jobs.trial(course.folder / "failing")


TRIALS: dict[str, Callable[[Course], tuple[Sweep, str]]] = {
    "killed": trial_killed,
    "grown": trial_grown,
    "at once": trial_at_once,
    "joblib": trial_joblib,
    "stopped": trial_stopped,
    "plan": trial_plan,
    "failing": trial_failing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the kills and stops")
    parser.add_argument("--trials", default=",".join(TRIALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    names = options.trials.split(",")
    if unknown := set(names) - set(TRIALS):
        parser.error(f"--trials: {', '.join(sorted(unknown))} is none of {', '.join(TRIALS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="prove-sweep-", dir=options.folder) as folder:
        os.environ["WANDB_MODE"] = "offline"
        course = begin(Path(folder).resolve(), options)
        print("| sweep | what was done | wrong |\n|---|---|---|", flush=True)
        for name in names:
            sweep, said = TRIALS[name](course)
            print(f"| {name} | {said} | {len(sweep.wrong)} |", flush=True)
            wrong += [f"{name}: {what}" for what in sweep.wrong]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
