"""What a batch's loss is: next-token cross-entropy, or a preference between the two rows of a pair.

An objective sums over parts of a batch and is divided once by the whole batch's weight, so that any split
into micro-batches gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.model import GPT, IGNORE

# (inputs, targets), both int64 (n, T) -> one value, or (n,) values, in nats
Loss = Callable[[Tensor, Tensor], Tensor]
Contexts = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Distributed:
    """A loss over this rank's rows whose backward pass gives every rank the mean of all ranks' gradients.

    Inside of `accumulating()`, which must cover the forward pass too, the gradients stay this rank's own and
    are added to the next ones. One process has nothing to wait for.
    """

    loss: Loss
    accumulating: Contexts = nullcontext


class Objective(Protocol):
    """`flops` is what a counted token costs, in units of `model.flops_per_token`.

    `accumulating()`: around a part of a batch that is not its last, as `Distributed` has it.
    """

    flops: float
    accumulating: Contexts

    def weight(self, counts: Tensor) -> int:
        """What the sums of a batch are divided by; `counts`: the targets of each row, int64 `(n,)`."""

    def split(self, inputs: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch in parts of `size` samples."""

    def sums(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Scalars by name, each summed over the samples; `loss` carries the gradient."""


def target_counts(targets: Tensor) -> Tensor:
    """How many targets of each row count: int64 `(n,)`."""
    return (targets != IGNORE).sum(dim=1)


def backward(
    objective: Objective,
    inputs: Tensor,
    targets: Tensor,
    weight: int,
    micro: int,
    device: torch.device,
    autocast: Contexts,
    *,
    ranks: int = 1,
) -> dict[str, Tensor]:
    """Add a batch's gradient to the weights', in micro-batches: its metrics, on the device.

    The objective is summed and divided by `weight`, the whole batch's, so any split into micro-batches gives
    the gradient of the whole batch. Where these rows are one rank's of so many `ranks`, whose gradients are
    averaged, the metrics are its part of the sum.
    """
    weight = max(1, weight)
    totals: dict[str, Tensor] = {}
    parts = list(objective.split(inputs, targets, micro))
    for number, (part, part_targets) in enumerate(parts, start=1):
        part = part.to(device, non_blocking=True)
        part_targets = part_targets.to(device, non_blocking=True)
        with nullcontext() if number == len(parts) else objective.accumulating():
            with autocast():
                sums = objective.sums(part, part_targets)
                metrics = {name: value / weight for name, value in sums.items()}
            loss = metrics["loss"] if ranks == 1 else metrics["loss"] * ranks
            loss.backward()
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0.0) + value.detach()
    return totals


class LanguageModelling:
    """Cross-entropy in nats, the mean over all targets of a batch. `loss` sums it, as `GPT.loss` does."""

    flops = 1.0

    def __init__(self, loss: Loss, accumulating: Contexts = nullcontext) -> None:
        self._loss, self.accumulating = loss, accumulating

    def weight(self, counts: Tensor) -> int:
        """The batch's targets."""
        return int(counts.sum())

    def split(self, inputs: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of `size` rows."""
        return zip(inputs.split(size), targets.split(size), strict=True)

    def sums(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The summed `loss`."""
        return {"loss": self._loss(inputs, targets)}


class Preference:
    """Direct Preference Optimization (Rafailov et al., 2023, arXiv:2305.18290, equation 7).

    A batch is `(2B, T)`: B preferred rows, then the B others in the same order. With a pair's margin
    `beta * ((pos - reference's pos) - (neg - reference's neg))`, of log-probabilities summed over the targets
    of a row, the loss is the mean over pairs of `-log sigmoid(margin)`. Beside it: `accuracy`, the share of
    pairs whose margin is above 0, where a tie counts half (a model that is still the reference has 0.5), and
    `reward_margin`, the mean margin. A row without targets has log-probability 0.

    `policy` and `reference` give each row's log-probability; the reference gets no gradient.
    """

    # Per counted token (a pair counts as one row) two rows forward and backward, and two forward only.
    flops = 2 * (1 + 1 / 3)

    def __init__(
        self, policy: Loss, reference: Loss, beta: float, accumulating: Contexts = nullcontext
    ) -> None:
        self._policy, self._reference, self._beta = policy, reference, beta
        self.accumulating = accumulating

    def weight(self, counts: Tensor) -> int:
        """The batch's pairs."""
        return len(counts) // 2

    def split(self, inputs: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of `size` pairs, each laid out as a batch is."""
        sides = [side.split(size) for tensor in (inputs, targets) for side in tensor.chunk(2)]
        for pos, neg, pos_targets, neg_targets in zip(*sides, strict=True):
            yield torch.cat([pos, neg]), torch.cat([pos_targets, neg_targets])

    def sums(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """`loss`, `accuracy` and `reward_margin`, summed over pairs."""
        with torch.no_grad():
            reference = self._reference(inputs, targets)
        pos, neg = (self._policy(inputs, targets) - reference).chunk(2)
        margin = self._beta * (pos - neg)
        won = (margin > 0).float() + 0.5 * (margin == 0).float()
        return {
            "loss": -F.logsigmoid(margin).sum(),
            "accuracy": won.sum(),
            "reward_margin": margin.detach().sum(),
        }


def row_log_probability(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The log-probability in nats of each row's targets under `model`: float32 `(n,)`."""
    logits = model(inputs).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view_as(targets).sum(dim=1)


def make_preference(
    model: GPT,
    reference: GPT,
    beta: float,
    *,
    compiled: bool,
    distribute: Callable[[Loss], Distributed] = Distributed,
) -> Preference:
    """The preference of `model` against the frozen `reference`; `distribute` shares the model's part."""
    ours: Loss = partial(row_log_probability, model)
    theirs: Loss = partial(row_log_probability, reference)
    if compiled:
        ours, theirs = torch.compile(ours), torch.compile(theirs)
    shared = distribute(ours)
    return Preference(shared.loss, theirs, beta, shared.accumulating)
