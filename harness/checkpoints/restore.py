"""A checkpoint's tensors back in a model and its optimizer; the settings of both are the configuration's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.checkpoints.checkpoint import Checkpoint
from harness.checkpoints.shard_files import MODEL_PART, OPTIMIZER_PART

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from harness.model import GPT

POSITIONS = "wpe.weight"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def restore(saved: Checkpoint, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer's state, both without the positions that the model does not have.

    Of the optimizer only what it has learnt: lr, weight decay and betas stay those it was made with, for the
    command line wins. Raises `UserError` where a file was written for another model. A model in shards is
    restored by all ranks together, and each keeps its part.
    """
    if is_in_shards(model):
        _restore_shards(saved, model, optimizer)
        return
    with saved.foreign(saved.model_file):
        model.load_state_dict(cut(saved.weights(), model.seq_len))
    with saved.foreign(saved.optimizer_file):
        optimizer.load_state_dict(_with_settings_of(optimizer, saved.optimizer_state(), model))


def is_in_shards(model: nn.Module) -> bool:
    """Whether the weights are torch's DTensors, of which each rank has a part."""
    return hasattr(next(model.parameters()), "placements")


def _restore_shards(saved: Checkpoint, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    from harness.checkpoints import sharded_checkpoint

    if saved.sharded:
        with saved.shards() as shards:
            sharded_checkpoint.load(shards, model, optimizer)
        return
    with saved.foreign(saved.optimizer_file):
        named = _named(saved.optimizer_state(), model, optimizer)
    with saved.foreign(saved.model_file):
        tensors = {f"{MODEL_PART}.{name}": tensor for name, tensor in saved.weights().items()} | named
        sharded_checkpoint.load(sharded_checkpoint.Whole(tensors), model, optimizer)


def _named(state: dict[str, Any], model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A saved optimizer's tensors by `optimizer.NAME.KEY`."""
    _check_parameters(optimizer, state)
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"{OPTIMIZER_PART}.{ordered[number]}.{key}": value
        for number, values in state["state"].items()
        for key, value in values.items()
    }


def cut(weights: dict[str, Tensor], seq_len: int) -> dict[str, Tensor]:
    """A model's weights with the first `seq_len` of its positions.

    Each position's embedding is its own, so a shorter model computes what the longer one did.
    """
    return weights | {POSITIONS: weights[POSITIONS][:seq_len].contiguous()}


def _with_settings_of(optimizer: torch.optim.Optimizer, state: dict[str, Any], model: GPT) -> dict[str, Any]:
    """A saved state with the settings of `optimizer`, its moments cut to the model's positions."""
    ours = _check_parameters(optimizer, state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    positions = next(i for i, parameter in enumerate(parameters) if parameter is model.wpe.weight)
    moments = dict(state["state"])
    if positions in moments:  # absent before the first step
        kept = {name: moments[positions][name][: model.seq_len].contiguous() for name in _MOMENTS}
        moments[positions] = moments[positions] | kept
    return {"state": moments, "param_groups": ours}


def _check_parameters(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of `optimizer`. Raises `ValueError` where a saved state has other numbers of parameters."""
    ours: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in ours] != [group["params"] for group in state["param_groups"]]:
        raise ValueError("it holds the state of other parameters")
    return ours
