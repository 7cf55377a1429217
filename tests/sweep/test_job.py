"""A job is trained once, gone on with where it was left, and its failure is its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from harness.config import TrainConfig
from harness.errors import RunFailed, UserError
from harness.launch import launch
from harness.resuming import admission
from harness.run_files import failure, run_dir
from harness.sweep import job as sweep_job
from harness.sweep.identity import identity
from harness.sweep.job import ELSEWHERE, FAILED_OBJECTIVE, Ended, run_job
from harness.sweep.lock import claimed
from harness.sweep.states import read_state
from harness.training import trainer
from harness.training.run import Run
from tests.helpers_runs import rows, snapshot, tiny_config, weights, write_text_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def job(config: TrainConfig, folder: Path) -> Ended:
    return run_job(config, folder, [f"optimizer.lr={config.optimizer.lr}"], {"overrides.yaml": "[]\n"})


def small(data: Path, **changes: object) -> TrainConfig:
    return tiny_config(data, tracker__name="none", model__n_layer=1, evaluation__sample_tokens=0, **changes)


def test_a_done_job_is_skipped_and_returns_what_it_reached(data: Path, tmp_path: Path) -> None:
    first = job(small(data), tmp_path)
    assert first.state == "done"
    assert first.path is not None
    assert 0 < first.objective < FAILED_OBJECTIVE
    shutil.rmtree(first.path / "checkpoints")  # its results are what a sweep is for
    before = snapshot(first.path)
    assert job(small(data, checkpoint__interval=3, run__name="other"), tmp_path) == first
    assert snapshot(first.path) == before


def test_a_half_done_job_goes_on_to_the_same_weights(data: Path, tmp_path: Path) -> None:
    whole = job(small(data), tmp_path / "whole").path
    config = small(data)
    half = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=8))
    place = tmp_path / "half" / f"any-{identity(config)[:8]}"
    launch(half, place, {})
    status = json.loads((place / "status.json").read_text())
    (place / "status.json").write_text(json.dumps(status | {"state": "running", "pid": 2**22 + 1}))
    assert read_state(place).state == "died"
    resumed = job(config, tmp_path / "half")
    assert whole is not None
    assert resumed.path == place
    assert weights(place, 12) == weights(whole, 12)
    assert [row["loss"] for row in rows(place) if "loss" in row] == [
        row["loss"] for row in rows(whole) if "loss" in row
    ]
    assert read_state(place)[:3] == ("done", 12, 8)


def test_a_failed_job_is_recorded_before_anything_else_runs_and_tried_again(
    data: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    config = small(moved)
    config.evaluation.set = str(tmp_path / "nowhere")
    failed = job(config, tmp_path)
    assert (failed.state, failed.objective, failed.exit_code) == ("failed", FAILED_OBJECTIVE, 2)
    assert failed.path is not None
    status = run_dir.read_status(failed.path)
    assert (status["state"], status["reason"], status["step"]) == ("failed", "user", 0)
    assert "nowhere" in status["traceback"]
    assert "nowhere" in (failed.path / "train.log").read_text()
    shutil.copytree(data, moved)
    shutil.copytree(data, tmp_path / "nowhere")
    assert job(config, tmp_path).state == "done"


def test_a_try_that_fails_before_it_begins_forgets_nothing(data: Path, tmp_path: Path) -> None:
    config = small(data, evaluation__set=str(tmp_path / "nowhere"))
    place = tmp_path / f"any-{identity(config)[:8]}"
    place.mkdir()
    known = {"step": 4, "wandb_id": "one", "wandb_last_step": 4}
    (place / "status.json").write_text(json.dumps({"state": "stopped", **known}))
    assert job(config, tmp_path).state == "failed"
    status = run_dir.read_status(place)
    assert status["state"] == "failed"
    assert {key: status[key] for key in known} == known


def test_a_job_that_diverges_says_so_and_returns_a_finite_objective(data: Path, tmp_path: Path) -> None:
    ended = job(small(data, optimizer__lr=900.0, schedule__warmup_steps=0, trainer__grad_clip=0.0), tmp_path)
    assert ended.objective == FAILED_OBJECTIVE
    assert ended.path is not None
    state = read_state(ended.path)
    assert state.state == "failed"
    assert state.reason.startswith("diverged: ")


def test_a_job_of_another_process_is_left_to_it(data: Path, tmp_path: Path) -> None:
    config = small(data)
    with claimed(tmp_path, identity(config)) as owner:
        assert owner is None
        assert job(config, tmp_path) == Ended(None, ELSEWHERE)
    assert job(config, tmp_path).state == "done"


def test_an_owner_whose_lock_is_damaged_is_no_process_of_the_name_none(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(data)
    (tmp_path / ".locks" / f"{identity(config)}.json").mkdir(parents=True)
    with caplog.at_level("INFO", "harness"):
        assert job(config, tmp_path) == Ended(None, ELSEWHERE)
    assert "is being trained by another process" in caplog.text


def test_a_job_that_is_gone_on_with_by_hand_is_left_to_it(data: Path, tmp_path: Path) -> None:
    config = small(data)
    path = job(config, tmp_path).path
    assert path is not None
    status = path / "status.json"
    status.write_text(json.dumps(run_dir.read_status(path) | {"state": "running"}))
    before = status.read_bytes()
    with admission.locked(path):  # as resume= holds it
        assert job(config, tmp_path) == Ended(None, ELSEWHERE)
        assert status.read_bytes() == before
    assert job(config, tmp_path).state == "done"


def test_results_of_other_data_are_not_passed_off_as_done(data: Path, tmp_path: Path) -> None:
    place = tmp_path / "set"
    shutil.copytree(data, place)
    first = job(small(place), tmp_path)
    shutil.rmtree(place)
    write_text_set(place, train_tokens=2000)
    assert first.path is not None
    kept = (first.path / "metrics.jsonl").read_bytes()
    again = job(small(place), tmp_path)
    assert (again.state, again.exit_code) == ("failed", 2)
    assert read_state(first.path)[:2] == ("failed", 12)
    assert "other_data: " in read_state(first.path).reason
    shutil.rmtree(place)
    shutil.copytree(data, place)
    assert job(small(place), tmp_path) == first
    assert read_state(first.path).state == "done"
    assert (first.path / "metrics.jsonl").read_bytes() == kept


def test_a_job_that_was_trained_on_by_hand_is_no_result_of_the_sweep(data: Path, tmp_path: Path) -> None:
    config = small(data, trainer__max_steps=4)
    path = job(config, tmp_path).path
    assert path is not None
    launch(small(data, trainer__max_steps=8, resume=str(path)), path, {})
    assert job(config, tmp_path).state == "failed"
    assert "trainer.max_steps=8 (the sweep: 4)" in read_state(path).reason


def test_a_done_job_whose_results_are_lost_is_no_done_job(data: Path, tmp_path: Path) -> None:
    config = small(data, trainer__max_steps=4)
    path = job(config, tmp_path).path
    assert path is not None
    (path / "metrics.jsonl").rename(path / "kept")
    assert job(config, tmp_path) == Ended(path, "failed", exit_code=2)
    assert "metrics.jsonl is gone" in read_state(path).reason
    (path / "kept").rename(path / "metrics.jsonl")
    assert job(config, tmp_path).state == "done"


def test_a_done_job_says_again_what_it_is_where_that_was_lost(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "harness")
    config = small(data, trainer__max_steps=4)
    path = job(config, tmp_path).path
    assert path is not None
    assert f"resume={path} run.name=NEW_NAME trainer.max_steps=8" in caplog.text
    said = (path / "job.json").read_bytes()
    (path / "job.json").write_text("{")
    assert job(config, tmp_path).state == "done"
    assert (path / "job.json").read_bytes() == said


def test_a_failure_is_in_the_status_also_where_the_log_cannot_be_written(data: Path, tmp_path: Path) -> None:
    config = small(data, trainer__max_steps=4)
    path = tmp_path / f"any-{identity(config)[:8]}"
    (path / "train.log").mkdir(parents=True)
    assert job(config, tmp_path).state == "failed"
    assert "train.log" in read_state(path).reason
    (path / "train.log").rmdir()
    assert job(config, tmp_path).state == "done"


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (UserError("x"), "user", 2),
        (RunFailed("x", reason="diverged"), "diverged", 1),
        (MemoryError(), "out_of_memory", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory", 1),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory", 1),
        (RuntimeError("CUDA driver error: out of memory"), "out_of_memory", 1),
        (OSError(28, "No space left on device", "x"), "disk", 1),
        (RuntimeError("x"), "error", 1),
    ],
)
def test_what_ended_a_job_is_told_apart(error: Exception, reason: str, code: int) -> None:
    assert (failure.reason_of(error), failure.exit_code(error)) == (reason, code)
    assert (failure.in_words(error) is None) == (reason == "error")


def test_what_a_compiler_met_is_what_ended_a_job() -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def compile_it() -> None: ...

    full = BackendCompilerFailed(compile_it, RuntimeError("Triton Error [CUDA]: out of memory"), None)
    assert failure.reason_of(full) == "out_of_memory"
    lacking = BackendCompilerFailed(compile_it, FileNotFoundError(2, "No such file", "gcc"), None)
    assert failure.reason_of(lacking) == "error"
    words = failure.in_words(lacking)
    assert words is not None
    assert "torch.compile failed: FileNotFoundError: [Errno 2] No such file: 'gcc'" in words
    assert "compile=false" in words


def test_a_failed_job_leaves_its_model_to_nobody(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds it when the memory is given back keeps it from the next job, and from other processes."""
    models, left = list["weakref.ref[object]"](), list[bool]()
    released = sweep_job.release

    def fails(run: Run, *_: object) -> None:
        models.append(weakref.ref(run.model))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def looks() -> None:
        released()
        left.extend(model() is not None for model in models)

    monkeypatch.setattr(trainer, "train_step", fails)
    monkeypatch.setattr(sweep_job, "release", looks)
    assert job(small(data), tmp_path).state == "failed"
    assert left == [False]
