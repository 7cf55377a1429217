"""The cross-entropy of a linear head, a chunk of tokens at a time: the logits of all of them are never there.

A chunk's gradients are taken while its logits are at hand, in the forward pass; the loss is a sum, so the
backward pass only multiplies them. Nothing is computed twice: what it costs is a gradient of the head's
weights that is held from the one pass to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100  # a target that does not count


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, chunk_tokens: int
) -> Tensor:
    """The sum of cross-entropy in nats over the targets that are not -100: a float32 scalar.

    `hidden` is `(N, C)`; `weight` `(V, C)`, of which the rows from `vocab_size` on are no tokens; `targets`
    int64 `(N,)`. Under autocast the products are taken in its dtype, and summed over chunks in float32.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if torch.is_grad_enabled():
        return _Chunked.apply(hidden, weight, targets, vocab_size, chunk_tokens, dtype)
    parts = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    rounded = weight.to(dtype)
    losses = [_loss(_logits(h.to(dtype), rounded, vocab_size), t)[0] for h, t in parts]
    return torch.stack(losses).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        losses, slopes = [], []  # the slopes are d loss / d hidden
        rounded = weight.to(dtype)
        weight_slope = torch.zeros_like(weight, dtype=torch.float32)
        for part, part_targets in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            part = part.to(dtype)
            logits = _logits(part, rounded, vocab_size)
            loss, normaliser = _loss(logits, part_targets)
            # d loss / d logits = softmax - one-hot, and 0 where the target does not count
            counts = (part_targets != IGNORE)[:, None].float()
            slope = logits.sub_(normaliser).exp_().mul_(counts)
            slope = slope.scatter_add_(1, part_targets.clamp(min=0)[:, None], -counts).to(dtype)
            losses.append(loss)
            slopes.append((slope @ rounded).to(hidden.dtype))
            weight_slope += slope.T @ part
        ctx.save_for_backward(torch.cat(slopes), weight_slope.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden_slope, weight_slope = ctx.saved_tensors
        return hidden_slope * slope, weight_slope * slope, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """float32 `(n, V)`, -inf where no token is: products of a padded vocabulary's shape are the fast ones."""
    logits = F.linear(hidden, weight).float()
    logits[:, vocab_size:] = -torch.inf
    return logits


def _loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over a chunk's targets, and what normalises each row of logits: `(n, 1)`."""
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, targets.clamp(min=0)[:, None])
    losses = (normaliser - chosen)[:, 0]
    return torch.where(targets != IGNORE, losses, 0.0).sum(), normaliser
