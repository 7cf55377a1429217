"""Kills a training run that saves every step, again and again, and checks what each kill left and cost.

    python scripts/prove_kill.py [--random 40] [--every 1] [--full-disk 5] [--synchronous]

Each SIGKILL is followed by exactly the same command, `python train.py ... resume=auto`. Killed at random
moments after a first logged step, the process alone and its whole group in turn; at every fsync, rename and
removal of one save (strace, Debian's package strace, kills the process as it enters the call); and while the
run's output lies on a full tmpfs, which needs the right to mount one.

After each kill, before anything goes on: every checkpoint with an index is whole, `latest` names a complete
one, metrics.jsonl is what the undisturbed run wrote so far, and no more steps are lost than one interval and,
in the background, that of the save under way. The next process must go on from the newest complete step. Each
run that got to its end must equal the undisturbed one bit for bit: weights, optimizer, random state, rows,
each step once, and no file left over.

Prints a table; exit code 1 where anything was wrong. Linux only; 8 minutes on 2 cores, 1 GB
of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from parts.kill_chains import Chain, Tally  # noqa: E402
from parts.killed_runs import KEEP_LAST, MODELS, Attempt, Course, Straight, outcome  # noqa: E402
from parts.killing import CALLS, killed_at, traced, was_killed  # noqa: E402
from parts.traced_saves import TRACED, Call, calls_of_save, read_trace  # noqa: E402

_TRIES = 3
_NO_SPACE = re.compile("no space left", re.IGNORECASE)


def run_undisturbed(course: Course) -> Straight:
    run_dir = course.folder / "straight"
    attempt = Attempt(course.command(run_dir), course.folder / "output.txt")
    attempt.logs_more_than(0)
    began = time.monotonic()
    if attempt.wait() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{attempt.said()}")
    straight = outcome(run_dir, (time.monotonic() - began) / course.steps)
    shutil.rmtree(run_dir)
    return straight


def kill_at_random(chain: Chain, chance: random.Random) -> None:
    """Every second moment is drawn from a save, the others from two steps and their saves."""
    number, step_s = chain.tally.kills, chain.straight.step_s
    attempt = chain.attempt()
    if attempt.logs_more_than(0):
        if number % 2 == 0:
            attempt.wait_until(lambda: any(chain.run_dir.glob("checkpoints/step-*.tmp")))
        time.sleep(chance.uniform(0, 2 * step_s if number % 2 else 0.7 * step_s))
    if was_killed(attempt.kill(whole_group=number % 4 < 2)):
        chain.killed(attempt)
    else:
        chain.ended(attempt)


def kill_at_calls(chain: Chain, every: int, tallies: dict[str, Tally]) -> None:
    """Once at each `every`-th fsync, rename and removal of one save; `tallies` by the kind of call."""
    for call in calls_of_one_save(chain)[::every]:
        chain.tally = tallies[call.kind]
        for _ in range(_TRIES):
            if kill_at_call(chain, call):
                break
        else:
            chain.wrong(f"{call.name} of {call.path} was not made again in {_TRIES} saves")
    chain.finish()


def calls_of_one_save(chain: Chain) -> list[Call]:
    """Trace a process that goes on where the steps that are kept are there, until its first save is over."""
    output = chain.course.folder / "trace.txt"
    new, old = chain.go_to_save()
    attempt = chain.attempt(traced(chain.course.command(chain.run_dir), str(output), TRACED))
    if not attempt.saves(2):
        raise SystemExit(f"strace cannot be used here: {attempt.said()[-500:]}")
    attempt.kill(whole_group=False)  # strace, in the same group, is still to write what it saw
    chain.killed(attempt)
    calls = calls_of_save(read_trace(output, attempt.process.pid), chain.run_dir, new, old)
    if not calls:
        raise SystemExit(f"no call of a save was found in {output}")
    return calls


def kill_at_call(chain: Chain, call: Call) -> bool:
    """Whether the process came to this call in its first save, and was killed there."""
    new, old = chain.go_to_save()
    path = call.path_in(chain.run_dir, new, old)
    attempt = chain.attempt(killed_at(call.name, call.number, chain.course.command(chain.run_dir), path))
    attempt.saves(2)
    hit = was_killed(attempt.process.poll())
    if not hit and not was_killed(attempt.kill(whole_group=True)):
        chain.ended(attempt)
        return False
    chain.killed(attempt, counts=hit)
    return hit


def kill_on_full_disk(chain: Chain, chance: random.Random) -> None:
    """The disk is full after a step; the run says so and goes on; it is killed before there is room again."""
    attempt = chain.attempt()
    ballast = chain.run_dir.parent / "ballast"
    if attempt.saves(1) and fill_until_said(attempt, ballast, chain.straight):
        if not attempt.logs_more_than(len(attempt.steps())):
            chain.wrong(f"ended on a full disk: {attempt.said()[-2000:]}")
        time.sleep(chance.uniform(0, chain.straight.step_s))
    is_killed = was_killed(attempt.kill(whole_group=chain.tally.kills % 2 == 0))
    ballast.unlink(missing_ok=True)
    if is_killed:
        chain.killed(attempt, full_disk=True)
    else:
        chain.ended(attempt)


def fill_until_said(attempt: Attempt, ballast: Path, straight: Straight) -> bool:
    """Leave less room than half a checkpoint until the run says so; False where it ended first."""

    def is_said() -> bool:
        with open(ballast, "ab") as file:
            free = shutil.disk_usage(ballast.parent).free - straight.checkpoint_bytes // 2
            if free > 0:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
        return _NO_SPACE.search(attempt.said()) is not None

    return attempt.wait_until(is_said)


@contextlib.contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[str | None]:
    """A file system of `size` bytes in memory on `folder`; or why there is none."""
    folder.mkdir()
    if shutil.which("mount") is None:
        yield "there is no mount"
        return
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        yield done.stderr.strip()
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def prove(course: Course, options: argparse.Namespace) -> dict[str, Tally]:
    """Every part; a tally for each kind of kill."""
    course.prepare()
    straight = run_undisturbed(course)
    tallies, chance = {"at random": Tally()}, random.Random(options.seed)
    chain = Chain(course, course.folder, straight, tallies["at random"])
    while chain.tally.kills < options.random:
        kill_at_random(chain, chance)
    if options.random:
        chain.finish()
    if options.every:
        traced_tallies = {kind: Tally() for kind in CALLS}
        kill_at_calls(Chain(course, course.folder, straight, Tally()), options.every, traced_tallies)
        tallies |= {f"at every {kind}": tally for kind, tally in traced_tallies.items()}
    if options.full_disk:
        disk = course.folder / "disk"
        room = int((KEEP_LAST + 2.6) * straight.checkpoint_bytes)
        with tmpfs(disk, room) as refusal:
            if refusal is None:
                tallies["full disk"] = Tally()
                chain = Chain(course, disk, straight, tallies["full disk"])
                while chain.tally.kills < options.full_disk:
                    kill_on_full_disk(chain, chance)
                chain.finish()
            else:
                print(f"full disk: skipped, a tmpfs cannot be mounted here: {refusal}")
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--random", type=int, default=40, help="kills at random moments")
    parser.add_argument("--full-disk", type=int, default=5, help="kills on a full disk")
    parser.add_argument("--every", type=int, default=1, help="each N-th call of a save; 0: none, no strace")
    parser.add_argument("--synchronous", action="store_true", help="checkpoint.background=false")
    parser.add_argument("--model", choices=MODELS, default="50mb")
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    if options.every and shutil.which("strace") is None:
        raise SystemExit("there is no strace here (Debian's package strace): install it, or use --every=0")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unmounts, too
    with tempfile.TemporaryDirectory(prefix="prove-kill-", dir=options.folder) as folder:
        tallies = prove(
            Course(Path(folder).resolve(), options.model, options.steps, not options.synchronous), options
        )
    print("| killed | kills | inside a save | steps lost: kills | runs ended, compared | wrong |")
    print("|---|---|---|---|---|---|")
    for name, tally in tallies.items():
        print(tally.row(name))
    for name, tally in tallies.items():
        doing = ", ".join(f"{what} {count}" for what, count in tally.doing.most_common())
        print(f"{name}, what was going on: {doing}")
    wrong = [f"{name}: {what}" for name, tally in tallies.items() for what in tally.wrong]
    random_ones = tallies["at random"]
    if options.model == "50mb" and 2 * random_ones.in_a_save < random_ones.kills:
        wrong.append(f"only {random_ones.in_a_save} of {random_ones.kills} random kills were inside a save")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
