"""A process that fails while a checkpoint is being written: with its own message, and no harm done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.checkpoints import checkpoint
from tests.helpers_runs import ROOT, run, tiny_config, weights, write_text_set

# The disk becomes slow, or hangs, at the second checkpoint; two steps later the loop fails.
CHILD = """
import os, sys, threading, time
from pathlib import Path
import harness.training.trainer as trainer
from harness.checkpoints import saving
from tests.helpers_runs import run, tiny_config

what, data, path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
seconds = {"slow writes": 0.005, "hanging write": 600, "hanging fsync": 600}[what]
saving.STALL_S = 1.0
name = what.split()[1].rstrip("s")
step, call = trainer.train_step, getattr(os, name)

def slow(descriptor, *arguments):
    file = os.readlink(f"/proc/self/fd/{descriptor}")
    if threading.current_thread().name == "checkpoint" and file.endswith("step-00000008.tmp/optimizer.pt"):
        (path / "waiting").touch()
        time.sleep(seconds)
    return call(descriptor, *arguments)

def failing(run, *arguments):
    if run.progress.step == 10:
        while not (path / "waiting").exists():
            time.sleep(0.01)
        raise RuntimeError("the device fell off the bus")
    return step(run, *arguments)

setattr(os, name, slow)
trainer.train_step = failing
run(tiny_config(data), path)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def test_an_error_in_the_loop_ends_the_process_when_the_checkpoint_is_written_or_stands_still(
    data: Path, tmp_path: Path
) -> None:
    whats = ["slow writes", "hanging write", "hanging fsync"]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, what, str(data), str(tmp_path / what)],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for what in whats
    ]  # fmt: skip
    for what, child in zip(whats, children, strict=True):
        stderr, path = child.communicate(timeout=100)[1], tmp_path / what  # where the disk takes 600 s
        assert child.returncode == 1, (what, stderr)
        assert stderr.rstrip().endswith("RuntimeError: the device fell off the bus"), what
        assert checkpoint.complete_steps(path) == ([4, 8] if what == "slow writes" else [4]), what
        assert checkpoint.open_checkpoint(checkpoint.step_dir(path, 4)).step == 4
        left = [file.name for file in (path / "checkpoints").glob("*.tmp")]
        assert left == ([] if what == "slow writes" else ["step-00000008.tmp"]), what
        status = json.loads((path / "status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("failed", 1), what
    run(tiny_config(data, resume=str(path)), path)
    run(tiny_config(data), tmp_path / "straight")
    assert weights(path, 12) == weights(tmp_path / "straight", 12)
    assert not list((path / "checkpoints").glob("*.tmp"))
