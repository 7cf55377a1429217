"""Runs over pairs: measured against the starting weights, which stay what they were however a run goes on."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.checkpoints import checkpoint
from harness.checkpoints.checkpoint import step_dir
from harness.config import TrainConfig
from harness.config_groups import ContrastiveRowsConfig
from harness.errors import UserError
from harness.files import sha256_file
from tests.helpers_runs import (
    rows,
    run,
    snapshot,
    tiny_config,
    train_rows,
    weights,
    write_pair_set,
    write_row_set,
    write_text_set,
)
from tests.helpers_sets import random_rows, write_rows


def pair_config(data: Path, **changes: object) -> TrainConfig:
    loader = ContrastiveRowsConfig(seq_len=16, batch_size=4)
    return tiny_config(
        data, **{"loader": loader, "trainer__max_steps": 6, "schedule__total_steps": 6} | changes
    )


def reference_of(path: Path) -> Path:
    return path / "reference.safetensors"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a stop, saved at 4 and 6, evaluated at 5 and 6."""
    path = tmp_path_factory.mktemp("runs") / "straight"
    run(pair_config(data), path)
    return path


def test_the_first_step_is_the_reference_and_a_preference_is_learnt(tmp_path: Path) -> None:
    """The preferred rows hold small ids alone, the others any."""
    splits = {
        f"{split}.{side}": [random_rows(40, 17, seed=seed, vocab_size=50 if side == "pos" else 257)]
        for seed, (split, side) in enumerate(itertools.product(("train", "val"), ("pos", "neg")))
    }
    data = write_rows(tmp_path / "set", splits, preparation={"corpus": "stdlib"})
    run(
        pair_config(
            data, model__dropout=0.0, trainer__max_steps=20, schedule__total_steps=20, optimizer__lr=1e-2
        ),
        tmp_path / "run",
    )
    first = train_rows(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(math.log(2))
    assert (first["accuracy"], first["reward_margin"]) == (0.5, 0.0)
    last = rows(tmp_path / "run")[-1]
    assert last["val_accuracy"] > 0.8
    assert last["val_loss"] < 0.5
    assert last["val_reward_margin"] > 0.5


def test_the_reference_is_the_fresh_model(data: Path, straight: Path, tmp_path: Path) -> None:
    still = {"optimizer__lr": 0.0, "optimizer__weight_decay": 0.0, "trainer__max_steps": 1}
    run(pair_config(data, **still), tmp_path / "run")
    assert reference_of(straight).read_bytes() == reference_of(tmp_path / "run").read_bytes()
    started, kept = (
        load_file(step_dir(tmp_path / "run", 1) / "model.safetensors"),
        load_file(reference_of(straight)),
    )
    assert started.keys() == kept.keys()
    assert all(torch.equal(started[name], kept[name]) for name in kept)


@pytest.mark.parametrize("stop", [1, 4])
def test_resume_is_bit_exact_against_the_same_reference(
    data: Path, straight: Path, tmp_path: Path, stop: int
) -> None:
    path = tmp_path / "run"
    run(pair_config(data, trainer__max_steps=stop), path)
    kept = snapshot(path)["reference.safetensors"]
    run(pair_config(data, resume=str(path)), path)
    assert train_rows(path) == train_rows(straight)
    assert weights(path, 6) == weights(straight, 6)
    assert snapshot(path)["reference.safetensors"] == kept


def test_every_checkpoint_names_the_reference(straight: Path) -> None:
    expected = sha256_file(reference_of(straight))
    for step in checkpoint.complete_steps(straight):
        saved = checkpoint.open_checkpoint(step_dir(straight, step))
        assert saved.trainer["reference_sha256"] == expected


def test_a_branch_has_its_parents_reference(data: Path, straight: Path, tmp_path: Path) -> None:
    run(pair_config(data, resume=str(step_dir(straight, 4))), tmp_path / "branch")
    assert reference_of(tmp_path / "branch").read_bytes() == reference_of(straight).read_bytes()
    assert weights(tmp_path / "branch", 6) == weights(straight, 6)
    ours, theirs = (
        checkpoint.open_checkpoint(step_dir(p, 6)).trainer for p in (tmp_path / "branch", straight)
    )
    assert ours["reference_sha256"] == theirs["reference_sha256"]


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_missing_or_changed_reference_is_refused_with_both_hashes(
    data: Path, straight: Path, tmp_path: Path, damage: str
) -> None:
    path = Path(shutil.copytree(straight, tmp_path / "run"))
    expected = sha256_file(reference_of(path))
    if damage == "missing":
        reference_of(path).unlink()
    else:
        content = bytearray(reference_of(path).read_bytes())
        content[-1] ^= 1
        reference_of(path).write_bytes(content)
    before = snapshot(path)
    with pytest.raises(UserError) as error:
        run(pair_config(data, resume=str(path), trainer__max_steps=9), path)
    assert expected in str(error.value)
    assert damage == "missing" or sha256_file(reference_of(path)) in str(error.value)
    assert snapshot(path) == before


def test_the_reference_of_initial_weights_is_those_weights(data: Path, tmp_path: Path) -> None:
    stream = write_text_set(tmp_path / "stream")
    run(tiny_config(stream, trainer__max_steps=3), tmp_path / "parent")
    run(pair_config(data, init_from=str(tmp_path / "parent"), model__dropout=0.0), tmp_path / "run")
    trained = load_file(step_dir(tmp_path / "parent", 3) / "model.safetensors")
    kept = load_file(reference_of(tmp_path / "run"))
    assert all(torch.equal(trained[name], kept[name]) for name in trained)
    assert train_rows(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(2))


def test_micro_batches_of_pairs_train_as_the_whole_batch(data: Path, tmp_path: Path) -> None:
    settings = {"model__dropout": 0.0, "trainer__max_steps": 3}
    run(pair_config(data, **settings), tmp_path / "whole")
    run(pair_config(data, trainer__micro_batch_size=2, **settings), tmp_path / "micro")
    for ours, theirs in zip(train_rows(tmp_path / "micro"), train_rows(tmp_path / "whole"), strict=True):
        for name in ("loss", "accuracy", "reward_margin", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5)


def test_evaluations_are_of_pairs_and_know_no_bytes(straight: Path) -> None:
    evaluations = [row for row in rows(straight) if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [5, 6]
    assert set(evaluations[0]) == {
        "step", "epoch", "tokens", "val_loss", "val_accuracy", "val_reward_margin", "position",
        "data_chain",
    }  # fmt: skip
    saved = checkpoint.open_checkpoint(step_dir(straight, 6)).trainer
    assert saved["val_loss"] == evaluations[-1]["val_loss"]
    assert saved["best_val_loss"] == min(row["val_loss"] for row in evaluations)


def test_pairs_can_be_validated_on_a_stream_or_on_rows(data: Path, tmp_path: Path) -> None:
    """How far preferences move the language model away from its text."""
    for other in (write_text_set(tmp_path / "stream"), write_row_set(tmp_path / "rows")):
        path = tmp_path / f"on_{other.name}"
        run(pair_config(data, evaluation__set=str(other), trainer__max_steps=1), path)
        (row,) = [row for row in rows(path) if "val_loss" in row]
        assert row["val_loss"] > math.log(2) * 2
        assert "val_accuracy" not in row


def test_a_run_without_a_reference_cannot_be_validated_on_pairs(data: Path, tmp_path: Path) -> None:
    stream = write_text_set(tmp_path / "stream")
    with pytest.raises(UserError, match=r"evaluation\.set=.*holds pairs.*loader=sequential"):
        run(tiny_config(stream, evaluation__set=str(data)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_beta_is_another_loss_and_refused(data: Path, straight: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.dpo_beta: checkpoint 0\.1, now 0\.5: the loss becomes"):
        run(pair_config(data, resume=str(straight), trainer__max_steps=9, trainer__dpo_beta=0.5), straight)


def test_sides_of_two_widths_train(tmp_path: Path) -> None:
    data = write_pair_set(tmp_path / "set", width=17, neg_width=9)
    run(pair_config(data, trainer__max_steps=2), tmp_path / "run")
    assert all(math.isfinite(row["loss"]) for row in train_rows(tmp_path / "run"))
