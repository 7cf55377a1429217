"""One forward and backward pass as a run would make it, of a model that is thrown away: what it costs."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.build import objectives_of
from harness.config import TrainConfig
from harness.hardware.device import make_autocast
from harness.hardware.peak_memory import PeakMemory
from harness.planning.memory_estimate import micro_batch
from harness.training.objectives import backward, target_counts

if TYPE_CHECKING:
    from harness.build import Learner

_MOST_PASSES, _ENOUGH_S = 5, 1.0


@dataclass(frozen=True)
class DryStep:
    """`loss` in nats, of one micro-batch. `seconds`: of all micro-batches of a step, without the optimizer's
    part. `growth`: the bytes at its peak that were not in use before; None where that cannot be measured.
    """

    loss: float
    seconds: float
    growth: int | None


def dry_step(
    config: TrainConfig, learner: Learner, device: torch.device, inputs: Tensor, targets: Tensor
) -> DryStep:
    """Take the first micro-batch of a batch forward and backward: once to warm up, then timed.

    Nothing but the learner's gradients changes, and the random state. Raises what an allocator raises.
    """
    micro, autocast = micro_batch(config), make_autocast(config.precision, device)
    objective, _ = objectives_of(config, learner, device)
    inputs, targets = next(iter(objective.split(inputs, targets, micro)))
    weight = objective.weight(target_counts(targets))
    parts, times = config.loader.batch_size // micro, list[float]()
    memory = PeakMemory(device)
    before = memory.megabytes()
    while len(times) <= 1 or (len(times) <= _MOST_PASSES and sum(times[1:]) < _ENOUGH_S):
        started = time.perf_counter()
        metrics = backward(objective, inputs, targets, weight, micro, device, autocast)
        loss = metrics["loss"].item()  # waits for the device
        _wait(device)
        times.append(time.perf_counter() - started)
        if parts == 1:
            learner.optimizer.zero_grad(set_to_none=True)
    learner.optimizer.zero_grad(set_to_none=True)
    grown = round(1e6 * (memory.megabytes() - before))
    growth = None if memory.notes or grown <= 0 else grown  # notes: a peak between two looks is missed
    return DryStep(loss, parts * statistics.median(times[1:]), growth)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
