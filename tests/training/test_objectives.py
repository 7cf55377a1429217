"""The loss of a batch is the formula it claims to be, however the batch is split."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.config_groups import ModelConfig
from harness.model import GPT, IGNORE
from harness.training.objectives import (
    LanguageModelling,
    Objective,
    Preference,
    make_preference,
    row_log_probability,
    target_counts,
)

VOCAB, PAIRS, LENGTH, BETA = 7, 3, 5, 0.3


def pair_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of `(2 * PAIRS, LENGTH)` whose rows have 0 to LENGTH targets."""
    generator = np.random.default_rng(seed)
    inputs, targets = generator.integers(0, VOCAB, (2, 2 * PAIRS, LENGTH))
    lengths = generator.permutation(np.arange(2 * PAIRS)) % (LENGTH + 1)
    targets[np.arange(LENGTH) >= lengths[:, None]] = IGNORE
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def by_hand(
    table: np.ndarray, reference: np.ndarray, inputs: np.ndarray, targets: np.ndarray
) -> tuple[float, np.ndarray]:
    """DPO's loss and its gradient for a model whose logits after token v are row v of `table`.

    d loss / d table = mean over pairs of -beta * sigmoid(-margin) * (d log p(pos) - d log p(neg)), and
    d log p(row) / d table[v] = sum over its targets t after v of (one-hot(t) - softmax(table[v])).
    """
    logs = [np.log(np.exp(t) / np.exp(t).sum(axis=1, keepdims=True)) for t in (table, reference)]
    log_p = np.zeros((2, len(inputs)))
    slopes = np.zeros((len(inputs), *table.shape))
    for row in range(len(inputs)):
        for v, t in zip(inputs[row], targets[row], strict=True):
            if t != IGNORE:
                log_p[:, row] += logs[0][v, t], logs[1][v, t]
                slopes[row, v] += np.eye(VOCAB)[t] - np.exp(logs[0][v])
    loss, gradient = 0.0, np.zeros_like(table)
    for pos in range(PAIRS):
        neg = pos + PAIRS
        margin = BETA * ((log_p[0, pos] - log_p[1, pos]) - (log_p[0, neg] - log_p[1, neg]))
        loss += np.log1p(np.exp(-margin)) / PAIRS
        gradient += -BETA / (1 + np.exp(margin)) * (slopes[pos] - slopes[neg]) / PAIRS
    return loss, gradient


def table_model(seed: int) -> nn.Embedding:
    torch.manual_seed(seed)
    return nn.Embedding(VOCAB, VOCAB)


def tiny_gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16), vocab_size=VOCAB, seq_len=LENGTH)


def gradient_of(objective: Objective, model: nn.Module, batch: tuple[Tensor, Tensor], size: int) -> Tensor:
    """All of a model's gradients as one vector, from a batch in parts of `size` samples."""
    model.zero_grad()
    weight = objective.weight(target_counts(batch[1]))
    for part in objective.split(*batch, size):
        (objective.sums(*part)["loss"] / weight).backward()
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dpo_is_its_formula_with_its_gradient(seed: int) -> None:
    model, reference = table_model(seed), table_model(seed + 10)
    inputs, targets = pair_batch(seed)
    objective = Preference(partial(row_log_probability, model), partial(row_log_probability, reference), BETA)
    loss, gradient = by_hand(
        model.weight.detach().double().numpy(), reference.weight.detach().double().numpy(),
        inputs.numpy(), targets.numpy(),
    )  # fmt: skip
    assert objective.sums(inputs, targets)["loss"].item() / PAIRS == pytest.approx(loss, rel=1e-5)
    ours = gradient_of(objective, model, (inputs, targets), PAIRS).view(VOCAB, VOCAB).numpy()
    np.testing.assert_allclose(ours, gradient, rtol=1e-4, atol=1e-6)
    assert np.abs(gradient).max() > 1e-2
    assert reference.weight.grad is None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["language", "preference"])
def test_any_micro_batch_gives_the_gradient_of_the_whole_batch(kind: str, size: int) -> None:
    model = tiny_gpt(1)
    objective: Objective = LanguageModelling(model.loss)
    if kind == "preference":
        objective = make_preference(model, tiny_gpt(2), BETA, compiled=False)
    batch = pair_batch(4)
    whole, parts = (gradient_of(objective, model, batch, n) for n in (2 * PAIRS, size))
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_a_part_of_pairs_keeps_both_rows_of_each() -> None:
    inputs = torch.arange(2 * PAIRS)[:, None].expand(-1, LENGTH)
    objective = make_preference(tiny_gpt(1), tiny_gpt(1), BETA, compiled=False)
    parts = [part[:, 0].tolist() for part, _ in objective.split(inputs, inputs, 2)]
    assert parts == [[0, 1, 3, 4], [2, 5]]


def test_a_model_that_is_the_reference_has_no_margin_and_ties_count_half() -> None:
    objective = make_preference(tiny_gpt(1), tiny_gpt(1), BETA, compiled=False)
    sums = objective.sums(*pair_batch())
    assert sums["loss"].item() == pytest.approx(PAIRS * np.log(2))
    assert sums["accuracy"].item() == PAIRS / 2
    assert sums["reward_margin"].item() == 0.0


def test_accuracy_counts_the_pairs_whose_margin_is_above_zero() -> None:
    pos_minus_neg = torch.tensor([2.0, -1.0, 0.5])
    rows = torch.cat([pos_minus_neg, torch.zeros(PAIRS)])
    objective = Preference(lambda inputs, targets: rows, lambda inputs, targets: torch.zeros(6), BETA)
    sums = objective.sums(*pair_batch())
    assert sums["accuracy"].item() == 2
    assert sums["reward_margin"].item() == pytest.approx(BETA * 1.5)


@pytest.mark.parametrize("masked", ["all", "pos"])
def test_rows_without_targets_stay_finite(masked: str) -> None:
    model = tiny_gpt(1)
    inputs, targets = pair_batch()
    targets[: 2 * PAIRS if masked == "all" else PAIRS] = IGNORE
    preference = make_preference(model, tiny_gpt(2), BETA, compiled=False)
    for objective in (LanguageModelling(model.loss), preference):
        sums = objective.sums(inputs, targets)
        assert all(torch.isfinite(value) for value in sums.values())
        if masked == "all":
            assert sums["loss"].item() == pytest.approx(0.0 if len(sums) == 1 else PAIRS * np.log(2))


def test_language_modelling_is_weighted_by_targets() -> None:
    model = tiny_gpt(1)
    inputs, targets = pair_batch()
    objective = LanguageModelling(model.loss)
    log_p = torch.log_softmax(model(inputs), dim=-1)
    places = targets != IGNORE
    expected = -log_p[places, targets[places]].mean()
    mean = objective.sums(inputs, targets)["loss"] / objective.weight(target_counts(targets))
    torch.testing.assert_close(mean, expected)
