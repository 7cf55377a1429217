"""A training run in processes that are killed, and what must be true of what is left each time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness.checkpoints import checkpoint
from harness.config import PrepareScriptConfig
from harness.config_groups import DataConfig, PrepareConfig, TextCorpusConfig
from harness.errors import UserError
from harness.prepare import prepare
from harness.run_files.run_dir import read_status
from harness.tracking.jsonl import read_rows

REPOSITORY = Path(__file__).resolve().parents[2]
KEEP_LAST = 2
MODELS = {"50mb": (4, 528), "small": (1, 32)}  # layers and width
_SECONDS = 300
# What may differ between two equal runs.
_TIMES = {"tokens_per_s", "data_wait_ms", "data_wait_ms_max", "data_wait_share", "mfu"}
_OF_THE_PLACE = {
    "elapsed_s", "train_s", "waited_s", "peak_memory_mb", "run_id", "parent", "lineage",
}  # fmt: skip
_STEP = re.compile(r"^step (\d+)/\d+ \|", re.MULTILINE)
_SAVED = re.compile(r"^saved .*step-(\d+)$", re.MULTILINE)
_RESUMED = re.compile(r"^resumed +at step (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Course:
    """What is trained: `steps` steps of 2 x 16 tokens with dropout, an epoch every few, each step saved."""

    folder: Path
    model: str
    steps: int
    background: bool

    @property
    def most_lost(self) -> int:
        """The steps a kill may cost: one, and the one whose save is under way while the next is trained."""
        return 2 if self.background else 1

    def prepare(self) -> None:
        """Write a set of so few tokens that the run crosses an epoch's end."""
        corpus = self.folder / "corpus"
        corpus.mkdir()
        for number in range(12):
            (corpus / f"{number}.txt").write_text(f"text {number} of a few words\n")
        config = PrepareScriptConfig(
            data=DataConfig(path=str(self.folder / "set")),
            corpus=TextCorpusConfig(path=str(corpus)),
            prepare=PrepareConfig(val_fraction=0.3, workers=1),
        )
        prepare(config, report=lambda line: None)

    def command(self, run_dir: Path) -> list[str]:
        """The one command that starts the run, and goes on with it after each kill."""
        layers, width = MODELS[self.model]
        words = {
            "resume": "auto",
            "hydra.run.dir": run_dir,
            "data.path": self.folder / "set",
            "corpus": "text",
            "prepare.val_fraction": 0.3,
            "loader": "sliding_window",
            "loader.seq_len": 16,
            "loader.batch_size": 2,
            "model.n_layer": layers,
            "model.n_head": 4,
            "model.n_embd": width,
            "model.dropout": 0.1,
            "trainer.max_steps": self.steps,
            "trainer.log_batch_hash": "true",
            "checkpoint.interval": 1,
            "checkpoint.keep_last": KEEP_LAST,
            "checkpoint.background": str(self.background).lower(),
            "checkpoint.max_failures": 100,  # a full disk is to be ended by a kill
            "evaluation.interval": 5,
            "evaluation.tokens": 64,
            "evaluation.sample_tokens": 4,
            "tracker": "none",
            "device": "cpu",
        }
        return [
            sys.executable,
            str(REPOSITORY / "train.py"),
            *(f"{key}={value}" for key, value in words.items()),
        ]


class Attempt:
    """One process of the run, in a process group of its own; `said` is what it has printed so far."""

    def __init__(self, command: list[str], output: Path, cwd: Path | None = None) -> None:
        self._output = output
        with open(output, "wb") as file:
            self.process = _start(command, file, cwd)

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def steps(self) -> list[int]:
        """The steps it has logged."""
        return [int(step) for step in _STEP.findall(self.said())]

    def saved(self) -> list[int]:
        """The steps it has said to be saved."""
        return [int(step) for step in _SAVED.findall(self.said())]

    def began_at(self) -> int:
        """The step it went on from, 0 for a fresh start."""
        found = _RESUMED.search(self.said())
        return int(found[1]) if found else 0

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Wait for the condition; False where the process ended before."""
        deadline = time.monotonic() + _SECONDS
        try:
            while not condition():
                if self.process.poll() is not None:
                    return bool(condition())
                if time.monotonic() > deadline:
                    raise SystemExit(f"nothing happened for {_SECONDS} s; the run's output:\n{self.said()}")
                time.sleep(0.003)
        except BaseException:  # whoever stops the proof stops what it has started
            self.kill(whole_group=True)
            raise
        return True

    def logs_more_than(self, steps: int) -> bool:
        """Wait until it has logged more steps than that; False where it ended before."""
        return self.wait_until(lambda: len(self.steps()) > steps)

    def saves(self, count: int) -> bool:
        """Wait until it has said of so many steps that they are saved; False where it ended before."""
        return self.wait_until(lambda: len(self.saved()) >= count)

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        self.wait_until(lambda: self.process.poll() is not None)
        return self.process.wait()

    def kill(self, whole_group: bool) -> int:
        """SIGKILL for the process alone, or as a scheduler does for its whole group; the exit code."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if whole_group else os.kill)(self.process.pid, signal.SIGKILL)
        return self.process.wait(_SECONDS)


def _start(command: list[str], output: IO[bytes], cwd: Path | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@dataclass(frozen=True)
class Straight:
    """The run that nobody killed: its rows, what its last checkpoint holds, the files there at the end."""

    rows: list[dict[str, Any]]
    digests: dict[str, str]
    trainer: dict[str, Any]
    files: set[str]
    checkpoint_bytes: int
    step_s: float  # of a step and its save


def outcome(run_dir: Path, step_s: float = 0.0) -> Straight:
    """What a run that has ended left."""
    newest = checkpoint.find(run_dir)
    saved = checkpoint.open_checkpoint(newest)
    index = json.loads((newest / "checkpoint.json").read_text())["files"]
    exact = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.RNG, checkpoint.LOADER)
    trainer = {key: value for key, value in saved.trainer.items() if key not in _OF_THE_PLACE}
    return Straight(
        rows(run_dir),
        {name: index[name]["sha256"] for name in exact},
        trainer,
        {path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*")},
        sum(entry["bytes"] for entry in index.values()),
        step_s,
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what measures time; none where the run has not begun."""
    path = run_dir / "metrics.jsonl"
    found = read_rows(path) if path.exists() else []
    return [{key: value for key, value in row.items() if key not in _TIMES} for row in found]


def differences(run_dir: Path, straight: Straight) -> list[str]:
    """In what a run that was killed and has ended differs from the undisturbed one."""
    try:
        ended = outcome(run_dir)
    except UserError as error:
        return [str(error)]
    found = [f"{name} differs" for name in ended.digests if ended.digests[name] != straight.digests[name]]
    found += [
        f"trainer.json: {key} is {ended.trainer.get(key)}, undisturbed {straight.trainer.get(key)}"
        for key in ended.trainer.keys() | straight.trainer.keys()
        if ended.trainer.get(key) != straight.trainer.get(key)
    ]
    if ended.rows != straight.rows:
        found.append(f"metrics.jsonl: {_first_difference(ended.rows, straight.rows)}")
    found += [f"{name} was left behind" for name in sorted(ended.files - straight.files)]
    found += [f"{name} is missing" for name in sorted(straight.files - ended.files)]
    return found


def _first_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return f"{one}, undisturbed {other}"
    return f"{len(ours)} rows, undisturbed {len(theirs)}"


@dataclass(frozen=True)
class Left:
    """What a killed process left: the newest complete step, the last logged one, what it was doing."""

    newest: int
    logged: int
    doing: str
    is_saving: bool
    faults: list[str]

    @property
    def lost(self) -> int:
        return max(0, self.logged - self.newest)


def look(run_dir: Path, straight: Straight, before: int) -> Left:
    """Check what a process that went on from step `before` left, before anything goes on with it."""
    faults = []
    steps = checkpoint.complete_steps(run_dir)
    for step in steps:
        try:
            checkpoint.open_checkpoint(checkpoint.step_dir(run_dir, step))
        except UserError as error:
            faults.append(f"step {step} has an index and is not whole: {error}")
    latest = _latest(run_dir)
    if latest is not None and latest not in [checkpoint.step_dir(run_dir, step).name for step in steps]:
        faults.append(f"latest names {latest}, complete are {steps}")
    if len(steps) > KEEP_LAST + 2:  # the best one, and one that was about to be removed
        faults.append(f"{len(steps)} checkpoints are kept: {steps}")
    logged = 0
    try:
        found = rows(run_dir)
        logged = max((row["step"] for row in found), default=0)
        if found != straight.rows[: len(found)]:
            faults.append(f"metrics.jsonl: {_first_difference(found, straight.rows)}")
    except UserError as error:
        faults.append(str(error))
    doing, is_saving = _doing(run_dir, before, steps, latest)
    return Left(steps[-1] if steps else 0, logged, doing, is_saving, faults)


def oldest_to_go(run_dir: Path) -> int:
    """The oldest complete step that is not the best one, and goes when others have come."""
    saved = checkpoint.open_checkpoint(checkpoint.find(run_dir))
    return next(step for step in checkpoint.complete_steps(run_dir) if step != saved.trainer["best_step"])


def _latest(run_dir: Path) -> str | None:
    path = checkpoint.checkpoints_dir(run_dir) / "latest"
    return path.read_text().strip() if path.exists() else None


def _doing(run_dir: Path, before: int, steps: list[int], latest: str | None) -> tuple[str, bool]:
    """What was going on, and whether that was a part of a save: by the files, else by status.json."""
    folder = checkpoint.checkpoints_dir(run_dir)
    begun = sorted(folder.glob("step-*.tmp")) if folder.is_dir() else []
    if begun:
        there = [name for name in checkpoint.FILES if (begun[-1] / name).exists()]
        if any(path.name.endswith(".tmp") or path.name == "checkpoint.json" for path in begun[-1].iterdir()):
            return "writing its index", True
        return f"writing {there[-1]}" if there else "beginning a save", True
    if steps and steps[-1] > before and latest != checkpoint.step_dir(run_dir, steps[-1]).name:
        return "naming it the latest", True
    if checkpoint.incomplete_steps(run_dir) or _strangers(folder):
        return "removing an old one", True
    phase = str(read_status(run_dir).get("phase", "start"))
    return f"phase {phase}", phase == "save"


def _strangers(folder: Path) -> list[str]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [name for name in names if name != "latest" and not re.fullmatch(r"step-\d+", name)]
