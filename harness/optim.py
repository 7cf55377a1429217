"""The optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.config_groups import MuonConfig, OptimizerConfig, ScheduleConfig, WsdScheduleConfig
from harness.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, device: torch.device | str
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, fused on CUDA and CPU; or Muon over the hidden matrices of them.

    Groups: with `MuonConfig` first Muon's; then matrices and embeddings with `weight_decay`, then biases and
    norms without. Their `lr` is a placeholder: the trainer sets it before each step by `lr_at`.
    """
    import torch

    from harness.adamw import AdamW

    hidden = hidden_matrices(model) if isinstance(config, MuonConfig) else []
    chosen = {id(parameter) for parameter in hidden}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    fused = torch.device(device).type in ("cuda", "cpu")
    if not isinstance(config, MuonConfig):
        return AdamW(groups, lr=config.lr, betas=(beta1, beta2), fused=fused)
    check_available(config)
    from harness.muon import MuonAdamW

    return MuonAdamW(
        hidden, groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum,
        betas=(beta1, beta2), fused=fused,
    )  # fmt: skip


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer make its state, by a step that changes no weight."""
    import torch

    settings = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)


def check_available(config: OptimizerConfig) -> None:
    """Raises `UserError` where the installed torch has no such optimizer."""
    import torch

    if isinstance(config, MuonConfig) and not hasattr(torch.optim, "Muon"):
        raise UserError(
            "optimizer=muon is torch.optim.Muon, which came with torch 2.9, and this is torch "
            f"{torch.__version__}: use a newer one, or optimizer=adamw"
        )


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The trainable weights of linear maps: from states to states, so neither embeddings nor the head."""
    from torch import nn

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [module.weight for module in linear if module.weight.requires_grad]


def state_numbers(model: nn.Module, config: OptimizerConfig) -> int:
    """How many numbers the optimizer keeps: two moments of a parameter, of Muon's one."""
    hidden = hidden_matrices(model) if isinstance(config, MuonConfig) else []
    everything = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return 2 * everything - sum(weight.numel() for weight in hidden)


def copied_numbers(model: nn.Module, config: OptimizerConfig) -> int:
    """How many numbers a step copies so that it can be taken back: Muon's weights and momentum."""
    return (
        2 * sum(weight.numel() for weight in hidden_matrices(model)) if isinstance(config, MuonConfig) else 0
    )


def lr_at(step: int, lr: float, schedule: ScheduleConfig, total_steps: int) -> float:
    """The learning rate of optimizer step `step`; the first step is 1.

    `lr` is the peak. Step k of W warm-up steps has `lr * k / W`; W null is a twentieth of `total_steps`.
    Then `cosine` falls to `lr * min_lr_ratio` at `total_steps`, `wsd` stays and falls linearly to it
    over the last `decay_fraction` of all steps, `constant` stays. Past `total_steps` the last value stays.
    """
    assert step >= 1, step
    step = min(step, total_steps)
    warmup = total_steps // 20 if schedule.warmup_steps is None else schedule.warmup_steps
    if step <= warmup:
        return lr * (step / warmup)  # in this order the last warm-up step has exactly lr
    return lr * _factor(step, warmup, schedule, total_steps)


def _factor(step: int, warmup: int, schedule: ScheduleConfig, total_steps: int) -> float:
    low = schedule.min_lr_ratio
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        progress = (step - warmup) / (total_steps - warmup)
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if isinstance(schedule, WsdScheduleConfig):
        # A decay that would begin inside the warm-up begins at its end.
        start = max(warmup, total_steps - round(schedule.decay_fraction * total_steps))
        if step <= start:
            return 1.0
        return low + (1.0 - low) * (total_steps - step) / (total_steps - start)
    raise UserError(f"schedule.name={schedule.name} must be one of cosine, wsd, constant")
