"""Decay acts on matrices only; the learning rate of a step is a pure function with exact ends."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from harness.config_groups import ModelConfig, OptimizerConfig, ScheduleConfig, WsdScheduleConfig
from harness.errors import UserError
from harness.model import GPT
from harness.optim import lr_at, make_optimizer

LR = 3e-3


def cosine(warmup: int = 0, low: float = 0.1) -> ScheduleConfig:
    return ScheduleConfig(name="cosine", warmup_steps=warmup, min_lr_ratio=low)


def wsd(warmup: int = 0, low: float = 0.1, decay: float = 0.2) -> WsdScheduleConfig:
    return WsdScheduleConfig(warmup_steps=warmup, min_lr_ratio=low, decay_fraction=decay)


def constant(warmup: int = 0) -> ScheduleConfig:
    return ScheduleConfig(name="constant", warmup_steps=warmup)


def test_decay_acts_on_matrices_only_and_every_parameter_is_trained_once() -> None:
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8), vocab_size=5, seq_len=4)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3, betas=[0.8, 0.9]), "cpu")
    decay, plain = optimizer.param_groups
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decay["betas"] == plain["betas"] == (0.8, 0.9)
    assert {p.dim() for p in decay["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    found = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {id(p) for p in model.parameters()}


def test_the_optimizer_is_fused_and_agrees_with_the_plain_one() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(7, 5), nn.Linear(7, 5)]
    models[1].load_state_dict(models[0].state_dict())
    config = OptimizerConfig(lr=0.01, weight_decay=0.1)
    fused = make_optimizer(models[0], config, torch.device("cpu"))
    assert fused.defaults["fused"] is True
    plain = torch.optim.AdamW(
        [
            {"params": [models[1].weight], "weight_decay": 0.1},
            {"params": [models[1].bias], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    inputs = torch.randn(3, 7)
    for step in range(1, 6):
        for model, optimizer in zip(models, (fused, plain), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * step
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight)
    torch.testing.assert_close(models[0].bias, models[1].bias)


def test_without_the_compilers_wrappers_it_is_torchs_fused_adamw_to_the_bit() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(7, 5), nn.Linear(7, 5)]
    models[1].load_state_dict(models[0].state_dict())
    ours = make_optimizer(models[0], OptimizerConfig(lr=0.01), torch.device("cpu"))
    settings = [{"params": [models[1].weight], "weight_decay": 0.1}]
    settings.append({"params": [models[1].bias], "weight_decay": 0.0})
    theirs = torch.optim.AdamW(settings, lr=0.01, betas=(0.9, 0.95), fused=True)
    inputs = torch.randn(3, 7)
    for _ in range(3):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.weight.grad is None
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # it takes the tensors as they are
        assert torch.equal(models[0].weight, models[1].weight)
        assert torch.equal(models[0].bias, models[1].bias)
    assert str(ours.state_dict()) == str(theirs.state_dict())


def test_frozen_parameters_stay_out_of_the_optimizer() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(), "cpu")
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]


@pytest.mark.parametrize("schedule", [cosine(10), wsd(10), constant(10)])
def test_warmup_step_k_of_w_has_k_over_w_of_the_rate(schedule: ScheduleConfig) -> None:
    assert [lr_at(k, LR, schedule, 100) for k in range(1, 11)] == [LR * (k / 10) for k in range(1, 11)]
    assert lr_at(1, LR, schedule, 100) == pytest.approx(LR / 10)
    assert lr_at(10, LR, schedule, 100) == LR
    assert lr_at(11, LR, schedule, 100) <= LR


# schedule, total_steps, {step: factor on the peak}
POINTS = [
    (cosine(), 100, {50: 0.55, 100: 0.1, 101: 0.1, 10_000: 0.1}),
    (cosine(20), 100, {1: 0.05, 20: 1.0, 60: 0.55, 100: 0.1, 101: 0.1}),
    (cosine(20, low=0.0), 100, {20: 1.0, 60: 0.5, 100: 0.0, 200: 0.0}),
    (cosine(0, low=1.0), 10, {1: 1.0, 5: 1.0, 10: 1.0}),
    (cosine(10), 10, {5: 0.5, 10: 1.0, 11: 1.0}),
    (cosine(), 1, {1: 0.1, 2: 0.1}),
    (cosine(1), 1, {1: 1.0, 2: 1.0}),
    (wsd(), 100, {1: 1.0, 80: 1.0, 90: 0.55, 100: 0.1, 101: 0.1, 10_000: 0.1}),
    (wsd(10), 100, {1: 0.1, 10: 1.0, 11: 1.0, 80: 1.0, 81: 0.955, 95: 0.325, 100: 0.1}),
    (wsd(low=0.0, decay=1.0), 10, {1: 0.9, 5: 0.5, 10: 0.0}),
    (wsd(decay=0.0), 10, {1: 1.0, 10: 1.0, 11: 1.0}),
    (wsd(8, low=0.0, decay=0.5), 10, {8: 1.0, 9: 0.5, 10: 0.0}),
    (wsd(10), 10, {5: 0.5, 10: 1.0, 11: 1.0}),
    (constant(), 10, {1: 1.0, 10: 1.0, 1000: 1.0}),
    (constant(4), 10, {1: 0.25, 4: 1.0, 5: 1.0, 1000: 1.0}),
    (constant(10), 10, {5: 0.5, 10: 1.0, 11: 1.0}),
]


@pytest.mark.parametrize(("schedule", "total", "points"), POINTS)
def test_the_rate_at_the_boundaries(schedule: ScheduleConfig, total: int, points: dict[int, float]) -> None:
    found = {step: lr_at(step, LR, schedule, total) for step in points}
    assert found == pytest.approx({step: LR * factor for step, factor in points.items()}, rel=1e-12)


@pytest.mark.parametrize("low", [0.0, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("total", [7, 100, 100_003])
def test_the_last_step_has_exactly_the_smallest_rate(total: int, low: float) -> None:
    assert lr_at(total, LR, cosine(3, low), total) == LR * low
    assert lr_at(total, LR, wsd(3, low), total) == LR * low


@pytest.mark.parametrize(
    ("schedule", "warmup", "decay"),
    [
        (cosine(50), 50, 950),
        (cosine(), 1, 1000),
        (cosine(999), 999, 1),
        (wsd(50), 50, 200),
        (wsd(0, decay=0.013), 1, 13),
        (wsd(900, decay=0.5), 900, 100),
        (constant(50), 50, 1),
    ],
)
def test_the_rate_never_jumps_and_rises_then_falls(schedule: ScheduleConfig, warmup: int, decay: int) -> None:
    rates = [lr_at(step, 1.0, schedule, 1000) for step in range(1, 1101)]
    steepest = {"cosine": 1.5708, "wsd": 1.0, "constant": 0.0}[schedule.name] * 0.9 / decay
    for step, (now, after) in enumerate(itertools.pairwise(rates), start=1):
        if step < warmup:
            assert 0 < after - now <= 1 / warmup + 1e-12
        else:
            assert 0 <= now - after <= steepest + 1e-12
    assert max(rates) == pytest.approx(1.0, abs=1e-5)


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"schedule\.name=linear.*cosine, wsd, constant"):
        lr_at(1, LR, ScheduleConfig(name="linear"), 10)
