"""A resumed run goes on where it stood (that it is exact: test_exact_resume.py), or is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.checkpoints import checkpoint
from harness.config import TrainConfig
from harness.config_groups import Hdf5DataConfig, PaddedRowsConfig, SlidingWindowConfig
from harness.errors import UserError
from tests.helpers_runs import rows, run, snapshot, tiny_config, train_rows, weights, write_text_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps without a stop."""
    path = tmp_path_factory.mktemp("runs") / "straight"
    run(tiny_config(data), path)
    return path


def test_a_checkpoint_at_an_epochs_end_is_saved_as_that_epochs_end(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set", train_tokens=300)
    run(tiny_config(data, trainer__max_steps=4), tmp_path / "run")
    saved = checkpoint.open_checkpoint(checkpoint.step_dir(tmp_path / "run", 4))
    assert (saved.trainer["epoch"], saved.loader["position"]) == (0, 256)


def test_rows_past_the_checkpoint_are_cut_before_going_on(data: Path, straight: Path, tmp_path: Path) -> None:
    """A run killed at step 7 has rows that its checkpoint of step 4 does not know."""
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    lost = {"step": 5, "loss": 9.9, "position": 320}
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(lost) + "\n" + json.dumps(lost | {"step": 6}) + '\n{"step": 7, "lo')
    run(tiny_config(data, resume=str(path)), path)
    steps = [row["step"] for row in rows(path) if "loss" in row]
    assert steps == list(range(1, 13))
    assert train_rows(path) == train_rows(straight)


def test_an_older_checkpoint_starts_a_branch_and_leaves_the_run_as_it_is(
    data: Path, straight: Path, tmp_path: Path
) -> None:
    before = snapshot(straight)
    branch = tmp_path / "branch"
    run(tiny_config(data, resume=str(checkpoint.step_dir(straight, 8))), branch)
    assert snapshot(straight) == before
    assert [row["step"] for row in train_rows(branch)] == [9, 10, 11, 12]
    assert weights(branch, 12) == weights(straight, 12)
    trainer = checkpoint.open_checkpoint(checkpoint.step_dir(branch, 12)).trainer
    original = checkpoint.open_checkpoint(checkpoint.step_dir(straight, 12)).trainer
    assert trainer["parent"] == {
        "run_id": original["run_id"], "path": str(straight), "step": 8, "wandb_id": None,
    }  # fmt: skip
    assert trainer["run_id"] != original["run_id"]
    assert json.loads((branch / "status.json").read_text())["parent"]["step"] == 8


def test_a_finished_run_is_already_complete_and_not_touched(data: Path, straight: Path) -> None:
    before = snapshot(straight)
    outcome = run(tiny_config(data, resume=str(straight)), straight)
    assert (outcome.step, outcome.stopped) == (12, False)
    assert snapshot(straight) == before


def test_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(
    data: Path, straight: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    for stop in (4, 8, 12, 12):
        run(tiny_config(data, trainer__max_steps=stop, resume="auto"), path)
    assert train_rows(path) == train_rows(straight)


def test_a_fresh_start_into_a_run_is_refused(data: Path, straight: Path) -> None:
    before = snapshot(straight)
    with pytest.raises(UserError, match=r"already holds a run .*step 12.*resume="):
        run(tiny_config(data), straight)
    assert snapshot(straight) == before


@pytest.fixture(scope="module")
def sliding(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of seeded windows, every key of the loader at its default."""
    path = tmp_path_factory.mktemp("runs") / "sliding"
    run(window_config(data, trainer__max_steps=2), path)
    return path


def window_config(data: Path, seq_len: int = 16, batch_size: int = 4, **changes: Any) -> TrainConfig:
    keys = {
        key.removeprefix("loader__"): changes.pop(key) for key in [*changes] if key.startswith("loader__")
    }
    return tiny_config(
        data, loader=SlidingWindowConfig(seq_len=seq_len, batch_size=batch_size, **keys), **changes
    )


def test_a_default_that_is_spelt_out_is_no_change(data: Path, sliding: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sliding, tmp_path / "run"))
    run(window_config(data, loader__stride=16, trainer__max_steps=3, resume=str(path)), path)
    assert "loader.stride" not in (path / "train.log").read_text()


def test_a_checkpoint_from_before_a_key_existed_has_its_default(
    data: Path, straight: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=2), path)
    folder = checkpoint.step_dir(path, 2)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["loader"]["mask_boundary"], config["trainer"]["dpo_beta"], config["init_from"]
    trainer = json.loads((folder / "trainer.json").read_text())
    del trainer["init_from"], trainer["reference_sha256"], trainer["data_changes"]
    rewrite(folder, "config.yaml", yaml.safe_dump(config))
    rewrite(folder, "trainer.json", json.dumps(trainer))
    run(tiny_config(data, resume=str(path)), path)
    assert train_rows(path) == train_rows(straight)


def rewrite(folder: Path, name: str, text: str) -> None:
    """Replace a checkpoint's file, and what its index says of it."""
    (folder / name).write_text(text)
    index = json.loads((folder / "checkpoint.json").read_text())
    index["files"][name] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(index))


def test_changed_data_is_refused_naming_the_field_and_both_digests(straight: Path, tmp_path: Path) -> None:
    changed = write_text_set(tmp_path / "set", tokenizer={"name": "byte", "sha256": "0" * 64})
    before = snapshot(straight)
    with pytest.raises(UserError) as error:
        run(tiny_config(changed, resume=str(straight), trainer__max_steps=20), straight)
    saved = checkpoint.open_checkpoint(checkpoint.find(straight))
    text = str(error.value)
    assert saved.trainer["metadata_sha256"] in text
    assert "tokenizer.sha256: then None, now " + "0" * 64 in text
    assert "the same tokens" in text
    assert snapshot(straight) == before


def test_other_tokens_are_refused_as_other_data(straight: Path, tmp_path: Path) -> None:
    other = write_text_set(tmp_path / "set", train_tokens=3002)
    with pytest.raises(UserError, match="other data"):
        run(tiny_config(other, resume=str(straight), trainer__max_steps=20), straight)


def test_shards_that_differ_are_counted_and_not_listed(straight: Path, tmp_path: Path) -> None:
    other = write_text_set(tmp_path / "set", train_tokens=3002)
    with pytest.raises(UserError, match="other data") as error:
        run(tiny_config(other, resume=str(straight), trainer__max_steps=20), straight)
    assert "splits.train.shards: then 2, now 2, different from number 0 on" in str(error.value)
    assert ".npy" not in str(error.value)


def test_a_setting_that_may_not_change_is_refused_before_another_set_is_prepared(
    data: Path, straight: Path, tmp_path: Path
) -> None:
    loader = PaddedRowsConfig(seq_len=16, batch_size=4)
    config = tiny_config(data, loader=loader, resume=str(straight))
    config.data.path, config.data.root = None, str(tmp_path / "data")
    with pytest.raises(UserError, match=r"loader\.name: checkpoint sequential, now padded_rows") as error:
        run(config, straight)
    assert "Drop loader from the command" in str(error.value)
    assert not (tmp_path / "data").exists()


def test_a_run_that_goes_on_prepares_no_other_set(data: Path, straight: Path, tmp_path: Path) -> None:
    config = tiny_config(
        data, data=Hdf5DataConfig(root=str(tmp_path / "data")), resume=str(straight), trainer__max_steps=20
    )
    before = snapshot(straight)
    with pytest.raises(UserError, match=r"checkpoint .*set, now .*hdf5-stream: there is no prepared set"):
        run(config, straight)
    assert not (tmp_path / "data").exists()
    assert snapshot(straight) == before


def test_another_vocabulary_is_refused_with_both_sizes(straight: Path, tmp_path: Path) -> None:
    other = write_text_set(tmp_path / "set", tokenizer={"vocab_size": 300})
    with pytest.raises(UserError, match=r"vocabulary: checkpoint 257, .* 300"):
        run(tiny_config(other, resume=str(straight), trainer__max_steps=20), straight)


def test_what_may_change_is_listed_with_old_and_new(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    run(tiny_config(data, resume=str(path), trainer__max_steps=6, optimizer__lr=5e-4), path)
    log = (path / "train.log").read_text()
    assert "changed since the checkpoint: trainer.max_steps 4 -> 6" in log
    assert "changed since the checkpoint: optimizer.lr 0.001 -> 0.0005" in log
    assert train_rows(path)[-1]["lr"] < 5e-4


def test_a_moved_data_directory_is_the_same_data(straight: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(write_text_set(tmp_path / "here"), trainer__max_steps=5), path)
    moved = (tmp_path / "here").rename(tmp_path / "there")
    run(tiny_config(moved, resume=str(path)), path)
    assert train_rows(path) == train_rows(straight)
