"""Proves that a resumed run is, bit for bit, the run that was never stopped.

    python scripts/prove_resume.py [--quick] [--storages npy,hdf5] [--loaders sequential,uniform]

For every storage and loader: stops after each of six places of an epoch, and resumes in four ways (once; four
times in a row; twice without a step before the resume that trains; saved again into a branch); stops at
other moments, as in an evaluation; other settings, and other free keys at the resume; and for each loader a
real `python train.py` that gets a SIGTERM and goes on in another folder, its data moved. Dropout is on.

Compared with a straight run: every row (batch hash, data chain, loss, lr, gradient norm, position, epoch,
evaluations); of the last checkpoint the bytes of the weights, every value of the optimizer, the random
states, the cursor, tokens, epoch and best value. Before that, checkpoints are made wrong on purpose: each has
to be found. Prints a table of how many trials were exact, and the first difference of each that was not;
then the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from harness.config import get  # noqa: E402
from harness.errors import EXIT_AT_ONCE  # noqa: E402
from tests import helpers_trials as trials  # noqa: E402
from tests.helpers_exact import evidence, first_difference  # noqa: E402
from tests.helpers_matrix import LOADERS, STORAGES, Sets  # noqa: E402
from tests.helpers_runs import train_rows  # noqa: E402
from tests.helpers_trials import Course, Way  # noqa: E402
from tests.helpers_wrongs import WRONGS  # noqa: E402

_COLUMNS = [*trials.PLACES, "other moments", "settings", "process"]
_SECONDS = 120
_PROCESS_STEPS = 150


@dataclass
class Cell:
    """The trials of one column, and what was wrong with them."""

    count: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, found: str | None) -> None:
        self.count += 1
        if found is not None:
            self.wrong.append(f"{what}: {found}")

    def __str__(self) -> str:
        if not self.count:
            return ""
        return f"{self.count} exact" if not self.wrong else f"{len(self.wrong)} of {self.count} differ"


def prove(sets: Sets, storage: str, loader: str, folder: Path, *, quick: bool) -> dict[str, Cell]:
    """All trials in this process of a storage and a loader, by column."""
    cells = {column: Cell() for column in _COLUMNS}
    course = Course(sets, storage, loader, folder / "base")
    for number, (place, after) in enumerate(trials.PLACES.items()):
        names = [*trials.WAYS]
        for name in [names[number % len(names)]] if quick else names:
            cells[place].add(name, attempt(course, trials.WAYS[name], after(course.epoch)))
    looked_at = Course(sets, storage, loader, folder / "looks", trials.LOOKED_AT)
    _add_all(cells["other moments"], looked_at, trials.MOMENTS)
    _add_all(cells["settings"], course, trials.FREE)
    for name, (settings, way) in trials.SETTINGS.items():
        with trials.own_determinism():
            other = Course(sets, storage, loader, folder / name, settings)
            _add_all(cells["settings"], other, {name: way})
    return cells


def _add_all(cell: Cell, course: Course, ways: dict[str, Way]) -> None:
    for name, way in ways.items():
        cell.add(name, attempt(course, way, course.epoch // 2))


def attempt(course: Course, way: Way, step: int) -> str | None:
    """A trial; what ends it in an error is no less a difference."""
    try:
        return trials.trial(course, way, step)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def find_the_wrongs(sets: Sets, storage: str, loader: str, folder: Path) -> list[str]:
    """The wrong resumes that were not found; prints the difference by which each of the others was."""
    course = Course(sets, storage, loader, folder)
    missed = []
    for name in WRONGS:
        found = attempt(course, trials.wrong_resume(name), course.epoch // 2)
        print(f"| {name} | {found or 'NOT FOUND'} |", flush=True)
        if found is None:
            missed.append(f"a wrong resume was not found: {name}")
    return missed


@dataclass(frozen=True)
class Process:
    """Runs of `train.py` over a set of its own, below `folder`."""

    sets: Sets
    storage: str
    loader: str
    folder: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [sys.executable, str(REPOSITORY / "train.py"), *words],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def words(self, path: Path) -> list[str]:
        config = self.sets.config(self.storage, self.loader)
        keys = [f"loader.{key}" for key in ("seq_len", "batch_size", "stride", "sampling", "window_tokens")]
        keys += ["data.chunk_tokens", "data.compression"]
        values = {key: value for key in keys if (value := get(config, key)) is not None}
        return [
            f"hydra.run.dir={path}", f"data.root={self.sets.root}", f"data={config.data.name}",
            f"loader={config.loader.name}", *(f"{key}={value}" for key, value in values.items()),
            "corpus=text", f"corpus.path={self.sets.folder / 'corpus'}", "corpus.suffixes=[]",
            f"prepare.val_fraction={config.prepare.val_fraction}",
            f"prepare.shard_tokens={config.prepare.shard_tokens}", "prepare.workers=1", "tracker=none",
            "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.dropout=0.1", "device=cpu",
            f"trainer.max_steps={_PROCESS_STEPS}", "trainer.log_batch_hash=true", "evaluation.interval=20",
            "evaluation.tokens=200", "checkpoint.interval=1000", "checkpoint.keep_last=null",
            "optimizer.lr=0.03",
        ]  # fmt: skip

    def finished(self, process: subprocess.Popen[str], code: int) -> None:
        _, errors = process.communicate(timeout=_SECONDS)
        if process.returncode != code:
            raise trials.Wrong(f"exit code {process.returncode} instead of {code}: {errors[-500:]}")

    def trial(self) -> str | None:
        """Stopped by SIGTERM after five steps or more; goes on elsewhere, the data moved, with a tracker."""
        straight, path = self.folder / "straight", self.folder / "run"
        self.finished(self.start(*self.words(straight)), 0)
        process = self.start(*self.words(path))
        while process.poll() is None and not (
            (path / "metrics.jsonl").is_file() and len(train_rows(path)) > 5
        ):
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        self.finished(process, 75)
        moved = self.sets.folder / "moved"
        os.rename(self.sets.root, moved)
        try:
            elsewhere = replace(self, folder=self.folder / "elsewhere")
            tracked = ["tracker=wandb", "tracker.mode=offline"]
            elsewhere.finished(elsewhere.start(f"resume={path}", f"data.root={moved}", *tracked), 0)
        finally:
            os.rename(moved, self.sets.root)
        found = first_difference(evidence(straight), evidence(path))
        return None if found is None else str(found)


def prove_process(sets: Sets, storage: str, loader: str, folder: Path) -> str | None:
    try:
        return Process(sets, storage, loader, folder).trial()
    except trials.Wrong as wrong:
        return str(wrong)


@contextlib.contextmanager
def quiet(path: Path) -> Iterator[None]:
    """What a stopped run says on stderr goes into a file: there are more than a thousand stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--storages", default=",".join(STORAGES))
    parser.add_argument("--loaders", default=",".join(LOADERS))
    parser.add_argument("--quick", action="store_true", help="one way a place, and no processes")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    storages, loaders = options.storages.split(","), options.loaders.split(",")
    for chosen, known in ((storages, STORAGES), (loaders, LOADERS)):
        if unknown := [name for name in chosen if name not in known]:
            parser.error(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prove-resume-", dir=options.folder) as folder:
        try:
            wrong = run_all(Path(folder), storages, loaders, quick=options.quick)
        except KeyboardInterrupt:
            raise SystemExit(EXIT_AT_ONCE) from None
    print(f"\n{time.monotonic() - began:.0f} s")
    if wrong:
        raise SystemExit("\n".join(wrong))


def run_all(folder: Path, storages: list[str], loaders: list[str], *, quick: bool) -> list[str]:
    """Print both tables; everything that was wrong."""
    sets = Sets(folder / "sets", documents=10, shard_tokens=150).make(storages, loaders)
    print("| wrong on purpose | found as |\n|---|---|", flush=True)
    with quiet(folder / "stderr"):
        wrong = find_the_wrongs(sets, storages[0], loaders[0], folder / "wrongs")
    print(f"\n| storage | loader | {' | '.join(_COLUMNS)} |\n|---|---|{'---|' * len(_COLUMNS)}", flush=True)
    count = 0
    for storage in storages:
        for loader in loaders:
            with quiet(folder / "stderr"):
                cells = prove(sets, storage, loader, folder / f"{storage}-{loader}", quick=quick)
            if storage == storages[0] and not quick:
                cells["process"].add(
                    "SIGTERM", prove_process(sets, storage, loader, folder / f"process-{loader}")
                )
            print(f"| {storage} | {loader} | {' | '.join(map(str, cells.values()))} |", flush=True)
            count += sum(cell.count for cell in cells.values())
            for column, cell in cells.items():
                wrong += [f"{storage}, {loader}, {column}, {found}" for found in cell.wrong]
    print(f"\n{count} trials, {len(wrong)} differ")
    return wrong


if __name__ == "__main__":
    main()
