"""A GPT with GPT-2's architecture: nothing here knows of data, files or training.

Parameter names are GPT-2's usual ones (`wte`, `wpe`, `h.0.attn.c_attn`, ...); `nn.Linear` weights are
`(out, in)`, so weights that were made as Conv1D have to be transposed.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.chunked_loss import IGNORE as IGNORE
from harness.chunked_loss import chunked_loss
from harness.config_groups import ModelConfig
from harness.errors import UserError

# Matrix kernels are slow where a dimension is odd, and GPT-2's vocabulary of 50257 is.
VOCAB_MULTIPLE = 128


class Attention(nn.Module):
    """Causal self-attention over `(B, T, n_embd)`; a position sees itself and what came before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        # (B, T, 3C) -> three of (B, n_head, T, C / n_head). Split first: the backward pass then puts the
        # three gradients together by one copy, not by two.
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(C, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear maps with a GELU between, four times as wide inside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm residual block.

    With `activation_checkpointing` it keeps for the backward pass what it is given, and computes the rest
    again there with the random numbers of the first time.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.recomputes = config.activation_checkpointing
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            # Generators that nothing is drawn from need not be saved here and set again there.
            draws = self.attn.dropout > 0
            return checkpoint(self._outputs, x, use_reentrant=False, preserve_rng_state=draws)
        return self._outputs(x)

    def _outputs(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2's shape with learned positions and a head tied to the embedding.

    Initialisation draws from torch's global generator: seed it first for the same weights. `compiles_chunks`:
    a chunk of the loss is compiled by itself, whoever calls.
    Raises `UserError` where `n_embd` does not divide by `n_head`.
    """

    def __init__(self, config: ModelConfig, *, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise UserError(
                f"model.n_embd={config.n_embd} must be a multiple of model.n_head={config.n_head}: "
                "each head takes an equal share of the channels"
            )
        self.config, self.vocab_size, self.seq_len = config, vocab_size, seq_len
        self.compiles_chunks = False
        padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.wte = nn.Embedding(padded, config.n_embd)
        self.wpe = nn.Embedding(seq_len, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=1e-5)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Each layer adds to the residual stream twice: smaller steps keep its variance at one.
                residual = name.endswith("c_proj")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        self.wte.weight[self.vocab_size :] = 0.0

    def hidden(self, inputs: Tensor) -> Tensor:
        """Token ids `(B, T)` int64 -> the final normalised states `(B, T, n_embd)`.

        Raises `UserError` where T is larger than the model's `seq_len`.
        """
        length = inputs.shape[1]
        if length > self.seq_len:
            raise UserError(
                f"a sequence of {length} tokens is longer than the model's seq_len={self.seq_len}: it has no "
                f"positions beyond; cut the sequence or train with loader.seq_len>={length}"
            )
        x = F.dropout(self.wte(inputs) + self.wpe.weight[:length], self.config.dropout, self.training)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def head(self, hidden: Tensor) -> Tensor:
        """States `(..., n_embd)` -> logits `(..., vocab_size)`; the padded rows are cut off."""
        return F.linear(hidden, self.wte.weight)[..., : self.vocab_size]

    def forward(self, inputs: Tensor) -> Tensor:
        """Token ids `(B, T)` int64 -> logits `(B, T, vocab_size)`."""
        return self.head(self.hidden(inputs))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The **sum** of cross-entropy in nats over the targets that are not -100, float32.

        `inputs` and `targets` are int64 `(B, T)`. A sum, so that micro-batches add up to the batch:
        divide by the batch's number of targets once. Where every target is -100 it is 0, not NaN.
        With `loss_chunk_tokens` the same is summed in another order, so many tokens' logits at a time.
        """
        if self.takes_chunks(targets):
            return self.loss_of(self.hidden(inputs), targets)
        logits = self(inputs).float()
        return F.cross_entropy(
            logits.view(-1, self.vocab_size), targets.reshape(-1), ignore_index=IGNORE, reduction="sum"
        )

    def takes_chunks(self, targets: Tensor) -> bool:
        """Whether the loss of so many targets is taken in more than one chunk."""
        chunk = self.config.loss_chunk_tokens
        return chunk is not None and chunk < targets.numel()

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss in chunks, of what `hidden` gave for the inputs."""
        chunk = self.config.loss_chunk_tokens
        assert chunk is not None
        return chunked_loss(
            hidden.flatten(0, 1), self.wte.weight, targets.reshape(-1),
            vocab_size=self.vocab_size, chunk_tokens=chunk, compiled=self.compiles_chunks,
        )  # fmt: skip


def compiled_loss(model: GPT) -> Callable[[Tensor, Tensor], Tensor]:
    """`model.loss` compiled: one graph; of a loss in chunks the states are one, and a chunk is another.

    A graph with all the chunks would take as long to compile as there are many: 64 of them took ten times as
    long as one.
    """
    model.compiles_chunks = True
    whole, hidden = torch.compile(model.loss), torch.compile(model.hidden)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        if model.takes_chunks(targets):
            return model.loss_of(hidden(inputs), targets)
        return whole(inputs, targets)

    return loss


def parameter_count(model: GPT) -> int:
    """Number of parameters as published: the rows that only pad the vocabulary do not count."""
    padding = (model.wte.num_embeddings - model.vocab_size) * model.config.n_embd
    return sum(parameter.numel() for parameter in model.parameters()) - padding


def flops_per_token(model: GPT) -> int:
    """Floating-point operations a trained token costs: `6 N + 12 n_layer n_embd seq_len`.

    N is `parameter_count` without the position table, which is added and never multiplied; the
    token embedding stays in, it is the head. Six: a multiply and an add, forward and twice backward; what
    `activation_checkpointing` computes again does not count.
    The second term is attention's two matrix products, counted in full though half is masked,
    as published MFU figures do; T is the model's `seq_len`. So counted by PaLM (Chowdhery et al., 2022,
    arXiv:2204.02311, appendix B): MFU is tokens a second times this, over the devices' dense bf16 peak.
    Recomputed activations do not count.
    """
    matrices = parameter_count(model) - model.wpe.weight.numel()
    return 6 * matrices + 12 * model.config.n_layer * model.config.n_embd * model.seq_len


@torch.no_grad()
def generate(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    between: Callable[[], object] = lambda: None,
) -> Tensor:
    """Continue `ids` `(B, T)` int64, T at least 1, by `max_new_tokens`: returns `(B, T + max_new_tokens)`.

    `temperature` 0 takes the most likely token and needs no generator; otherwise tokens are drawn
    with `generator` (any device), so torch's global one never moves. `top_k` keeps the k most likely.
    The model sees the last `seq_len` tokens; it is left in the mode it was in. `between` is called before
    each token; what it raises abandons the text.
    """
    if ids.shape[1] == 0:
        raise UserError("generation starts from at least 1 token, got 0: give a prompt or the boundary token")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise UserError(f"temperature={temperature} must be at least 0 and top_k={top_k} at least 1 or null")
    if temperature > 0 and generator is None:
        raise UserError(f"temperature={temperature} draws at random and needs a generator; 0 does not")
    training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            between()
            with _uncompiled():
                hidden = model.hidden(ids[:, -model.seq_len :])
            logits = model.head(hidden[:, -1]).float()
            ids = torch.cat([ids, _pick(logits, temperature, top_k, generator).to(ids.device)], dim=1)
    finally:
        model.train(training)
    return ids


def _uncompiled() -> AbstractContextManager[object]:
    """Where the blocks are compiled, which those of a sharded model are, they are not while this lasts.

    Each token makes a text longer. The compiler would answer with graphs for any length, and make that of
    training such a slow one too where it has not made it yet.
    """
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token id for each row of `(B, vocab_size)`: `(B, 1)`."""
    if not torch.isfinite(logits).all():
        raise UserError(
            "the model's logits are no numbers: its training diverged. Use an earlier checkpoint."
        )
    if temperature == 0 or generator is None:
        return logits.argmax(dim=-1, keepdim=True)
    # Relative to the largest: dividing by a tiny temperature then underflows to 0, never to inf - inf.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1).to(generator.device), 1, generator=generator)
