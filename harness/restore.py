"""A checkpoint's tensors back in a model and its optimizer; the settings of both are the configuration's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.checkpoint import MODEL, OPTIMIZER, Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from harness.model import GPT

_POSITIONS = "wpe.weight"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def restore(saved: Checkpoint, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer's state, both without the positions that the model does not have.

    Of the optimizer only what it has learnt: lr, weight decay and betas stay those it was made with, for the
    command line wins. Raises `UserError` where a file was written for another model.
    """
    with saved.foreign(MODEL):
        model.load_state_dict(cut(saved.weights(), model.seq_len))
    with saved.foreign(OPTIMIZER):
        optimizer.load_state_dict(_with_settings_of(optimizer, saved.optimizer_state(), model))


def cut(weights: dict[str, Tensor], seq_len: int) -> dict[str, Tensor]:
    """A model's weights with the first `seq_len` of its positions.

    Each position's embedding is its own, so a shorter model computes what the longer one did.
    """
    return weights | {_POSITIONS: weights[_POSITIONS][:seq_len].contiguous()}


def _with_settings_of(optimizer: torch.optim.Optimizer, state: dict[str, Any], model: GPT) -> dict[str, Any]:
    """A saved state of AdamW with the settings of `optimizer`, its moments cut to the model's positions."""
    ours = optimizer.state_dict()["param_groups"]
    theirs = state["param_groups"]
    if [group["params"] for group in ours] != [group["params"] for group in theirs]:
        raise ValueError("it holds the state of other parameters")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    positions = next(i for i, parameter in enumerate(parameters) if parameter is model.wpe.weight)
    moments = dict(state["state"])
    if positions in moments:  # absent before the first step
        kept = {name: moments[positions][name][: model.seq_len].contiguous() for name in _MOMENTS}
        moments[positions] = moments[positions] | kept
    return {"state": moments, "param_groups": ours}
