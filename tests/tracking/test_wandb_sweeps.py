"""Each job of a sweep is one W&B run: its own configuration, steps and state, in its sweep's group."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.commandline.overrides import split
from harness.errors import EXIT_FAILED
from harness.run_files.run_dir import read_starts
from harness.tracking.wandb_tracker import WandbTracker
from tests.helpers_cli import TINY, make_root
from tests.helpers_forks import CONTEXT
from tests.tracking.test_tracking_resumes import check_mirror
from tests.tracking.test_tracking_runs import own_home  # noqa: F401
from tests.tracking.wandb_reader import Run, read_runs, union

RATES = {"first": 1e-3, "diverges": 1.0, "killed": 2e-3, "last": 3e-3}
KILLED_STEP = 6


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The job directories of a sweep of four: the second job diverges, in the third the whole process is
    killed; then the same command again."""
    folder = tmp_path_factory.mktemp("sweep")
    words = [
        "-m", *TINY, "tracker=wandb", "tracker.mode=offline", "tracker.tags=[mine]",
        f"data.root={make_root(folder / 'data')}", "loader=sliding_window", "optimizer.weight_decay=1000",
        "checkpoint.background=false",
        f"optimizer.lr={','.join(map(str, RATES.values()))}", "sweep.name=rates",
    ]  # fmt: skip
    assert sweep(words, folder, killed=True) == -signal.SIGKILL
    assert sweep(words, folder, killed=False) == EXIT_FAILED
    found = {name: next(folder.glob(f"multirun/rates/lr-{rate}-*")) for name, rate in RATES.items()}
    assert len(list(folder.glob("multirun/rates/*/job.json"))) == len(RATES)
    return found


def sweep(words: list[str], folder: Path, *, killed: bool) -> int | None:
    """The exit code of the sweep, all jobs of which run in one process."""
    child = CONTEXT.Process(target=_sweep, args=(words, folder, killed))
    child.start()
    child.join(100)
    return child.exitcode


def _sweep(words: list[str], folder: Path, killed: bool) -> None:
    os.chdir(folder)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(folder / "home")
    sys.argv = ["train.py"]
    seen: list[WandbTracker] = []
    log = WandbTracker.log

    def counting(self: WandbTracker, row: dict[str, Any], *, late: bool = False) -> None:
        if not any(self is one for one in seen):
            seen.append(self)
        if killed and len(seen) == 3 and row["step"] == KILLED_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        log(self, row, late=late)

    WandbTracker.log = counting  # type: ignore[method-assign]
    from harness.sweep import parent

    parent.main(split(words))


def runs(path: Path) -> list[Run]:
    """Those of every start; wandb may have written nothing yet of the one that was killed."""
    return [run for run in read_runs(path / "wandb") if run.id]


def test_there_are_as_many_runs_as_jobs(jobs: dict[str, Path]) -> None:
    ids = {name: {run.id for run in runs(path)} for name, path in jobs.items()}
    assert all(len(found) == 1 for found in ids.values())
    assert len(set.union(*ids.values())) == len(jobs)


def test_each_run_has_its_own_configuration_in_the_group_of_the_sweep(jobs: dict[str, Path]) -> None:
    for name, path in jobs.items():
        for run in runs(path):
            assert run.config["optimizer"]["lr"] == RATES[name]
            assert (run.group, run.job_type, run.name) == ("rates", "train", path.name)
            assert run.tags == ["mine", "data=npy", "loader=sliding_window", "model=nano"]


def test_each_run_has_the_steps_and_the_end_of_its_job(jobs: dict[str, Path]) -> None:
    """One start of the jobs that were done at once or not begun before; two of those that were taken up."""
    starts = {name: [start["step"] for start in read_starts(path)] for name, path in jobs.items()}
    assert starts == {"first": [0], "diverges": [0, 4], "killed": [0, 4], "last": [0]}
    ends = {name: [run.exit_code for run in read_runs(path / "wandb")] for name, path in jobs.items()}
    assert ends == {"first": [0], "diverges": [1, 1], "killed": [None, 0], "last": [0]}
    for name in ("first", "killed", "last"):
        assert sorted(union(runs(jobs[name]))) == list(range(1, 9))
        check_mirror(jobs[name])
    assert 1 <= max(union(runs(jobs["diverges"]))) < 8
