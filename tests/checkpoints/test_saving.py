"""Saving while training goes on: from a copy, one at a time, not claimed before it is durable."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import checkpoint, checkpoint_writer
from harness.checkpoints.saving import Saver
from harness.config import CheckpointConfig
from harness.errors import RunFailed
from harness.training.run import Run
from tests.helpers_checkpoints import parts
from tests.helpers_disks import files_up_to, unwritable
from tests.helpers_runs import rows, run, tiny_config, weights, write_text_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(params=[True, False], ids=["background", "synchronous"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Saver]:
    saver = Saver(tmp_path, CheckpointConfig(interval=1, background=request.param))
    yield saver
    saver.close()


def test_saving_in_the_background_or_not_trains_the_same(data: Path, tmp_path: Path) -> None:
    for background in (True, False):
        settings = {"checkpoint__background": background, "checkpoint__interval": 1}
        run(tiny_config(data, **settings), tmp_path / str(background))
    assert weights(tmp_path / "True", 12) == weights(tmp_path / "False", 12)
    assert rows(tmp_path / "True") == rows(tmp_path / "False")


def test_what_is_trained_while_it_is_saved_is_not_what_is_saved(tmp_path: Path) -> None:
    """The writer is held up until the tensors have changed."""
    changed, weight = threading.Event(), torch.zeros(10_000)
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(parts(1, weight), before=changed.wait)
    weight += 1
    changed.set()
    saver.finish()
    saved = checkpoint.open_checkpoint(checkpoint.step_dir(tmp_path, 1))
    assert torch.equal(saved.weights()["w"], torch.zeros(10_000))


def test_a_due_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    saver, may = Saver(tmp_path, CheckpointConfig()), threading.Event()
    saver.save(parts(1), before=may.wait)
    assert saver.waits
    timer = threading.Timer(0.2, may.set)
    timer.start()
    saver.save(parts(2))
    assert checkpoint.complete_steps(tmp_path)[0] == 1
    saver.finish()
    assert not saver.waits
    for step in (1, 2):  # the second did not write over what the first was writing
        saved = checkpoint.open_checkpoint(checkpoint.step_dir(tmp_path, step))
        assert torch.equal(saved.weights()["w"], torch.full((10_000,), float(step)))


def test_a_step_that_is_saved_is_not_saved_again(saver: Saver, tmp_path: Path) -> None:
    saver.save(parts(1))
    saver.finish()
    before = (checkpoint.step_dir(tmp_path, 1) / "checkpoint.json").stat()
    saver.save(parts(1, torch.ones(3)))
    saver.finish()
    assert (checkpoint.step_dir(tmp_path, 1) / "checkpoint.json").stat() == before


def test_a_save_is_not_claimed_before_it_is_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[bool] = []
    fsync_dir = checkpoint_writer.fsync_dir

    def watched(path: Path) -> None:
        claimed.append("saved" in caplog.text)
        fsync_dir(path)
        claimed.append("saved" in caplog.text)

    monkeypatch.setattr(checkpoint_writer, "fsync_dir", watched)
    with caplog.at_level(logging.INFO, "harness"):
        saver = Saver(tmp_path, CheckpointConfig())
        saver.save(parts(1))
        saver.finish()
    assert claimed
    assert not any(claimed)
    assert caplog.text.count("saved") == 1
    assert saver.last_saved == 1


def test_a_full_disk_is_said_and_training_goes_on_and_saves_again(
    saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save(parts(1))
    saver.finish()
    caplog.clear()
    with files_up_to(30_000):
        saver.save(parts(2))
        assert saver.due(3)
        saver.save(parts(3))
        assert saver.due(4)
        saver.wait()
    assert caplog.text.count("could not be saved") == 2
    assert "step-00000002.tmp/model.safetensors: File too large" in caplog.text
    assert "bytes free, at least 80,000 needed" in caplog.text
    assert "intact, the newest is step 1" in caplog.text
    assert "Failure 1 in a row, 3 end the run" in caplog.text
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["latest", "step-00000001"]
    saver.save(parts(4))
    saver.finish()
    assert checkpoint.complete_steps(tmp_path) == [1, 4]


def test_failures_in_a_row_end_the_run_and_a_success_between_them_begins_the_count_again(
    saver: Saver, tmp_path: Path
) -> None:
    for step, size in ((1, 30_000), (2, 30_000), (3, 10**9), (4, 30_000), (5, 30_000), (6, 30_000)):
        assert saver.due(step)
        with files_up_to(size):
            saver.save(parts(step))
            saver.wait()
    with pytest.raises(RunFailed, match=r"3 saves in a row failed \(checkpoint.max_failures=3\): step 6"):
        saver.due(7)
    assert checkpoint.complete_steps(tmp_path) == [3]


def test_the_last_save_is_on_disk_or_the_run_says_that_it_is_not(saver: Saver, tmp_path: Path) -> None:
    saver.save(parts(1))
    saver.finish()
    with files_up_to(30_000):
        saver.save(parts(2))
        with pytest.raises(RunFailed, match=r"step 2 could not be saved.*newest is step 1\. Make room"):
            saver.finish()
    saver.save(parts(2))  # the same step again, when there is room
    saver.finish()
    assert checkpoint.complete_steps(tmp_path) == [1, 2]


def test_a_folder_that_lost_its_permission_is_said_by_its_path(
    saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save(parts(1))
    saver.finish()
    caplog.clear()
    with unwritable(tmp_path / "checkpoints"):
        saver.save(parts(2))
        saver.wait()
    assert re.search(r"saved: \S*/checkpoints/step-00000002\S*: Permission denied", caplog.text)
    assert "80,000 needed" in caplog.text
    saver.save(parts(3))
    saver.finish()
    assert checkpoint.complete_steps(tmp_path) == [1, 3]


def test_a_fault_that_is_no_disks_ends_the_run(saver: Saver, tmp_path: Path) -> None:
    bad = parts(1) | {"loader": {"bad": object()}}
    with pytest.raises(TypeError, match="not JSON serializable"):  # noqa: PT012 - at the next opportunity
        saver.save(bad)
        saver.wait()
        saver.due(2)
    assert not list((tmp_path / "checkpoints").iterdir())


class Slow(Saver):
    def _between(self) -> None:
        time.sleep(0.02)
        super()._between()


def test_closing_finishes_what_gets_on_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("harness.checkpoints.saving.STALL_S", 1.0)
    monkeypatch.setattr("harness.checkpoints.saving._SAY_S", 0.5)
    saver = Slow(tmp_path, CheckpointConfig())
    saver.save(parts(1))
    with caplog.at_level("INFO"):
        saver.close()
    assert caplog.text.count("waiting for the checkpoint that is being written") == 1
    assert saver._blocks * 0.02 > 1.0
    assert checkpoint.complete_steps(tmp_path) == [saver.last_saved] == [1]


def test_closing_gives_up_what_stands_still_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.checkpoints.saving.STALL_S", 0.1)
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(parts(1), before=lambda: saver._cancelled.wait(60))
    saver.close()
    assert not list((tmp_path / "checkpoints").iterdir())
    assert saver.last_saved is None


def test_a_save_that_no_thread_could_begin_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    saver = Saver(tmp_path, CheckpointConfig())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            saver.save(parts(1))
    assert not saver.is_writing
    saver.close()


def test_minutes_count_from_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    saver = Saver(tmp_path, CheckpointConfig(interval=1000, minutes=2, background=False))
    due = []
    for step in range(1, 8):
        now[0] += 50
        due.append(saver.due(step))
        if due[-1]:
            saver.save(parts(step))
    assert due == [False, False, True, False, False, True, False]
    assert checkpoint.complete_steps(tmp_path) == [3, 6]


def test_a_run_on_a_disk_that_was_full_for_a_while_ends_as_any_other(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints, rows and logs: the limit is below what any of them holds by then."""
    import harness.training.trainer as trainer

    run(tiny_config(data), tmp_path / "straight")
    original, limits = trainer.next_batch, []

    def batch(a_run: Run) -> Any:
        if a_run.progress.step == 5:
            a_run.saver.wait()  # for step 4
            limits.append(files_up_to(1000))
            limits[0].__enter__()
        if a_run.progress.step == 10:
            limits[0].__exit__(None, None, None)
        return original(a_run)

    monkeypatch.setattr(trainer, "next_batch", batch)
    run(tiny_config(data), tmp_path / "run")
    assert checkpoint.complete_steps(tmp_path / "run") == [4, 12]
    assert weights(tmp_path / "run", 12) == weights(tmp_path / "straight", 12)
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    said = (tmp_path / "run" / "train.log").read_text()
    assert said.count("metrics.jsonl cannot be written") == said.count("no row is missing") == 1
    assert said.count("step 8 could not be saved") == 1
    assert all(f"step {step}/12 | " in said for step in range(1, 13))
    assert json.loads((tmp_path / "run" / "status.json").read_text())["last_saved"] == 12
