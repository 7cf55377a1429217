"""A sweep that is killed, or launched twice at once, comes to what an undisturbed one comes to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.run_files.run_dir import JOB_FILE, read_starts
from tests.helpers_cli import TINY, make_root
from tests.helpers_forks import Fork
from tests.helpers_runs import rows, snapshot, train_py, weights

STEPS = 40
WORDS = (
    *(word for word in TINY if not word.startswith(("trainer.max_steps", "schedule", "checkpoint"))),
    f"trainer.max_steps={STEPS}", "model.dropout=0.1", "checkpoint.interval=10", "evaluation.interval=20",
    "loader=sliding_window", "sweep.name=trial",
)  # fmt: skip
GRID, GROWN = "loader.stride=8,16", "loader.stride=4,16,8"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The jobs of a sweep that nobody disturbed, also over the value that another one grows by."""
    folder = tmp_path_factory.mktemp("straight")
    ended = train_py("-m", *WORDS, f"data.root={data}", GROWN, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return jobs(folder)


def jobs(folder: Path) -> dict[str, Path]:
    """The directory of each job, by its identity."""
    files = [*folder.glob(f"multirun/trial/*/{JOB_FILE}")]
    found = {json.loads(file.read_text())["identity"]: file.parent for file in files}
    assert len(found) == len(files)
    return found


def check_equal(folder: Path, straight: dict[str, Path], count: int) -> None:
    """The same rows, each with its data chain, and the same weights."""
    found = jobs(folder)
    assert len(found) == count
    for sha256, path in found.items():
        assert rows(path) == rows(straight[sha256])
        assert weights(path, STEPS) == weights(straight[sha256], STEPS)


def wait_until(condition: Callable[[], bool], process: Fork) -> None:
    while not condition():
        assert process.process.is_alive(), process.ended()
        time.sleep(0.002)


def test_the_same_command_finishes_a_killed_sweep_and_a_grown_one_trains_what_is_new(
    data: Path, straight: dict[str, Path], tmp_path: Path
) -> None:
    command = ("-m", *WORDS, f"data.root={data}", GRID)
    begun: Callable[[], list[Path]] = lambda: [*tmp_path.glob("multirun/trial/*/checkpoints/latest")]  # noqa: E731
    killed = Fork("train.py", *command, cwd=tmp_path)
    wait_until(lambda: len(begun()) == 2, killed)  # a job is done, the next has saved
    killed.process.kill()
    assert killed.ended().returncode == -9
    (left,) = [path for path in jobs(tmp_path).values() if not is_done(path)]
    done = {path: snapshot(path) for path in jobs(tmp_path).values() if path != left}
    assert len(done) == 1

    again = train_py(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path: snapshot(path) for path in done} == done
    assert [start["step"] > 0 for start in read_starts(left)] == [False, True]
    check_equal(tmp_path, straight, 2)

    done = {path: snapshot(path) for path in jobs(tmp_path).values()}
    words = (GROWN, "trainer.grad_clip=1.0", f"data.root={data}", *WORDS)
    grown = train_py("-m", *words, cwd=tmp_path)
    assert grown.returncode == 0, grown.stderr
    assert grown.stdout.count("done already") == 2
    assert {path: snapshot(path) for path in done} == done
    check_equal(tmp_path, straight, 3)


def is_done(path: Path) -> bool:
    return bool(json.loads((path / "status.json").read_text())["state"] == "done")


def test_two_launches_at_once_train_each_job_once(
    data: Path, straight: dict[str, Path], tmp_path: Path
) -> None:
    launches = [Fork("train.py", "-m", *WORDS, f"data.root={data}", GROWN, cwd=tmp_path) for _ in range(2)]
    codes = [launch.ended().returncode for launch in launches]
    assert set(codes) <= {0, 75}
    assert 0 in codes
    assert [len(read_starts(path)) for path in jobs(tmp_path).values()] == [1] * 3
    check_equal(tmp_path, straight, 3)
