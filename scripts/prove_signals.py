"""Sends signals to `train.py` in every phase of its life, runs the same command again, and compares.

    python scripts/prove_signals.py [--trials 4] [--phases step,saving] [--kinds SIGTERM,two] [--folder /tmp]

Phases: the imports, the preparation of the data, a step, an evaluation, a text sample, a save. In each,
SIGTERM `--trials` times, SIGUSR1 and Ctrl-C (SIGINT to the whole process group) once, and two signals 50 ms
apart. The phase is seen from outside (the signal mask, the output, status.json), and the signal comes at a
random moment in it; the phases are long because there is much to do, nothing waits.

One signal has to end the process with 75 within 5 s, or within one step and its save; two within 1 s with
130, or with 75 where nothing had to be saved, or all was before the second one came. The same command,
`resume=auto`, then has to end with the weights, and the rows of metrics.jsonl, of a run that was left alone.
Prints one table; exit code 1 where anything was different. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.killing import left_behind

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S, AT_ONCE_S, GAP_S = 5.0, 1.0, 0.05
# What may differ between two equal rows.
_TIMES = ("tokens_per_s", "data_wait_ms", "data_wait_ms_max", "data_wait_share", "mfu")
_COMMON = (
    "resume=auto", "run.name=run", "tracker=none", "loader.prefetch=2", "trainer.log_batch_hash=true",
    "schedule.warmup_steps=2", "model.dropout=0.1", "checkpoint.keep_last=null",
)  # fmt: skip
_SMALL = (
    "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "loader.seq_len=32", "loader.batch_size=8",
    "trainer.max_steps=8", "evaluation.interval=4", "evaluation.tokens=2000", "checkpoint.interval=3",
)  # fmt: skip
# Steps of half a second on one core, evaluations and samples of seconds, checkpoints of 30 MB.
_LARGE = (
    "model.n_layer=4", "model.n_embd=224", "model.n_head=4", "loader.seq_len=128", "loader.batch_size=8",
    "trainer.max_steps=5", "evaluation.interval=2", "evaluation.tokens=9000", "evaluation.sample_tokens=60",
)  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """Where a signal is sent: which command, and how its phase is seen."""

    words: tuple[str, ...]
    status: str | None = None  # the phase in status.json
    prepares: bool = False  # with a data root of its own
    writes: bool = False  # a checkpoint, beside that phase


PHASES = {
    "import": Phase(_SMALL),
    "preparation": Phase(_SMALL, prepares=True),
    "step": Phase((*_LARGE, "checkpoint.interval=2"), "train"),
    "evaluation": Phase((*_LARGE, "checkpoint.interval=2"), "evaluate"),
    "sampling": Phase((*_LARGE, "checkpoint.interval=2"), "sample"),
    "saving": Phase((*_LARGE, "checkpoint.interval=1", "checkpoint.background=false"), "save"),
    "saving beside": Phase((*_LARGE, "checkpoint.interval=1", "evaluation.interval=3"), "train", writes=True),
}


KINDS: dict[str, tuple[int, ...]] = {
    "SIGTERM": (signal.SIGTERM,),
    "SIGUSR1": (signal.SIGUSR1,),
    "Ctrl-C": (signal.SIGINT,),
    "two": (signal.SIGTERM, signal.SIGINT),
}


@dataclass
class Tally:
    """What came of the trials of one phase."""

    codes: dict[str, list[int]] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    equal: int = 0
    wrong: list[str] = field(default_factory=list)


class Command:
    """`train.py` in a process group of its own, in `folder`; what it prints is in `folder/output`."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        folder.mkdir(exist_ok=True)
        self.run, self._output = folder / "runs" / "run", folder / "output"
        with open(self._output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / "train.py"), *_COMMON, *words],
                cwd=folder, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
            )  # fmt: skip

    def output(self) -> str:
        return self._output.read_text()

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads((self.run / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status if status["pid"] == self.process.pid else {}

    def answers_signals(self) -> bool:
        """Whether a handler of SIGTERM is installed: Python itself is up, and the first line of ours ran."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line for line in text.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def send(self, number: int) -> None:
        """Ctrl-C in a terminal goes to the whole group, anything else to the process."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def wait_until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended with {self.process.returncode}:\n{self.output()[-2000:]}")
            time.sleep(0.002)


@dataclass
class Straight:
    """A run that nobody disturbed: what it left, and how long its phases were."""

    rows: list[dict[str, Any]]
    weights: bytes
    longest: dict[str, float]  # stays by status phase, in seconds; `import` is the time to the first output
    step_s: float  # the slowest

    @property
    def step_and_save(self) -> float:
        return self.step_s + self.longest.get("save", 0.0)


def rows_of(run: Path, without: tuple[str, ...] = _TIMES) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in without} for row in rows]


def weights_of(run: Path) -> bytes:
    return (sorted((run / "checkpoints").glob("step-*"))[-1] / "model.safetensors").read_bytes()


def run_straight(folder: Path, words: tuple[str, ...]) -> Straight:
    command = Command(folder, words)
    began = last = time.monotonic()
    longest: dict[str, float] = {}
    before: str | None = None
    while command.process.poll() is None:
        if "import" not in longest and command.output():
            longest["import"] = time.monotonic() - began
        if (now := command.status().get("phase")) != before:
            if before is not None:
                longest[before] = max(longest.get(before, 0.0), time.monotonic() - last)
            before, last = now, time.monotonic()
        time.sleep(0.002)
    if command.process.returncode:
        raise SystemExit(f"an undisturbed run ended with {command.process.returncode}:\n{command.output()}")
    rows = rows_of(command.run, without=())
    step_s = max(rows[0]["tokens"] / row["tokens_per_s"] for row in rows if "loss" in row)
    return Straight(rows_of(command.run), weights_of(command.run), longest, step_s)


def wait_for_phase(command: Command, phase: Phase, straight: Straight, chance: random.Random) -> bool:
    """Wait for a random moment inside of the phase; whether the run is still in it then."""
    if phase.prepares:
        command.wait_until(lambda: "preparing the embedded corpus" in command.output())
        time.sleep(chance.uniform(0, 3))
    elif phase.status is None:
        command.wait_until(command.answers_signals)
        time.sleep(chance.uniform(0, 0.7 * straight.longest["import"]))
    else:
        first = chance.randrange(1, 3)  # not always the first one of its kind
        command.wait_until(lambda: command.status().get("step", 0) >= first)
        command.wait_until(lambda: command.status().get("phase") == phase.status)
        if phase.writes:
            command.wait_until(lambda: any(command.run.glob("checkpoints/*.tmp")))
        else:
            time.sleep(chance.uniform(0, 0.7 * straight.longest[phase.status]))
    return command.status().get("phase") == phase.status


def try_once(
    name: str, numbers: tuple[int, ...], folder: Path, root: Path, straight: Straight, chance: random.Random
) -> tuple[int, float, list[str]]:
    """One disturbed run, and the same command again: exit code, seconds to the exit, what was wrong."""
    phase, wrong = PHASES[name], list[str]()
    words = (*phase.words, f"data.root={folder / 'data' if phase.prepares else root}")
    command = Command(folder, words)
    try:
        while not wait_for_phase(command, phase, straight, chance):  # it was faster than the straight run
            command.process.kill()
            command.process.wait()
            shutil.rmtree(folder)
            command = Command(folder, words)
        for number in numbers[:-1]:
            command.send(number)
            time.sleep(GAP_S)
        sent = time.monotonic()
        command.send(numbers[-1])
        code = command.process.wait(120)
    finally:
        command.process.kill()
    seconds = time.monotonic() - sent
    status = command.status()
    expected, limit = [75], max(LIMIT_S, straight.step_and_save)
    if len(numbers) > 1:
        was_saved = phase.status == "save" and status and status["last_saved"] == status["step"]
        expected, limit = [130, 75] if was_saved or not phase.status else [130], AT_ONCE_S
    if code not in expected or seconds > limit:
        wrong.append(f"exit code {code} after {seconds:.2f} s")
    if status and (status["state"], status["exit_code"]) != ("stopped", code):
        wrong.append(f"status.json says {status['state']}, exit code {status['exit_code']}, not {code}")
    if "Traceback" in command.output():
        wrong.append(f"a traceback:\n{command.output()}")
    if children := left_behind(command.process.pid):
        wrong.append(f"processes were left behind: {children}")
    again = Command(folder, words)
    if again.process.wait(600):
        wrong.append(
            f"the same command then ended with {again.process.returncode}:\n{again.output()[-2000:]}"
        )
    elif rows_of(again.run) != straight.rows:
        wrong.append("the rows of metrics.jsonl are others")
    elif weights_of(again.run) != straight.weights:
        wrong.append("the weights are others")
    return code, seconds, wrong


def prove(name: str, options: argparse.Namespace, folder: Path, straights: dict[Any, Straight]) -> Tally:
    tally, chance, phase = Tally(), random.Random(f"{options.seed} {name}"), PHASES[name]
    root = options.data or folder / "data"
    if phase.words not in straights:
        straights[phase.words] = run_straight(folder / "straight", (*phase.words, f"data.root={root}"))
        shutil.rmtree(folder / "straight")
    for kind in options.kinds.split(","):
        for number in range(options.trials if kind == "SIGTERM" else 1):
            place = folder / f"{kind}{number}"
            code, seconds, wrong = try_once(name, KINDS[kind], place, root, straights[phase.words], chance)
            tally.codes.setdefault(kind, []).append(code)
            tally.slowest[kind] = max(tally.slowest.get(kind, 0.0), seconds)
            tally.equal += not wrong
            tally.wrong += [f"{name}, {kind} {number}: {one}" for one in wrong]
            shutil.rmtree(place)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="of SIGTERM in each phase")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--data", type=Path, help="a data.root with a set; without it one is prepared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    print("| phase | " + " | ".join(f"{kind}: codes, slowest" for kind in kinds) + " | went on exactly |")
    print("|---|" + "---|" * (len(kinds) + 1), flush=True)
    wrong: list[str] = []
    straights: dict[Any, Straight] = {}
    with tempfile.TemporaryDirectory(prefix="prove-signals-", dir=options.folder) as folder:
        if options.data is None:  # the first run prepares it
            run_straight(Path(folder, "first"), (*_SMALL, f"data.root={Path(folder, 'data')}"))
        for name in options.phases.split(","):
            tally = prove(name, options, Path(folder), straights)
            cells = [
                f"{' '.join(map(str, tally.codes[kind]))}, {tally.slowest[kind]:.2f} s" for kind in kinds
            ]
            total = sum(map(len, tally.codes.values()))
            print(f"| {name} | {' | '.join(cells)} | {tally.equal} of {total} |", flush=True)
            wrong += tally.wrong
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
