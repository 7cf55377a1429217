"""The last step that W&B has is read from its own files, whatever a kill or a disk made of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.tracking import wandb_service
from harness.tracking.wandb_record import last_step, record_files
from harness.tracking.wandb_service import end_orphans
from tests.tracking.wandb_reader import BLOCK, records

ROOT = Path(__file__).resolve().parents[2]
STEPS = 900
SCRIPT = """
import os, sys, wandb
settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
run = wandb.init(dir=sys.argv[1], id="abcd1234", mode="offline", settings=settings)
for step in range(1, int(sys.argv[2]) + 1):
    run.log({"step": step, "text": "x" * (step * 7 % 90), "long": "y" * (40_000 if step == 500 else 0)},
            step=step, commit=True)
print(run.dir, flush=True)
"""


def start(directory: Path, steps: int, then: str = "run.finish()") -> tuple[subprocess.Popen[str], Path]:
    """A process that logs so many steps, and W&B's file of its run."""
    names = {"HOME": str(directory), "WANDB_ERROR_REPORTING": "false"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + then, str(directory), str(steps)],
        cwd=ROOT,
        env={**os.environ, **names},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip()).parent / "run-abcd1234.wandb"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run of 900 steps; one of its rows is larger than a block."""
    process, file = start(tmp_path_factory.mktemp("whole"), STEPS)
    assert process.wait(60) == 0
    data = file.read_bytes()
    assert len(data) > 6 * BLOCK
    return data


def steps_of(path: Path) -> list[int]:
    return [record.history.step.num for record in records(path) if record.HasField("history")]


def place(directory: Path, data: bytes, name: str = "offline-run-20260101_000000-abcd1234") -> Path:
    folder = directory / "wandb" / name
    folder.mkdir(parents=True)
    (folder / "run-abcd1234.wandb").write_bytes(data)
    return folder / "run-abcd1234.wandb"


def test_the_last_step_of_a_file_cut_anywhere_is_its_last_whole_row(tmp_path: Path, whole: bytes) -> None:
    file = place(tmp_path, whole)
    assert last_step([file]) == STEPS
    generator = random.Random(0)
    cuts = [*range(9), *(generator.randrange(len(whole)) for _ in range(40))]
    cuts += [number * BLOCK + shift for number in (1, 2, 5) for shift in (-1, 0, 1, 6, 7, 8)]
    for size in cuts:
        file.write_bytes(whole[:size])
        whole_rows = steps_of(file) if size >= 7 else []
        assert last_step([file]) == (whole_rows[-1] if whole_rows else None), size
        file.write_bytes(whole[:size] + bytes(BLOCK))  # a lost machine leaves zeros where data was to come
        assert last_step([file]) == (whole_rows[-1] if whole_rows else None), size


def test_damage_costs_the_block_it_is_in_and_not_the_rows_after_it(tmp_path: Path, whole: bytes) -> None:
    file = place(tmp_path, whole)
    for position in (8, 11, 13, BLOCK + 100, len(whole) - BLOCK - 5000):
        data = bytearray(whole)
        data[position] ^= 1
        file.write_bytes(data)
        assert last_step([file]) == STEPS
    data = bytearray(whole)
    data[-len(whole) % BLOCK - BLOCK] ^= 1  # the last block, from its first chunk on
    file.write_bytes(data)
    last = last_step([file])
    assert last is not None
    assert 0 < last < STEPS


def test_the_latest_of_a_runs_files_counts_and_those_of_other_runs_do_not(
    tmp_path: Path, whole: bytes
) -> None:
    first = place(tmp_path, whole)
    second = place(tmp_path, whole[:7], "run-20260101_000001-abcd1234-1")  # a second start in that second
    other = place(tmp_path, whole, "offline-run-20260101_000000-eeee0000")
    other.rename(other.with_name("run-eeee0000.wandb"))
    (tmp_path / "wandb" / "latest-run").symlink_to(second.parent)
    assert record_files(tmp_path / "wandb", "abcd1234") == [first, second]
    assert last_step([first, second]) == STEPS
    assert last_step([second]) is None
    assert record_files(tmp_path / "missing", "abcd1234") == []


@pytest.mark.parametrize("data", [b"not a record of W&B", b":W&B\xe1\xbe\x01 of another version"])
def test_a_file_of_another_kind_is_no_answer(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"run-abcd1234\.wandb is no record of W&B"):
        last_step([place(tmp_path, data)])


def test_a_file_that_the_helper_of_a_killed_process_holds_is_read_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_service, "_ORPHAN_SECONDS", 0.3)
    process, file = start(tmp_path, 3, then="sys.stdin.read()")
    (helper,) = (pid for pid, parent in wandb_service._cores() if parent == process.pid)
    os.kill(helper, signal.SIGSTOP)  # it cannot follow its process
    process.kill()
    process.wait(60)
    end_orphans([tmp_path / "another.wandb"])
    assert Path(f"/proc/{helper}").exists()
    end_orphans([file])
    deadline = time.monotonic() + 20
    while helper in {pid for pid, _ in wandb_service._cores()}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
