"""What a checkpoint gives back to the optimizer, and what the command line says over it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.checkpoints import checkpoint
from harness.checkpoints.checkpoint import OPTIMIZER
from harness.checkpoints.restore import restore
from harness.config_groups import ModelConfig, OptimizerConfig
from harness.errors import UserError
from harness.model import GPT
from harness.optim import make_optimizer
from tests.helpers_runs import rows, run, tiny_config, train_rows, write_text_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restore")
    run(tiny_config(write_text_set(folder / "set"), trainer__max_steps=4), folder / "run")
    return folder


def test_decay_and_betas_of_the_command_line_win_over_the_checkpoints(folder: Path) -> None:
    saved = checkpoint.open_checkpoint(checkpoint.find(folder / "run"))
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32), vocab_size=257, seq_len=16)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.25, betas=[0.1, 0.2]), "cpu")
    restore(saved, model, optimizer)
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert {group["betas"] for group in groups} == {(0.1, 0.2)}
    assert {group["lr"] for group in groups} == {0.5}
    ours, theirs = optimizer.state_dict()["state"], saved.optimizer_state()["state"]
    assert all(torch.equal(ours[i][name], theirs[i][name]) for i in theirs for name in theirs[i])


def test_a_changed_decay_changes_the_next_step(folder: Path, tmp_path: Path) -> None:
    def weights_after(weight_decay: float) -> torch.Tensor:
        path = tmp_path / f"run-{weight_decay}"
        config = tiny_config(folder / "set", optimizer__weight_decay=weight_decay, trainer__max_steps=6)
        config.resume = str(checkpoint.find(folder / "run"))
        run(config, path)
        return checkpoint.open_checkpoint(checkpoint.find(path)).weights()["wte.weight"]

    assert not torch.equal(weights_after(0.1), weights_after(10.0))


def test_an_optimizer_of_other_parameters_is_refused(folder: Path) -> None:
    saved = checkpoint.open_checkpoint(checkpoint.find(folder / "run"))
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32), vocab_size=257, seq_len=16)
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        UserError, match=rf"{OPTIMIZER} does not fit this run .*the state of other parameters"
    ):
        restore(saved, model, other)


def test_everything_that_counts_goes_on(folder: Path, tmp_path: Path) -> None:
    """Over two resumes: step, epoch, tokens, seconds and the best loss."""
    data, path = write_text_set(tmp_path / "set", train_tokens=300), tmp_path / "run"
    elapsed = []
    for stop in (3, 6, 9):
        run(tiny_config(data, resume="auto", trainer__max_steps=stop, evaluation__interval=3), path)
        elapsed.append(checkpoint.open_checkpoint(checkpoint.find(path)).trainer["elapsed_s"])
    trainer = checkpoint.open_checkpoint(checkpoint.find(path)).trainer
    losses = {row["step"]: row["val_loss"] for row in rows(path) if "val_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert (trainer["step"], trainer["epoch"], trainer["tokens"]) == (9, 2, 9 * 64)
    assert (trainer["best_step"], trainer["best_val_loss"]) == (best, losses[best])
    assert trainer["val_loss"] == losses[9]
    assert 0 < elapsed[0] < elapsed[1] < elapsed[2]
    assert [row["epoch"] for row in train_rows(path)] == [0] * 4 + [1] * 4 + [2]


def test_the_loss_of_an_evaluation_made_after_its_save_is_not_forgotten(folder: Path, tmp_path: Path) -> None:
    """A stop left it out, the run that went on made it and was killed before it saved again."""
    data, path = folder / "set", tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4, evaluation__interval=100), path)
    file = path / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["val_loss"] = 1.5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tiny_config(data, trainer__max_steps=6, evaluation__interval=100, resume=str(path)), path)
    trainer = checkpoint.open_checkpoint(checkpoint.find(path)).trainer
    assert (trainer["best_val_loss"], trainer["best_step"]) == (1.5, 4)
