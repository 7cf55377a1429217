"""A set that grew is named as that; with `resume_accept=[data]` a run in file order goes on into it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import checkpoint
from harness.config_checks import validate
from harness.config_groups import SlidingWindowConfig
from harness.errors import UserError
from harness.resuming import growth
from harness.storage.manifest import load_manifest
from tests.helpers_runs import run, snapshot, tiny_config, train_rows, weights
from tests.helpers_sets import write_set


def write_shards(directory: Path, shards: int, **overrides: object) -> Path:
    """A set of `shards` train shards of 200 tokens; fewer shards are a prefix of more."""
    tokens = np.random.default_rng(7).integers(0, 257, (6, 200)).tolist()
    overrides.setdefault("preparation", {"corpus": "stdlib"})
    return write_set(directory, {"train": tokens[:shards], "val": [tokens[5], tokens[4]]}, **overrides)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set of two shards, and a run over it that stopped at step 4 of its epoch's 6."""
    folder = tmp_path_factory.mktemp("grown")
    run(tiny_config(write_shards(folder / "set", 2), trainer__max_steps=4), folder / "run")
    return folder


@pytest.fixture
def grown(stopped: Path, tmp_path: Path) -> Path:
    """A copy of that folder, whose set has four shards by now."""
    folder = Path(shutil.copytree(stopped, tmp_path / "folder"))
    shutil.rmtree(folder / "set")
    write_shards(folder / "set", 4)
    return folder


def test_a_grown_set_is_refused_by_name_with_the_word_that_accepts_it(grown: Path) -> None:
    before = snapshot(grown / "run")
    with pytest.raises(UserError, match=r"same prefix, 2 shards added: resume_accept=\[data\]"):
        run(tiny_config(grown / "set", resume=str(grown / "run")), grown / "run")
    assert snapshot(grown / "run") == before


def test_a_run_in_file_order_goes_on_into_the_new_shards(grown: Path, tmp_path: Path) -> None:
    path = grown / "run"
    old = load_manifest(write_shards(tmp_path / "old", 2)).metadata_sha256
    new = load_manifest(grown / "set").metadata_sha256
    run(tiny_config(grown / "set", resume=str(path), resume_accept=["data"]), path)
    run(tiny_config(grown / "set"), tmp_path / "straight")
    hashes = [[row["batch_sha256"] for row in train_rows(p)] for p in (path, tmp_path / "straight")]
    assert hashes[0] == hashes[1]
    assert {row["epoch"] for row in train_rows(path)} == {0}
    assert weights(path, 12) == weights(tmp_path / "straight", 12)
    saved = checkpoint.open_checkpoint(checkpoint.find(path))
    assert saved.loader["metadata_sha256"] == saved.trainer["metadata_sha256"] == new
    assert saved.trainer["data_changes"] == [{"step": 4, "metadata_sha256": old}]
    assert load_manifest(grown / "set").raw == json.loads((path / "manifest.json").read_text())
    assert growth.recorded_manifest(path, old) == load_manifest(tmp_path / "old").raw
    assert f"2 shards added, metadata_sha256: checkpoint {old}" in (path / "train.log").read_text()


def test_what_was_accepted_once_is_the_data_of_the_run_from_then_on(grown: Path) -> None:
    path = grown / "run"
    run(tiny_config(grown / "set", resume=str(path), resume_accept=["data"], trainer__max_steps=6), path)
    run(tiny_config(grown / "set", resume=str(path), trainer__max_steps=8), path)
    trainer = checkpoint.open_checkpoint(checkpoint.find(path)).trainer
    assert [change["step"] for change in trainer["data_changes"]] == [4]
    assert json.loads((path / "checkpoints/step-00000008/trainer.json").read_text()) == trainer


def test_an_older_checkpoint_still_knows_the_set_it_was_made_from(grown: Path, tmp_path: Path) -> None:
    path = grown / "run"
    run(tiny_config(grown / "set", resume=str(path), resume_accept=["data"], trainer__max_steps=6), path)
    older = str(checkpoint.step_dir(path, 4))
    with pytest.raises(UserError, match="same prefix, 2 shards added"):
        run(tiny_config(grown / "set", resume=older), tmp_path / "branch")


def test_an_order_over_all_samples_cannot_go_on(tmp_path: Path) -> None:
    loader = SlidingWindowConfig(seq_len=16, batch_size=4)
    path = tmp_path / "run"
    run(tiny_config(write_shards(tmp_path / "set", 2), loader=loader, trainer__max_steps=2), path)
    write_shards(tmp_path / "set", 3)
    for accept in ([], ["data"]):
        config = tiny_config(tmp_path / "set", loader=loader, resume=str(path), resume_accept=accept)
        with pytest.raises(UserError, match=r"1 shard added: the order of loader=sliding_window depends"):
            run(config, path)


@pytest.mark.parametrize("change", ["token", "tokenizer", "fewer", "val"])
def test_only_more_of_the_same_counts_as_growth(grown: Path, change: str) -> None:
    data = grown / "set"
    shutil.rmtree(data)
    write_shards(
        data, 1 if change == "fewer" else 4, tokenizer={"sha256": "0" * 64 if change == "tokenizer" else None}
    )
    raw = load_manifest(data).raw
    if change in ("token", "val"):
        raw["splits"]["train" if change == "token" else "val"]["shards"][0]["sha256"] = "1" * 64
        (data / "metadata.json").write_text(json.dumps(raw))
    config = tiny_config(data, data__verify="headers", resume=str(grown / "run"), resume_accept=["data"])
    with pytest.raises(UserError, match="other data"):
        run(config, grown / "run")


def test_nothing_else_can_be_accepted(grown: Path) -> None:
    with pytest.raises(
        UserError, match=r"resume_accept=\[dat\]: there is no such change.*did you mean data\?"
    ):
        validate(tiny_config(grown / "set", resume=str(grown / "run"), resume_accept=["dat"]))


def test_rows_and_pairs_grow_by_their_shards() -> None:
    def raw(train: int, layout: str) -> dict[str, object]:
        shards = [{"file": f"{i}", "sha256": f"{i}"} for i in range(train)]
        split: dict[str, object] = {"shards": shards}
        if layout == "contrastive":
            split = {"pos": {"shards": shards}, "neg": {"shards": shards}}
        return {
            "format_version": 2, "storage": {"layout": layout}, "tokenizer": {},
            "splits": {"train": split, "val": split},
        }  # fmt: skip

    for layout in ("rows", "contrastive"):
        assert growth.added_shards(raw(2, layout), raw(5, layout)) == 3
        assert growth.added_shards(raw(2, layout), raw(2, layout)) is None
        assert growth.added_shards({}, raw(2, layout)) is None
