"""One model on several devices: every rank takes its rows of the same global batch.

A loss is a sum over rows, divided once by the weight of the global batch. DDP averages gradients over ranks,
so each rank multiplies its own by their number: what remains is the gradient of the global batch, as one
device would have it up to the order of the sum.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from harness.checkpoints import restore
from harness.config import TrainConfig, layout
from harness.config_groups import ModelConfig
from harness.distributed.ranks import Ranks
from harness.errors import UserError
from harness.hardware.device import should_compile, uses_bf16
from harness.loaders.batch import check_sizes
from harness.training.objectives import Contexts, Distributed, Loss, Objective, backward, target_counts

if TYPE_CHECKING:
    from harness.loaders import Batch
    from harness.model import GPT


class _Forward(nn.Module):
    """A loss as the forward pass of a module, which is what DDP can see."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(inputs, targets)


def distribute(model: nn.Module, loss: Loss, ranks: Ranks) -> Distributed:
    """`loss`, a function of `model`'s weights and perhaps compiled, for all ranks; alone as it is.

    A collective: every rank gets rank 0's weights. `model` itself stays what is saved and sampled from. Of a
    sharded model the gradients are shared by what shards it.
    """
    if not ranks.several:
        return Distributed(loss)
    if restore.is_in_shards(model):
        from harness.distributed import fsdp

        return Distributed(loss, lambda: fsdp.accumulating(model))
    if "torch._dynamo" in sys.modules and has_inner_graphs(model) and torch_release() < (2, 13):
        # Its cutting of a compiled graph at DDP's buckets raises at such a graph; one bucket sums the same.
        torch._dynamo.config.optimize_ddp = False
    wrapped = nn.parallel.DistributedDataParallel(_Forward(model, loss), gradient_as_bucket_view=True)
    return Distributed(wrapped, wrapped.no_sync)


def has_inner_graphs(model: nn.Module) -> bool:
    """Whether a compiled loss has graphs inside of its graph: blocks that are computed again."""
    config = getattr(model, "config", None)
    return isinstance(config, ModelConfig) and config.activation_checkpointing


def torch_release(version: str = torch.__version__) -> tuple[int, ...]:
    """The major and minor number of torch."""
    return tuple(map(int, version.split(".")[:2]))


def settle_buckets(
    objective: Objective, config: TrainConfig, device: torch.device, autocast: Contexts, ranks: Ranks
) -> None:
    """Take one micro-batch of nothing forward and backward; no weight changes and no random number is drawn.

    DDP lays its buckets out anew between its first backward pass and its second, and with more than two
    ranks the order in which they are summed follows the layout: a run that goes on would begin with another
    one than it had. The caller drops the gradients.
    """
    if not ranks.several or is_sharded(config, ranks):
        return
    rows = micro_batch_size(config, ranks) * (2 if layout(config.loader) == "contrastive" else 1)
    inputs = torch.zeros((rows, config.loader.seq_len), dtype=torch.int64)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        backward(objective, inputs, inputs, rows, rows, device, autocast)


def is_sharded(config: TrainConfig, ranks: Ranks) -> bool:
    """Whether each rank holds a part of the model, not all of it."""
    return ranks.several and config.parallel == "fsdp"


def shard(model: GPT, config: TrainConfig, device: torch.device) -> None:
    """Leave each rank its part of a model that all of them hold, on `device`, in place. A collective."""
    from harness.distributed import fsdp

    compiled = should_compile(config.compile, device)
    fsdp.shard(model, device, bf16=uses_bf16(config.precision, device), compiled=compiled)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale the gradients down to a norm of `limit`; the norm before, a scalar on their device.

    Of a sharded model it is that of all ranks' parts, which this waits for together.
    """
    if not restore.is_in_shards(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    from harness.distributed import fsdp

    return fsdp.clip_gradients(model, limit)


def check_shares(config: TrainConfig, ranks: Ranks) -> None:
    """Raise `UserError` unless the ranks share a batch evenly, each its part in whole micro-batches."""
    batch, micro = config.loader.batch_size, config.trainer.micro_batch_size
    check_sizes(batch, config.loader.seq_len, ranks.rank, ranks.size)
    share = batch // ranks.size
    if ranks.several and micro is not None and share % micro:
        raise UserError(
            f"loader.batch_size={batch} over {ranks.size} processes leaves {share} sequences to each, "
            f"which is no multiple of trainer.micro_batch_size={micro}: a step is whole micro-batches. Use "
            "trainer.micro_batch_size=null, or one that divides it"
        )


def micro_batch_size(config: TrainConfig, ranks: Ranks) -> int:
    """Sequences, or pairs, that a device takes at once."""
    return config.trainer.micro_batch_size or config.loader.batch_size // ranks.size


def loader_share(ranks: Ranks) -> dict[str, int]:
    """What `make_loader` is told. Rank 0 reads every row: hashes and incidents are of the global batch."""
    return {"rank": 0, "world_size": 1} if ranks.leads else {"rank": ranks.rank, "world_size": ranks.size}


def own_rows(batch: Batch, objective: Objective, ranks: Ranks) -> Batch:
    """This rank's rows out of what its loader gave."""
    if not (ranks.several and ranks.leads):
        return batch
    size = batch.cursor["batch_size"] // ranks.size
    inputs, targets = next(iter(objective.split(batch.inputs, batch.targets, size)))
    return batch._replace(inputs=inputs, targets=targets)


class Whole(NamedTuple):
    """The global batch: `weight` as `Objective.weight`, its rows, and how many of those have no target."""

    weight: int
    rows: int
    empty: int


def whole(objective: Objective, targets: Tensor, ranks: Ranks, *, alike: bool) -> Whole:
    """What the rows of all ranks come to. `alike`: each rank's come to the same; else they are asked."""
    counts = target_counts(targets)
    own = [objective.weight(counts), len(counts), int((counts == 0).sum())]
    return Whole(*([value * ranks.size for value in own] if alike else ranks.total(own)))


def counts_alike(config: TrainConfig) -> bool:
    """Whether every row has as many targets as any other: nothing is padded or masked."""
    return layout(config.loader) == "stream" and config.loader.mask_boundary == "none"


def summed(metrics: dict[str, Tensor], grad_norm: Tensor, ranks: Ranks) -> tuple[dict[str, Tensor], Tensor]:
    """The metrics of the global batch, and the gradient norm, the same to the bit on every rank."""
    if not ranks.several:
        return metrics, grad_norm
    values = torch.stack([*(value.float() for value in metrics.values()), grad_norm.float() / ranks.size])
    *sums, norm = ranks.sum_(values).unbind()
    return dict(zip(metrics, sums, strict=True)), norm
