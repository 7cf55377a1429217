"""What a run came to is in summary.json, of all its starts, and never of an earlier end."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.auditing.coverage import Limits, coverage
from harness.checkpoints import checkpoint
from harness.config_groups import PaddedRowsConfig
from harness.hardware import peak_memory
from harness.hardware.peak_memory import PeakMemory
from harness.run_files import summary
from harness.storage import open_split
from tests.helpers_exact import Stop
from tests.helpers_runs import rows, run, tiny_config, write_row_set, write_text_set

FIELDS = [
    "step", "tokens", "epochs", "val_loss", "best_val_loss", "val_bits_per_byte", "best_val_bits_per_byte",
    "unique_tokens", "mean_coverage", "tokens_per_s", "data_wait_share", "peak_memory_mb", "wall_s",
    "metadata_sha256",
]  # fmt: skip
MEASURED = ("tokens_per_s", "data_wait_share", "peak_memory_mb", "wall_s")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven steps an epoch."""
    return write_text_set(tmp_path_factory.mktemp("data") / "set", train_tokens=750)


@pytest.fixture(scope="module")
def straight(data: Path) -> Path:
    path = data.parent / "straight"
    run(tiny_config(data), path)
    return path


def trainer(path: Path) -> dict[str, Any]:
    return checkpoint.open_checkpoint(checkpoint.find(path)).trainer


def written(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return values


def test_a_run_that_is_done_says_what_it_came_to(data: Path, straight: Path) -> None:
    values = summary.read(straight)
    assert values is not None
    assert list(values) == FIELDS
    evaluations = [row for row in rows(straight) if "val_loss" in row]
    best = min(evaluations, key=lambda row: float(row["val_loss"]))
    for prefix, row in (("", evaluations[-1]), ("best_", best)):
        assert values[f"{prefix}val_loss"] == row["val_loss"]
        assert values[f"{prefix}val_bits_per_byte"] == row["val_bits_per_byte"]
    counted = coverage(straight)
    assert (values["unique_tokens"], values["mean_coverage"]) == (counted.unique_tokens, 768 / 704)
    assert (values["step"], values["tokens"], values["epochs"]) == (12, 768, round(1 + 1 / 11, 6))
    assert values["metadata_sha256"] == open_split(data, "train").metadata_sha256
    assert 0 < values["data_wait_share"] < 1
    assert values["peak_memory_mb"] > 1
    assert 768 / values["tokens_per_s"] < values["wall_s"]  # evaluations and saves are no training


def test_a_run_that_was_stopped_says_so_far_and_its_end_replaces_that(
    data: Path, straight: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    with Stop.after(7).watching():
        assert run(tiny_config(data), path).stopped
    first, saved = summary.read(path), trainer(path)
    assert first is not None
    assert (first["step"], first["epochs"], first["unique_tokens"]) == (7, round(7 / 11, 6), 7 * 64)
    run(tiny_config(data, resume=str(path)), path)
    last, ended = written(path), trainer(path)
    assert {key: last[key] for key in FIELDS if key not in MEASURED} == {
        key: value for key, value in written(straight).items() if key not in MEASURED
    }
    assert last["wall_s"] > first["wall_s"]
    assert last["peak_memory_mb"] >= first["peak_memory_mb"]
    for values, state in ((first, saved), (last, ended)):
        assert values["tokens_per_s"] == pytest.approx(state["tokens"] / state["train_s"], abs=0.1)
        assert values["data_wait_share"] == pytest.approx(state["waited_s"] / state["train_s"], abs=1e-6)
        assert values["wall_s"] == pytest.approx(state["elapsed_s"], abs=1e-3)
        assert state["waited_s"] < state["train_s"] < state["elapsed_s"]
    assert ended["train_s"] > saved["train_s"]
    assert ended["waited_s"] > saved["waited_s"]


def test_a_summary_of_another_step_is_not_taken_for_the_runs(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(data), path)
    for folder in ("step-00000012", "step-00000008"):
        (path / "checkpoints" / folder / "rng.pt").write_bytes(b"")
    with Stop.restored().watching(), pytest.raises(BaseException):  # noqa: B017
        run(tiny_config(data, resume="auto"), path)
    assert summary.read(path) is None
    assert not (path / "summary.json").exists()  # it told of steps that are gone
    for values in ("", "[]", '{"step": true}', json.dumps({"step": 3})):
        (path / "summary.json").write_text(values)
        assert summary.read(path) is None  # the run is at step 4
        summary.cut_after(path, 2)
        assert not (path / "summary.json").exists()
    (path / "summary.json").write_text(json.dumps({"step": 4}))
    summary.cut_after(path, 4)
    assert summary.read(path) == {"step": 4}


def test_a_summary_makes_no_directory_hold_a_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"step": 9}))
    run(tiny_config(data, trainer__max_steps=2), tmp_path / "run")
    assert written(tmp_path / "run")["step"] == 2


def test_no_run_fails_for_its_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it cannot be written, and not where counting would take too long."""
    config = tiny_config(write_row_set(tmp_path / "set"), trainer__max_steps=3)
    config.loader = PaddedRowsConfig(seq_len=16, batch_size=4)
    monkeypatch.setattr(summary, "_STOPPED", Limits(samples=10, read_bytes=100))
    monkeypatch.setattr(summary, "_READ_BYTES_A_SECOND", 0)
    (tmp_path / "run" / "summary.json" / "in the way").mkdir(parents=True)
    assert run(config, tmp_path / "run").step == 3
    said = [line for line in caplog.messages if "summary.json" in line]
    assert [line.count("cannot be written (") for line in said] == [0, 1]
    assert (
        "has no unique_tokens and no mean_coverage: it would read 204 bytes of the set, more than 100"
        in said[0]
    )
    run(config, tmp_path / "other")
    values = written(tmp_path / "other")
    assert values["unique_tokens"] is values["mean_coverage"] is None
    assert values["step"] == 3


def test_what_is_no_number_is_null(data: Path, tmp_path: Path) -> None:
    """Also the speed of a run without a step."""
    config = tiny_config(data, trainer__max_steps=2, optimizer__lr=1e30, trainer__on_nonfinite="ignore")
    config.trainer.grad_clip = 0.0
    run(config, tmp_path / "run")
    values = written(tmp_path / "run")
    assert values["val_loss"] is values["best_val_loss"] is values["val_bits_per_byte"] is None
    assert all(math.isfinite(value) for value in values.values() if isinstance(value, float))


def test_checkpoints_from_before_these_times_load_and_only_what_was_measured_counts(
    data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=8), path)
    folder = checkpoint.find(path)
    new = ("train_s", "waited_s", "timed_tokens", "peak_memory_mb")
    content = json.dumps({k: v for k, v in trainer(path).items() if k not in new}).encode()
    (folder / "trainer.json").write_bytes(content)
    index = json.loads((folder / "checkpoint.json").read_text())
    index["files"]["trainer.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(index))
    run(tiny_config(data, resume=str(path)), path)
    assert trainer(path)["timed_tokens"] == 4 * 64
    assert written(path)["tokens_per_s"] == pytest.approx(4 * 64 / trainer(path)["train_s"], abs=0.1)


def test_a_peak_is_that_of_its_own_time() -> None:
    """What a process held before does not count for the next run in it, and what a run let go of does."""
    first = PeakMemory(torch.device("cpu"))
    before = first.megabytes()
    held = np.ones(8_000_000)
    first.sample()
    assert held[-1] == 1
    del held
    peak = first.megabytes()
    assert peak > before + 50
    assert PeakMemory(torch.device("cpu")).megabytes() < peak - 30


def test_without_the_systems_peak_it_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "_PROC", tmp_path)
    (tmp_path / "clear_refs").mkdir()  # nothing that can be written
    status = tmp_path / "status"
    status.write_text("VmHWM:\t 9000 kB\nVmRSS:\t 1000 kB\n")
    memory = PeakMemory(torch.device("cpu"))
    status.write_text("VmHWM:\t 9000 kB\nVmRSS:\t 3000 kB\n")
    memory.sample()
    status.write_text("VmHWM:\t 9000 kB\nVmRSS:\t 500 kB\n")
    assert memory.megabytes() == 3.072
    assert "the most that logged steps find" in memory.notes[0]
    status.unlink()
    assert PeakMemory(torch.device("cpu")).megabytes() > 1  # of the process's whole life
