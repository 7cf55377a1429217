"""Runs over padded rows: padding teaches nothing, and all that a stream's run promises holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from harness.checkpoints import checkpoint
from harness.config import TrainConfig
from harness.config_groups import Hdf5DataConfig, PaddedRowsConfig
from tests.helpers_runs import (
    rows,
    run,
    tiny_config,
    train_rows,
    weights,
    write_row_set,
    write_text_set,
)
from tests.helpers_sets import RowShard, random_rows, write_rows


def row_config(data: Path, batch_size: int = 4, seq_len: int = 16, **changes: Any) -> TrainConfig:
    return tiny_config(data, loader=PaddedRowsConfig(seq_len=seq_len, batch_size=batch_size), **changes)


def padding(count: int, width: int = 17) -> RowShard:
    return np.zeros((count, width), "<u2"), np.zeros((count, width), bool)


def log_of(path: Path) -> str:
    return (path / "train.log").read_text()


def test_resume_is_bit_exact_into_the_next_epoch(tmp_path: Path) -> None:
    """51 rows are 3 batches of 16 and a rest, so 5 steps run into the second epoch."""
    data = write_row_set(tmp_path / "set")
    run(row_config(data, batch_size=16, trainer__max_steps=5), tmp_path / "straight")
    assert [row["epoch"] for row in train_rows(tmp_path / "straight")] == [0, 0, 0, 1, 1]
    for stop in (2, 3):  # inside an epoch, and at its end
        path = tmp_path / str(stop)
        run(row_config(data, batch_size=16, trainer__max_steps=stop), path)
        run(row_config(data, batch_size=16, trainer__max_steps=5, resume=str(path)), path)
        assert train_rows(path) == train_rows(tmp_path / "straight")
        assert weights(path, 5) == weights(tmp_path / "straight", 5)


def test_both_storages_train_alike(tmp_path: Path) -> None:
    npy = write_row_set(tmp_path / "npy")
    hdf5 = write_row_set(tmp_path / "hdf5", storage={"format": "hdf5"})
    run(row_config(npy, trainer__max_steps=3), tmp_path / "a")
    config = row_config(hdf5, trainer__max_steps=3)
    config.data = Hdf5DataConfig(path=str(hdf5))
    run(config, tmp_path / "b")
    a, b = ([row | {"data_chain": None} for row in rows(tmp_path / name)] for name in "ab")
    assert a == b  # apart from the chain, which begins with the set's own digest
    assert weights(tmp_path / "a", 3) == weights(tmp_path / "b", 3)


def test_batches_of_padding_change_nothing_and_are_said_once(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "set",
        {"train": [padding(40), random_rows(1, 17, seed=2)], "val": [random_rows(20, 17, seed=1)]},
        preparation={"corpus": "stdlib"},
    )  # the one row with text comes after the first six batches
    config = row_config(data, trainer__max_steps=6, evaluation__interval=1, checkpoint__interval=1)
    config.loader.seed = 3
    run(config, tmp_path / "run")
    logged = train_rows(tmp_path / "run")
    assert [(row["loss"], row["grad_norm"]) for row in logged] == [(0.0, 0.0)] * 6
    assert len({row["val_loss"] for row in rows(tmp_path / "run") if "val_loss" in row}) == 1
    assert weights(tmp_path / "run", 1) == weights(tmp_path / "run", 6)
    assert log_of(tmp_path / "run").count("the batch has no target") == 1


def test_old_momentum_moves_nothing_in_a_batch_of_padding(tmp_path: Path) -> None:
    """A set of which half of the batches, of one row each, are padding: those steps keep the weights."""
    half = [random_rows(20, 17, seed=3), padding(20)]
    data = write_rows(tmp_path / "set", {"train": half, "val": half[:1]}, preparation={"corpus": "stdlib"})
    path = tmp_path / "run"
    run(
        row_config(
            data, batch_size=1, trainer__max_steps=8, checkpoint__interval=1, checkpoint__keep_last=None
        ),
        path,
    )
    losses = [row["loss"] for row in train_rows(path)]
    assert 0 < sum(loss == 0 for loss in losses) < 8
    assert all(math.isfinite(loss) for loss in losses)
    for step in range(2, 9):
        assert (weights(path, step) == weights(path, step - 1)) == (losses[step - 1] == 0)


def test_rows_of_padding_in_a_batch_are_said_once_and_do_not_count(tmp_path: Path) -> None:
    full = np.arange(17 * 20, dtype="<u2").reshape(20, 17) % 200 + 1, np.ones((20, 17), bool)
    data = write_rows(
        tmp_path / "set", {"train": [full, padding(20)], "val": [full]}, preparation={"corpus": "stdlib"}
    )
    run(row_config(data, batch_size=40, trainer__max_steps=2), tmp_path / "run")
    assert log_of(tmp_path / "run").count("20 of the batch's 40 sequences have no target") == 1
    # A fresh model is near uniform over 257 ids; counted over padding too, the mean would be half of that.
    assert train_rows(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(257), rel=0.02)


def test_rows_wider_than_the_sequence_say_what_is_never_read(tmp_path: Path) -> None:
    data = write_row_set(tmp_path / "set", width=17)
    run(row_config(data, seq_len=8, trainer__max_steps=2), tmp_path / "run")
    masks = [np.load(data / f"train_0000{i}.mask.npy") for i in (0, 1)]
    lost = sum(int(mask[:, 9:].sum()) for mask in masks)
    assert f"{lost} tokens that no epoch reads" in log_of(tmp_path / "run")
    assert all(math.isfinite(row["loss"]) for row in train_rows(tmp_path / "run"))


def test_rows_can_be_validated_on_a_stream(tmp_path: Path) -> None:
    """To compare loaders, runs of each are evaluated on one stream."""
    stream, data = write_text_set(tmp_path / "stream"), write_row_set(tmp_path / "rows")
    still: dict[str, Any] = {"optimizer__lr": 0.0, "optimizer__weight_decay": 0.0, "trainer__max_steps": 1}
    run(row_config(data, evaluation__set=str(stream), **still), tmp_path / "run")
    run(tiny_config(stream, **still), tmp_path / "other")
    ours, theirs = (next(r for r in rows(tmp_path / n) if "val_loss" in r) for n in ("run", "other"))
    assert ours["val_loss"] == theirs["val_loss"]
    assert ours["val_bits_per_byte"] == theirs["val_bits_per_byte"]


def test_tokens_are_counted_as_batches_times_length(tmp_path: Path) -> None:
    data = write_row_set(tmp_path / "set")
    config = row_config(data, trainer__max_steps=None, trainer__max_tokens=3 * 64, schedule__total_steps=None)
    run(config, tmp_path / "run")
    assert [row["tokens"] for row in train_rows(tmp_path / "run")] == [64, 128, 192]
    assert [row["position"] for row in train_rows(tmp_path / "run")] == [4, 8, 12]
    saved = checkpoint.open_checkpoint(checkpoint.find(tmp_path / "run"))
    assert saved.loader["strategy"] == "padded_rows"
    assert saved.trainer["reference_sha256"] is None
    assert "wpe.weight" in load_file(saved.path / "model.safetensors")
