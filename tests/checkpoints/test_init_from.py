"""`init_from=`: another run's weights and nothing else of it, or a refusal before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.checkpoints import checkpoint
from harness.config_groups import BpeTokenizerConfig, ContrastiveRowsConfig, HfTokenizerConfig
from harness.errors import UserError
from harness.files import sha256_file
from tests.helpers_runs import rows, run, tiny_config, train_rows, weights, write_pair_set, write_text_set

SHORT: dict[str, Any] = {"trainer__max_steps": 2, "schedule__total_steps": 2, "evaluation__sample_tokens": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def parent(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, saved at 2 and 4."""
    path = tmp_path_factory.mktemp("runs") / "parent"
    run(tiny_config(data, trainer__max_steps=4, checkpoint__interval=2), path)
    return path


def val_losses(path: Path) -> list[float]:
    return [row["val_loss"] for row in rows(path) if "val_loss" in row]


@pytest.mark.parametrize("named", ["run", "checkpoint"])
def test_the_weights_are_the_others_and_the_data_order_is_our_own(
    data: Path, parent: Path, tmp_path: Path, named: str
) -> None:
    source = parent if named == "run" else checkpoint.step_dir(parent, 4)
    still = SHORT | {"optimizer__lr": 0.0, "optimizer__weight_decay": 0.0}
    run(tiny_config(data, init_from=str(source), **still), tmp_path / "run")
    assert weights(tmp_path / "run", 2) == weights(parent, 4)
    assert val_losses(tmp_path / "run")[-1] == val_losses(parent)[-1]
    hashes = [row["batch_sha256"] for row in train_rows(tmp_path / "run")]
    assert hashes == [row["batch_sha256"] for row in train_rows(parent)][:2]
    saved = checkpoint.open_checkpoint(checkpoint.find(tmp_path / "run"))
    assert saved.config["init_from"] == str(source)
    assert saved.trainer["init_from"] == {
        "path": str(checkpoint.step_dir(parent, 4)),
        "step": 4,
        "model_sha256": sha256_file(checkpoint.step_dir(parent, 4) / "model.safetensors"),
    }


def test_dropout_draws_as_in_any_fresh_start(data: Path, parent: Path, tmp_path: Path) -> None:
    """Weights that a fresh start would have made anyway give the run that a fresh start gives."""
    run(
        tiny_config(data, trainer__max_steps=1, optimizer__lr=0.0, optimizer__weight_decay=0.0),
        tmp_path / "zero",
    )
    run(tiny_config(data, init_from=str(tmp_path / "zero"), **SHORT), tmp_path / "from_zero")
    run(tiny_config(data, **SHORT), tmp_path / "fresh")
    assert train_rows(tmp_path / "from_zero") == train_rows(tmp_path / "fresh")
    assert weights(tmp_path / "from_zero", 2) == weights(tmp_path / "fresh", 2)


def test_a_resume_does_not_need_the_weights_again(data: Path, parent: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(parent, tmp_path / "source"))
    config = {"init_from": str(source), "schedule__total_steps": 4}
    run(tiny_config(data, trainer__max_steps=4, **config), tmp_path / "straight")
    run(tiny_config(data, trainer__max_steps=2, **config), tmp_path / "run")
    shutil.rmtree(source)
    run(tiny_config(data, trainer__max_steps=4, resume=str(tmp_path / "run"), **config), tmp_path / "run")
    assert train_rows(tmp_path / "run") == train_rows(tmp_path / "straight")
    assert weights(tmp_path / "run", 4) == weights(tmp_path / "straight", 4)
    saved = checkpoint.open_checkpoint(checkpoint.find(tmp_path / "run"))
    assert saved.trainer["init_from"]["path"] == str(checkpoint.step_dir(source, 4))


def test_a_resume_with_other_initial_weights_is_refused(data: Path, parent: Path) -> None:
    other = str(parent / "checkpoints" / "step-00000002")
    with pytest.raises(
        UserError, match=r"init_from: checkpoint None, now .*step-00000002: .*weights already"
    ):
        run(tiny_config(data, init_from=other, resume=str(parent), trainer__max_steps=9), parent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__n_layer": 3}, r"model\.n_layer: its weights 2, this run 3\. Use model\.n_layer=2"),
        ({"model__n_head": 4}, r"model\.n_head: its weights 2, this run 4"),
        ({"model__n_embd": 16}, r"model\.n_embd: its weights 32, this run 16"),
        ({"loader__seq_len": 17}, r"loader\.seq_len: its weights 16, this run 17.*Use loader\.seq_len<=16"),
    ],
)
def test_weights_of_another_shape_are_refused_with_both_values(
    data: Path, parent: Path, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny_config(data, init_from=str(parent), **SHORT, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"vocab_size": 300}, r"byte \(300 ids.*byte \(257 ids"),
        ({"name": "gpt2"}, r"tokenizer gpt2 .* trained with byte"),
    ],
)
def test_weights_of_another_tokenizer_are_refused(
    parent: Path, tmp_path: Path, tokenizer: dict[str, object], message: str
) -> None:
    from harness.config_groups import Gpt2TokenizerConfig, TokenizerConfig

    other = write_text_set(tmp_path / "set", tokenizer=tokenizer)
    kind = Gpt2TokenizerConfig if tokenizer.get("name") == "gpt2" else TokenizerConfig
    with pytest.raises(UserError, match=message):
        run(tiny_config(other, init_from=str(parent), tokenizer=kind(), **SHORT), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_is_its_files_under_whatever_name(tmp_path: Path) -> None:
    """What a set learnt (bpe) can make another set (hf)."""
    learnt = write_text_set(tmp_path / "learnt", tokenizer={"name": "bpe", "sha256": "5" * 64})
    config = tiny_config(learnt, tokenizer=BpeTokenizerConfig(), **SHORT)
    run(config, tmp_path / "parent")
    pairs = write_pair_set(tmp_path / "pairs", tokenizer={"name": "hf", "sha256": "5" * 64})
    loader = ContrastiveRowsConfig(seq_len=16, batch_size=4)
    config = tiny_config(
        pairs, tokenizer=HfTokenizerConfig(), loader=loader, init_from=str(tmp_path / "parent"),
        evaluation__set=str(learnt), **SHORT,
    )  # fmt: skip
    run(config, tmp_path / "run")
    other = write_pair_set(tmp_path / "other", tokenizer={"name": "hf", "sha256": "6" * 64})
    config.data.path, config.evaluation.set = str(other), None
    with pytest.raises(UserError, match=r"tokenizer hf .*sha256 6{64}.* with bpe .*sha256 5{64}"):
        run(config, tmp_path / "refused")


def test_a_shorter_model_keeps_the_first_positions(data: Path, parent: Path, tmp_path: Path) -> None:
    still = SHORT | {"optimizer__lr": 0.0, "optimizer__weight_decay": 0.0, "loader__seq_len": 8}
    run(tiny_config(data, init_from=str(parent), **still), tmp_path / "run")
    ours = load_file(checkpoint.find(tmp_path / "run") / "model.safetensors")
    theirs = load_file(checkpoint.find(parent) / "model.safetensors")
    assert torch.equal(ours.pop("wpe.weight"), theirs.pop("wpe.weight")[:8])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "the first 8 of its 16 positions" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_unusable_weights_are_named_before_anything_is_written(
    data: Path, parent: Path, tmp_path: Path, damage: str
) -> None:
    source = Path(shutil.copytree(parent, tmp_path / "source"))
    model = checkpoint.find(source) / "model.safetensors"
    if damage == "missing":
        shutil.rmtree(source)
    else:
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
    expected = "init_from=.*source does not exist" if damage == "missing" else "model.safetensors: SHA-256"
    with pytest.raises(UserError, match=expected):
        run(tiny_config(data, init_from=str(source), **SHORT), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_initial_weights_says_so(parent: Path) -> None:
    trainer = json.loads((checkpoint.find(parent) / "trainer.json").read_text())
    assert trainer["init_from"] is None
    assert trainer["reference_sha256"] is None
