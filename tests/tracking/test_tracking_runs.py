"""W&B beside a whole run: a mirror of metrics.jsonl, and never its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints.checkpoint import step_dir
from harness.config import TrainConfig
from harness.config_groups import WandbTrackerConfig
from harness.storage import open_store
from harness.tracking.jsonl import read_rows
from tests.helpers_runs import (
    ROOT,
    run,
    tiny_config,
    train_py,
    train_py_from_nothing,
    train_rows,
    write_text_set,
)
from tests.tracking.wandb_reader import read_run


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of the person who runs the tests, and no file in their home."""
    for name in ("HOME", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()


def tracked(data: Path, **changes: Any) -> TrainConfig:
    return tiny_config(data, **{"tracker": WandbTrackerConfig(mode="offline"), **changes})


def merged(path: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl by step, as W&B keeps it: an evaluation's row and its step's row are one."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_rows(path / "metrics.jsonl"):
        by_step.setdefault(row["step"], {}).update(row)
    return by_step


def logged(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {step: {k: v for k, v in row.items() if not k.startswith("_")} for step, row in rows.items()}


def test_the_offline_file_holds_config_digests_and_the_cursor_of_every_row(tmp_path: Path) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    run(tracked(data), path)
    mirror, store = read_run(path / "wandb"), open_store(data, "train")
    assert mirror.config["loader"]["seq_len"] == 16
    assert mirror.config["optimizer"]["betas"] == [0.9, 0.95]
    assert mirror.config["data/metadata_sha256"] == store.metadata_sha256
    assert mirror.config["data/content_sha256"] == store.content_sha256
    assert mirror.summary["data/metadata_sha256"] == store.metadata_sha256
    assert logged(mirror.rows) == merged(path)
    assert all({"position", "epoch", "tokens"} <= set(row) for row in mirror.rows.values())
    assert mirror.exit_code == 0


def test_the_summary_has_the_figures_of_the_whole_run(tmp_path: Path) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    run(tracked(data, trainer__log_batch_hash=False, trainer__log_interval=5), path)
    summary = read_run(path / "wandb").summary
    trainer = json.loads((step_dir(path, 12) / "trainer.json").read_text())
    for name in ("best_val_loss", "best_step", "data_chain", "peak_memory_mb"):
        assert summary[name] == trainer[name]
    assert (summary["unique_tokens"], summary["mean_coverage"]) == (12 * 64, 1.0)


def test_a_run_finishes_where_wandb_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "broken" / "wandb").mkdir(parents=True)
    (tmp_path / "broken" / "wandb" / "__init__.py").write_text("raise ImportError('half installed')\n")
    data = write_text_set(tmp_path / "set")
    result = train_py_from_nothing(
        *words(data), cwd=tmp_path, PYTHONPATH=f"{tmp_path / 'broken'}:{ROOT}", PYTHONPROFILEIMPORTTIME="1"
    )
    assert result.returncode == 0, result.stderr
    assert "half installed" in result.stdout
    assert len(train_rows(tmp_path / "runs" / "one")) == 4
    # An interpreter of its own shows what a run imports: nothing that takes a second and has no use here.
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
    assert {"torch", "harness.training.trainer"} <= imported
    assert not {"torch._dynamo", "sympy", "h5py", "harness.prepare.pipeline"} & imported


def test_a_run_finishes_where_the_server_cannot_be_reached(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set")
    result = train_py(
        *words(data), "tracker.mode=online", "tracker.init_timeout=2", cwd=tmp_path,
        WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    path = tmp_path / "runs" / "one"
    assert len(train_rows(path)) == 4
    assert logged(read_run(path / "wandb").rows) == merged(path)


def words(data: Path) -> list[str]:
    return [
        f"data.path={data}", "run.name=one", "loader.seq_len=16", "loader.batch_size=4", "model.n_layer=1",
        "model.n_head=2", "model.n_embd=32", "trainer.max_steps=4", "trainer.log_batch_hash=true",
        "evaluation.tokens=200",
    ]  # fmt: skip
