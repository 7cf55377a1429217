"""`parallel=fsdp`: a model whose weights, gradients and optimizer state are sharded over all ranks (FSDP2).

Each block is a group that is gathered when it is computed and freed behind it; the embeddings and the last
norm are the group of the root, gathered from the beginning of the forward pass to the end of the backward
one, for the token embedding is also the head. The weights that are updated are float32, and autocast rounds
what is computed as it does under DDP, so that both train alike; but for bf16 on CUDA, where the norms of the
blocks are gathered rounded too, gains and biases, which autocast would leave as they are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from harness.model import GPT

_ENTRIES = ("loss", "hidden")  # methods that are called from outside, beside `forward`


def shard(model: GPT, device: torch.device, *, bf16: bool, compiled: bool) -> None:
    """Shard a whole model, equal on every rank, over all of them and put it on `device`, in place.

    Its `forward`, `loss` and `hidden` may be called afterwards, by all ranks together. `compiled` is about
    each block, and about a chunk of the loss: what gathers cannot be compiled. On CUDA `bf16` halves what is
    gathered of the blocks, whose matrices autocast would round in the same way.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rounded = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    policy = rounded if bf16 and device.type == "cuda" else MixedPrecisionPolicy()
    model.compiles_chunks = compiled
    for block in model.h:
        if compiled:
            block.forward = torch.compile(block.forward)  # what gathers stays outside
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for name in _ENTRIES:
        register_fsdp_forward_method(model, name)
    # It warns of the logits, a view, that nobody may change them in place: nobody does.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view")


@contextlib.contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """While this lasts, backward passes add to this rank's own, whole gradients, and no rank waits."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale the gradients of all ranks together down to a norm of `limit`; the norm before, on each rank."""
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
