"""Runs that are told to stop: in the phases of the loop, and as processes with all that belongs to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.launch import Outcome, launch
from harness.run_files.run_dir import read_status
from tests.commandline.test_cli import TINY
from tests.helpers_runs import ROOT, rows, run, tiny_config, train_rows, weights, write_text_set
from tests.tracking.wandb_reader import read_run

# An evaluation and a text sample of some tenths of a second each.
SLOW_LOOKS = {"evaluation__tokens": 8000, "evaluation__sample_tokens": 100, "evaluation__interval": 6}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    write_text_set(root / "npy-stream", val_tokens=8001)
    return root


def stopped_in(phase: str, step: int, config: Any, path: Path) -> Outcome:
    """A run that is sent SIGTERM once status.json says that it is in `phase` at `step`."""
    done = threading.Event()

    def is_there() -> bool:
        status = read_status(path)
        return (status.get("phase"), status.get("step")) == (phase, step)

    def send() -> None:
        while not (is_there() or done.is_set()):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return launch(config, path)
    finally:
        done.set()
        sender.join()


@pytest.mark.parametrize("phase", ["evaluate", "sample"])
def test_a_look_at_the_model_is_left_at_once_and_an_evaluation_made_up_for(
    data: Path, tmp_path: Path, phase: str
) -> None:
    path = tmp_path / "run"
    run(tiny_config(data / "npy-stream", **SLOW_LOOKS), tmp_path / "straight")
    for step in (6, 12):  # the last one too: a run without its last evaluation is not complete
        config = tiny_config(data / "npy-stream", resume="auto", **SLOW_LOOKS)
        outcome = stopped_in(phase, step, config, path)
        assert (outcome.step, outcome.stopped) == (step, phase == "evaluate" or step < 12)
        evaluated = [row["step"] for row in rows(path) if "val_loss" in row]
        assert evaluated == ([6, 12] if phase == "sample" else [6])[: step // 6 - (phase == "evaluate")]
        assert read_status(path)["exit_code"] == (75 if outcome.stopped else 0)
    run(config, path)
    assert rows(path) == rows(tmp_path / "straight")
    assert weights(path, 12) == weights(tmp_path / "straight", 12)


def signalled(
    number: signal.Signals, when: Callable[[], Any], *words: str, cwd: Path, script: str = "train.py"
) -> tuple[int, str]:
    """Exit code and output of `SCRIPT WORDS` whose process group, all of it, is sent a signal.

    Its output ends only when no process holds it any more.
    """
    child = subprocess.Popen(
        [sys.executable, str(ROOT / script), *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HOME": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while not when():
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        os.killpg(child.pid, number)
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    return child.returncode, out


def test_ctrl_c_reaches_the_whole_group_and_costs_neither_a_row_nor_a_traceback(
    data: Path, tmp_path: Path
) -> None:
    words = (*TINY, "tracker=wandb", "trainer.max_steps=100000", f"data.root={data}", "run.name=one")
    path = tmp_path / "runs" / "one"
    began = lambda: (path / "metrics.jsonl").exists() and len(train_rows(path)) > 5  # noqa: E731
    code, out = signalled(signal.SIGINT, began, *words, cwd=tmp_path)
    assert code == 75
    assert "Traceback" not in out
    assert "SIGINT: stopping at the next safe point" in out
    mirror = read_run(path / "wandb")
    assert sorted(mirror.rows) == [row["step"] for row in train_rows(path)]
    assert mirror.exit_code == 75
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["phase"], status["exit_code"]) == ("stopped", "end", 75)


def test_a_sweep_ends_with_the_job_that_is_stopped(data: Path, tmp_path: Path) -> None:
    words = (
        *TINY,
        "-m",
        "seed=1,2",
        "hydra.sweep.dir=sweep",
        f"data.root={data}",
        "trainer.max_steps=100000",
    )
    began = lambda: any((tmp_path / "sweep").glob("seed-1-*/metrics.jsonl"))  # noqa: E731
    code, out = signalled(signal.SIGTERM, began, *words, cwd=tmp_path)
    assert code == 75, out
    assert "Traceback" not in out
    (job,) = (tmp_path / "sweep").glob("seed-*")
    assert read_status(job)["state"] == "stopped"
    assert "sweep sweep: 0 of 2 done, 1 stopped, 1 waiting" in out


def test_ctrl_c_in_a_preparation_ends_its_workers_and_the_next_run_goes_on(tmp_path: Path) -> None:
    with open(tmp_path / "text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"document {number} " * 400}) + "\n" for number in range(20_000))
    words = ("corpus=jsonl", "corpus.path=text.jsonl", "prepare.workers=2", "data.path=set")
    building = tmp_path / "set.preparing"
    code, out = signalled(
        signal.SIGINT, building.exists, *words, cwd=tmp_path, script="scripts/prepare_data.py"
    )
    assert code == 75, out
    assert "Traceback" not in out
    assert building.exists()
