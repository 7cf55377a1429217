"""Validation means the same whatever shape it is computed in."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config_groups import ModelConfig
from harness.errors import UserError
from harness.model import GPT
from harness.storage import open_store
from harness.training.baselines import baseline_losses
from harness.training.evaluation import bits_per_byte, evaluate
from tests.helpers_runs import rows, run, tiny_config, write_text_set
from tests.helpers_sets import write_set


def tiny_model(seq_len: int = 16) -> GPT:
    torch.manual_seed(3)
    return GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16), vocab_size=257, seq_len=seq_len)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 399, None])
def test_exactly_the_first_targets_count(tmp_path: Path, tokens: int | None) -> None:
    store = open_store(write_text_set(tmp_path / "set"), "val")
    model = tiny_model()
    count = tokens or store.total_tokens - 1
    ids = torch.from_numpy(store.read_tokens(0, count + 1).astype(np.int64))
    expected = 0.0
    with torch.no_grad():
        for start in range(0, count, 16):
            stop = min(start + 16, count)
            expected += model.loss(ids[None, start:stop], ids[None, start + 1 : stop + 1]).item()
    result = evaluate(model, store, tokens=tokens, batch_size=4, seq_len=16, autocast=nullcontext)
    assert result.tokens == count
    assert result.loss == pytest.approx(expected / count, rel=1e-6)


def test_the_batch_size_does_not_matter(tmp_path: Path) -> None:
    store, model = open_store(write_text_set(tmp_path / "set"), "val"), tiny_model()
    losses = [
        evaluate(model, store, tokens=300, batch_size=size, seq_len=16, autocast=nullcontext).loss
        for size in (1, 3, 64)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_evaluation_draws_nothing_and_leaves_the_mode(tmp_path: Path) -> None:
    store, model = open_store(write_text_set(tmp_path / "set"), "val"), tiny_model().train()
    before = torch.get_rng_state()
    evaluate(model, store, tokens=100, batch_size=4, seq_len=16, autocast=nullcontext)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_bits_a_byte_count_the_bytes_of_the_split(tmp_path: Path) -> None:
    store = open_store(write_text_set(tmp_path / "set", val_tokens=400), "val")
    assert bits_per_byte(math.log(2), store) == pytest.approx(1.0)
    assert bits_per_byte(1.0, store) == pytest.approx(1 / math.log(2))


def test_another_set_can_be_validated_on(tmp_path: Path) -> None:
    data, other = write_text_set(tmp_path / "set"), write_text_set(tmp_path / "other", val_tokens=150)
    run(tiny_config(data, evaluation__set=str(other)), tmp_path / "other_run")
    run(tiny_config(data), tmp_path / "run")
    ours, theirs = (
        [r["val_loss"] for r in rows(tmp_path / n) if "val_loss" in r] for n in ("other_run", "run")
    )
    assert ours != theirs
    assert [r for r in rows(tmp_path / "other_run") if "loss" in r] == [
        r for r in rows(tmp_path / "run") if "loss" in r
    ]


def test_a_set_of_another_tokenizer_is_refused_for_validation(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set")
    other = write_text_set(tmp_path / "other", tokenizer={"name": "gpt2", "vocab_size": 300})
    with pytest.raises(UserError, match=r"evaluation\.set.*gpt2 \(300 ids\).*byte \(257\)"):
        run(tiny_config(data, evaluation__set=str(other)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("val", [[], [[5]]])
def test_a_validation_split_without_a_target_is_refused(tmp_path: Path, val: list[list[int]]) -> None:
    data = write_set(
        tmp_path / "set", {"train": [list(range(200))], "val": val}, preparation={"corpus": "stdlib"}
    )
    with pytest.raises(UserError, match=r"needs 17 tokens, but val has [01] "):
        run(tiny_config(data), tmp_path / "run")


def test_baselines_are_what_counting_gives(tmp_path: Path) -> None:
    train, val = [1, 2, 1, 2, 1, 3], [1, 2, 1, 3]
    data = write_set(tmp_path / "set", {"train": [train], "val": [val]}, tokenizer={"vocab_size": 4})
    losses = baseline_losses(open_store(data, "train"), open_store(data, "val"), 100)
    unigram = np.array([1, 3, 3, 2]) / 9  # targets 2 1 2 1 3, one added to each of the four ids
    assert losses["unigram"] == pytest.approx(-np.log(unigram[[2, 1, 3]]).mean())
    after_one, after_two = np.array([0, 0, 2, 1]), np.array([0, 2, 0, 0])
    smoothed = [
        (after_one[2] + unigram[2]) / 4,
        (after_two[1] + unigram[1]) / 3,
        (after_one[3] + unigram[3]) / 4,
    ]
    assert losses["bigram"] == pytest.approx(-np.log(smoothed).mean())
