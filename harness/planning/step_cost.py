"""What a step of a run costs in memory and time: estimated, then tried once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from harness.build import Learner
from harness.commandline.commands import override
from harness.config import TrainConfig, layout, total_steps
from harness.errors import RunFailed
from harness.model import GPT
from harness.planning.dry_step import DryStep, dry_step
from harness.planning.memory_estimate import Memory, estimate, fitting_micro_batch, micro_batch, room_on
from harness.planning.plan_text import due, size
from harness.run_files import failure
from harness.storage import PairStore, RowStore, Store
from harness.training.run import Progress


class Shape(NamedTuple):
    """What a run's model takes and what that needs. `room`: what its device has to give, if that is known.

    `shards`: how many devices share the model itself; 1 where each has all of it.
    """

    model: GPT
    device: torch.device
    memory: Memory
    room: int | None
    shards: int


def shape_of(config: TrainConfig, vocab_size: int, device: torch.device, shards: int = 1) -> Shape:
    """The model, without any memory for its weights, and the estimate of a step."""
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=vocab_size, seq_len=config.loader.seq_len)
    return Shape(model, device, estimate(config, model, device, shards), room_on(device), shards)


def try_step(
    config: TrainConfig,
    shape: Shape,
    device: torch.device,
    learner: Callable[[], Learner],
    batch: Callable[[], tuple[Tensor, Tensor]],
) -> DryStep:
    """The dry step; `RunFailed` where it does not fit.

    A host does not say that its memory is used up, it kills: there the estimate decides.
    """
    if device.type == "cpu" and shape.room is not None and shape.memory.total > shape.room:
        raise _too_large(config, shape, "by the estimate, so no step is tried")
    try:
        return dry_step(config, learner(), device, *batch())
    except Exception as error:
        if failure.reason_of(error) != "out_of_memory":
            raise
        raise _too_large(config, shape, f"in the dry step ({str(error).splitlines()[0]})") from error


def _too_large(config: TrainConfig, shape: Shape, when: str) -> RunFailed:
    room = "unknown" if shape.room is None else size(shape.room)
    sequences = f"{micro_batch(config)} sequences of {config.loader.seq_len} tokens at once"
    return RunFailed(
        f"out of memory {when}: a step with {sequences} needs about {size(shape.memory.total)}, there is "
        f"{room}. {mend(config, shape)}",
        "out_of_memory",
    )


def mend(config: TrainConfig, shape: Shape) -> str:
    """The word that makes a step smaller, or what else would."""
    room = (
        shape.room if shape.room is not None and shape.memory.total > shape.room else shape.memory.total - 1
    )
    fitting = fitting_micro_batch(config, shape.model, shape.device, room, shape.shards)
    if fitting is None:
        return "Use a smaller loader.seq_len or model: not even one sequence at a time would fit"
    return (
        f"{override('trainer.micro_batch_size', fitting)} takes fewer sequences at once and gives the same "
        f"step, in {config.loader.batch_size // fitting} parts"
    )


def random_batch(config: TrainConfig, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens at random, int64 `(B, T)`, as a loader's batch: of pairs `(2B, T)`."""
    rows = config.loader.batch_size * (2 if layout(config.loader) == "contrastive" else 1)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(vocab_size, (rows, config.loader.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def evaluation_seconds(
    config: TrainConfig, progress: Progress, dry: DryStep, validation: Store | None
) -> float:
    """All evaluations that are to come: forward passes only.

    A step goes back too, which is twice the work, and with activation checkpointing once more forward. Of
    pairs the reference goes forward as well.
    """
    budget = total_steps(config, progress.step, progress.tokens)
    pairs = isinstance(validation, PairStore)
    a_sequence = dry.seconds / config.loader.batch_size
    forward = 2 if pairs else 1
    share = forward / (forward + 2 + config.model.activation_checkpointing)
    return (
        due(config.evaluation.interval, budget, progress.step)
        * _sequences(config, validation)
        * a_sequence
        * share
    )


def _sequences(config: TrainConfig, validation: Store | None) -> float:
    """Sequences, or pairs, that an evaluation reads."""
    tokens = config.evaluation.tokens
    if isinstance(validation, RowStore | PairStore):
        return min(tokens / max(1, validation.total_tokens), 1.0) * validation.total_rows
    if validation is not None:
        tokens = min(tokens, validation.total_tokens - 1)
    return tokens / config.loader.seq_len
