"""What each usual measure brings to a training step, one after another; and a step of nanoGPT beside ours.

A rung adds one thing to the rung below it. All of them train the same GPT on the same random tokens that lie
on the device already, so only the step itself is timed. `bench_train.py` prints them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import model as gpt
from harness.config import TrainConfig
from harness.config_groups import ModelConfig, OptimizerConfig
from harness.hardware.device import make_autocast
from harness.model import GPT, compiled_loss, flops_per_token
from harness.optim import make_optimizer

VOCAB_SIZE = 50_257  # GPT-2's, which is odd
_ATTENTION = {
    "torch's choice": None,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}

Step = Callable[[], object]


@dataclass(frozen=True)
class Rung:
    """How a step is computed. `batch_size` in sequences; `on` names the devices where it means anything."""

    name: str
    batch_size: int
    tf32: bool = False
    bf16: bool = False
    sdpa: bool = False
    compiled: bool = False
    padded: bool = False
    on: tuple[str, ...] = ("cpu", "cuda")


def rungs(batch_size: int, larger: int, *, compiled: bool) -> list[Rung]:
    """The ladder, from plain float32 to what the harness does by default on a GPU."""
    ladder = [Rung("eager, float32", batch_size)]

    def add(name: str, **change: Any) -> None:
        ladder.append(dataclasses.replace(ladder[-1], name=name, **{"on": ("cpu", "cuda"), **change}))

    add("TF32", tf32=True, on=("cuda",))
    add("bf16 autocast", bf16=True)
    add("fused attention (SDPA)", sdpa=True)
    if compiled:
        add("torch.compile of model and loss", compiled=True)
    add("vocabulary padded to a multiple of 128", padded=True)
    add(f"{larger} sequences in place of {batch_size}", batch_size=larger)
    return ladder


@dataclass(frozen=True)
class Timing:
    """A step's `seconds` (median), its `tokens`, the device's peak memory in MB, and seconds to get ready."""

    seconds: float
    tokens: int
    peak_mb: float | None
    ready_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def climb(rung: Rung, config: ModelConfig, seq_len: int, device: torch.device, steps: int) -> Timing:
    """Build and time one rung; the median of `steps` steps after the warm-up."""
    clear(device)
    begun = time.perf_counter()
    with _numerics(rung):
        step = _step_of(rung, config, seq_len, device)
        for _ in range(3):  # the first compiles; the optimizer makes its state
            step()
        synchronise(device)
        ready = time.perf_counter() - begun
        seconds = timed(step, steps, device)
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else None
    return Timing(statistics.median(seconds), rung.batch_size * seq_len, peak, ready)


def timed(step: Step, steps: int, device: torch.device) -> list[float]:
    """Seconds of each of `steps` steps; a GPU takes them itself, and the host may be ahead as in training."""
    if device.type != "cuda":
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    synchronise(device)
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(marks)]


def synchronise(device: torch.device) -> None:
    """Wait for the device; a CPU is never ahead."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _step_of(rung: Rung, config: ModelConfig, seq_len: int, device: torch.device) -> Step:
    with mock.patch.object(gpt, "VOCAB_MULTIPLE", gpt.VOCAB_MULTIPLE if rung.padded else 1):
        model = GPT(config, vocab_size=VOCAB_SIZE, seq_len=seq_len).to(device)
    inputs, targets = random_batch(rung.batch_size, seq_len, device)
    loss = compiled_loss(model) if rung.compiled else model.loss
    return bare_step(
        lambda: loss(inputs, targets) / targets.numel(),
        model,
        make_optimizer(model, OptimizerConfig(), device),
        make_autocast("bf16" if rung.bf16 else "float32", device),
    )


def bare_step(
    loss: Callable[[], Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, autocast: Any
) -> Step:
    """Forward, backward, clipping, step: what every loop does, and nothing else."""
    parameters = list(model.parameters())

    def step() -> None:
        with autocast():
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def random_batch(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 `(B, T)` on the device."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB_SIZE, (batch_size, seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Causal attention with its scores in memory, `(B, heads, T, T)`: what SDPA spares."""
    assert options["is_causal"]
    assert not options["dropout_p"]
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ value


def attention_times(
    config: ModelConfig, batch_size: int, seq_len: int, device: torch.device, steps: int
) -> dict[str, float]:
    """Milliseconds of one layer's attention forward and backward in bf16, by who computes it.

    `torch's choice` is what the model has; a backend that cannot do it here is left out. On Hopper the two
    differ, and which of them torch takes by itself depends on its version.
    """
    heads, width = config.n_head, config.n_embd
    qkv = torch.randn(batch_size, seq_len, 3 * width, device=device, dtype=torch.bfloat16, requires_grad=True)
    query, key, value = (
        part.view(batch_size, seq_len, heads, width // heads).transpose(1, 2)
        for part in qkv.split(width, dim=2)
    )
    slope = torch.randn_like(query)

    def step() -> None:
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(result, (query, key, value), slope)

    found: dict[str, float] = {}
    for name, backend in _ATTENTION.items():
        try:
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                for _ in range(3):
                    step()
                found[name] = 1e3 * statistics.median(timed(step, steps, device))
        except RuntimeError as error:  # torch has no other for what a backend does not do
            if isinstance(error, torch.OutOfMemoryError):
                raise
    return found


@contextlib.contextmanager
def _numerics(rung: Rung) -> Iterator[None]:
    """The rung's TF32 and attention, and what was set before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if rung.tf32 else "highest")
    by_hand = mock.patch.object(F, "scaled_dot_product_attention", attention_by_hand)
    try:
        with contextlib.nullcontext() if rung.sdpa else by_hand:
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def clear(device: torch.device) -> None:
    """Leave nothing to what is measured next: no memory, and no compiled graph.

    One that was compiled for another batch would make the next one's dynamic, and of one function only so
    many are kept (`torch._dynamo.config.recompile_limit`): the rest would silently not be compiled.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def nanogpt_step(checkout: Path, ours: TrainConfig, device: torch.device, compiled: bool) -> Step:
    """A step of the model in a nanoGPT checkout as its train.py does it, on tokens that lie on the device."""
    config, seq_len = ours.model, ours.loader.seq_len
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    model = module.GPT(module.GPTConfig(block_size=seq_len, vocab_size=50_304, bias=False, **sizes))
    model.to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    forward = torch.compile(model) if compiled else model
    inputs, targets = random_batch(ours.loader.batch_size, seq_len, device)
    autocast = make_autocast(ours.precision, device)
    return bare_step(lambda: forward(inputs, targets)[1], model, optimizer, autocast)


def flops_a_token(config: ModelConfig, seq_len: int) -> int:
    """`model.flops_per_token` of this shape, by a model without memory."""
    with torch.device("meta"):
        return flops_per_token(GPT(config, vocab_size=VOCAB_SIZE, seq_len=seq_len))
