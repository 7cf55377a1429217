"""Where a run computes, in which precision, and what the hardware could do at most."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from harness.config import TrainConfig
from harness.distributed.ranks import ALONE, Ranks
from harness.errors import UserError
from harness.hardware.peak_flops import peak_of


def select_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """`auto` is CUDA where there is one; each of several ranks has the GPU of its number on its host.

    A GPU always has its number, `cuda` is the first: some of torch's functions take no other, and a process
    that has used another one before would go on with that.
    Raises `UserError` for a device that is not there, and for one that two ranks would share.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    if ranks.several and name.startswith("cuda"):
        name = _own_gpu(name, ranks)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"device={name} is no device ({str(error).splitlines()[0]}). Use device=auto."
        ) from None
    if device.type != "cuda":
        return device
    device = torch.device("cuda", device.index or 0)
    if not available or device.index >= torch.cuda.device_count():
        raise UserError(
            f"device={name}: torch sees {torch.cuda.device_count()} CUDA devices. Use device=auto."
        )
    torch.cuda.set_device(device)  # or pinned memory and the like would take memory of another one
    return device


def _own_gpu(name: str, ranks: Ranks) -> str:
    own = f"cuda:{ranks.local_rank}"
    if name not in ("cuda", own):
        raise UserError(
            f"device={name}, but this is rank {ranks.rank} of {ranks.size}, number {ranks.local_rank} on its "
            "host: ranks cannot share a GPU. Use device=auto, which gives each its own; CUDA_VISIBLE_DEVICES "
            "says which there are"
        )
    if torch.cuda.is_available() and ranks.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {ranks.rank} is number {ranks.local_rank} on its host, counted from 0, but torch sees "
            f"{torch.cuda.device_count()} CUDA devices there: ranks cannot share one. Start fewer: "
            f"--nproc-per-node={torch.cuda.device_count()}; or use device=cpu"
        )
    return own


def uses_bf16(precision: str, device: torch.device) -> bool:
    """`auto` is bf16 on a GPU that has units for it: one before Ampere emulates it or does not compile it."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def make_autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A factory of contexts: bf16 autocast over float32 weights, or nothing."""
    if uses_bf16(precision, device):
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext


def should_compile(value: object, device: torch.device) -> bool:
    return device.type == "cuda" if value == "auto" else bool(value)


def set_numerics(config: TrainConfig, device: torch.device) -> None:
    """TF32 for what stays in float32 on CUDA; deterministic algorithms on request."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # Always: torch looks at it once, at the first product of matrices of a process, and a later run of
        # the same process may be a deterministic one. What it asks for is what Hopper has by default.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Also back: a sweep has many runs in a process. Only where it changes: the call imports torch's compiler.
    if config.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.deterministic)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a known GPU in FLOP/s, or None: then no MFU is shown rather than a wrong one.

    The same whatever the run's precision: with `precision=float32`, whose matrix products are TF32, the MFU
    says how much of the GPU is used, and can be compared with that of a bf16 run.
    """
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
