"""What the benchmarks of the loop share: blocks of steps, a set to read, an interval, the machine."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.storage.manifest import write_manifest
from harness.training.run import Progress

VOCAB_SIZE = 257
CPU = torch.device("cpu")


class BlockClock:
    """Stands where a signal's request to stop does: ends a block of `steps` steps and times it.

    `progress`: of the run, which asks for `name` before every step. `seconds` runs from the first question to
    the first after the last step, so what `train` does before its loop and after it is left out. On CUDA both
    ends wait for the device.
    """

    def __init__(self, progress: Progress, steps: int, device: torch.device = CPU) -> None:
        self._progress, self._last, self._device = progress, progress.step + steps, device
        self.started = self.seconds = 0.0

    @property
    def name(self) -> str | None:
        if not self.started:
            self.started = self._now()
        if self._progress.step < self._last:
            return None
        if not self.seconds:
            self.seconds = self._now() - self.started
        return "the end of the block"

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def write_random_set(directory: Path, tokens: int, vocab_size: int = VOCAB_SIZE) -> None:
    """A set of random bytes in one shard, for both splits the same."""
    directory.mkdir()
    ids = np.random.default_rng(0).integers(0, vocab_size, tokens, dtype=np.uint16)
    digest = hashlib.sha256(ids.tobytes()).hexdigest()
    splits = {}
    for split in ("train", "val"):
        file = f"{split}_00000.npy"
        np.save(directory / file, ids)
        splits[split] = {
            "total_tokens": tokens,
            "shards": [{"file": file, "tokens": tokens, "sha256": digest}],
        }
    write_manifest(
        directory,
        {
            "format_version": 2,
            "storage": {"format": "npy", "dtype": "uint16", "layout": "stream"},
            "tokenizer": {"name": "byte", "vocab_size": vocab_size, "boundary_token_id": 0},
            "splits": splits,
        },
    )


@contextmanager
def console() -> Iterator[None]:
    """A handler as on a terminal, whose lines go nowhere."""
    logger = logging.getLogger("harness")
    with open(os.devnull, "w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


def median_interval(values: list[float], wanted: float = 0.95) -> tuple[float, float, float]:
    """The narrowest interval of order statistics that covers the median with probability `wanted`.

    Returns its ends and its coverage; with fewer than 6 values that is the whole range, and less than 0.95.
    """
    n, ordered = len(values), sorted(values)

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(n, below) for below in range(rank)) / 2**n

    rank = max((r for r in range(1, n // 2 + 1) if coverage(r) >= wanted), default=1)
    return ordered[rank - 1], ordered[n - rank], coverage(rank)


def machine() -> dict[str, Any]:
    """Where this was measured."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def measured_where(result: dict[str, Any]) -> str:
    """One line for people on a result's `machine`, with its `load_average` before and after."""
    where, (before, after) = result["machine"], result["load_average"]
    return (
        f"{where['cpu']}, {where['cpus']} CPUs, {where['platform']}, Python {where['python']}, "
        f"torch {where['torch']}, {where['threads']} threads, "
        f"load average {before:.1f} before and {after:.1f} after"
    )
