"""The cross-entropy of a linear head, a chunk of tokens at a time: the logits of all of them are never there.

A chunk's gradients are taken while its logits are at hand, in the forward pass; the loss is a sum, so the
backward pass only multiplies them. Nothing is computed twice: what it costs is a gradient of the head's
weights that is held from the one pass to the other.

A chunk may be compiled, and the loop over the chunks stays outside: a graph of it would hold each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100  # a target that does not count


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    compiled: bool = False,
) -> Tensor:
    """The sum of cross-entropy in nats over the targets that are not -100: a float32 scalar.

    `hidden` is `(N, C)`; `weight` `(V, C)`, of which the rows from `vocab_size` on are no tokens; `targets`
    int64 `(N,)`. Chunks are of one size, `chunk_tokens` at most. Under autocast the products are taken in its
    dtype, and summed over chunks in float32. `compiled`: a chunk's part is, once for all chunks.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if torch.is_grad_enabled():
        return _Chunked.apply(hidden, weight, targets, vocab_size, chunk_tokens, dtype, compiled)
    part_of = _compiled(_chunk_loss) if compiled else _chunk_loss
    rounded = weight.to(dtype)
    losses = [part_of(h.to(dtype), t, rounded, vocab_size) for h, t in _chunks(hidden, targets, chunk_tokens)]
    return torch.stack(losses).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk_tokens: int,
        dtype: torch.dtype,
        compiled: bool,
    ) -> Tensor:
        part_of = _compiled(_chunk_gradients) if compiled else _chunk_gradients
        losses, slopes = [], []  # the slopes are d loss / d hidden
        # Or a part that is a view would require a gradient, a filled one would not, and each be compiled.
        hidden, weight = hidden.detach(), weight.detach()
        rounded = weight.to(dtype)
        weight_slope = torch.zeros_like(weight, dtype=torch.float32)
        for part, part_targets in _chunks(hidden, targets, chunk_tokens):
            loss, slope = part_of(part.to(dtype), part_targets, rounded, vocab_size, weight_slope)
            losses.append(loss)
            slopes.append(slope.to(hidden.dtype))
        ctx.save_for_backward(torch.cat(slopes)[: len(hidden)], weight_slope.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden_slope, weight_slope = ctx.saved_tensors
        return hidden_slope * slope, weight_slope * slope, None, None, None, None, None


def _chunks(hidden: Tensor, targets: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As few parts of one size as `most` tokens a part allow; targets that do not count fill the last one up.

    One size, so that the compiler sees one shape.
    """
    size = -(-len(hidden) // -(-len(hidden) // most))
    for part, part_targets in zip(hidden.split(size), targets.split(size), strict=True):
        lacking = size - len(part)
        if lacking:
            part = F.pad(part, (0, 0, 0, lacking))
            part_targets = F.pad(part_targets, (0, lacking), value=IGNORE)
        yield part, part_targets


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Not dynamic: evaluation may have chunks of another size, and must not make those of training general.
    return torch.compile(function, dynamic=False)


def _chunk_gradients(
    hidden: Tensor, targets: Tensor, weight: Tensor, vocab_size: int, weight_slope: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk's loss and its slope by `hidden`, in that one's dtype; that by `weight` is added in place."""
    logits = _logits(hidden, weight, vocab_size)
    loss, normaliser = _loss(logits, targets)
    # d loss / d logits = softmax - one-hot, and 0 where the target does not count
    counts, targets = (targets != IGNORE)[:, None].float(), targets[:, None]
    slope = logits.sub_(normaliser).exp_().mul_(counts)
    if torch.compiler.is_compiling():  # in the softmax's own pass; a scatter would read and write all again
        slope = slope - counts * (torch.arange(slope.shape[1], device=slope.device) == targets)
    else:
        slope = slope.scatter_add_(1, targets.clamp(min=0), -counts)
    slope = slope.to(hidden.dtype)
    weight_slope += slope.T @ hidden
    return loss, slope @ weight


def _chunk_loss(hidden: Tensor, targets: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    return _loss(_logits(hidden, weight, vocab_size), targets)[0]


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
