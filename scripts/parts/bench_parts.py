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

from harness.commandline.composition import config_dir, register, to_dataclass
from harness.config import TrainConfig
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
    """A set of random ids in one shard, for both splits the same."""
    ids = np.random.default_rng(0).integers(0, vocab_size, tokens, dtype=np.uint16)
    write_set(directory, {"train": ids, "val": ids}, {"vocab_size": vocab_size, "boundary_token_id": 0})


def write_set(directory: Path, ids: dict[str, np.ndarray], tokenizer: dict[str, int]) -> None:
    """The uint16 ids of both splits as a new set, a shard each."""
    directory.mkdir()
    splits: dict[str, Any] = {}
    for split, tokens in ids.items():
        file, digest = f"{split}_00000.npy", hashlib.sha256(tokens.tobytes()).hexdigest()
        np.save(directory / file, tokens)
        shard = {"file": file, "tokens": len(tokens), "sha256": digest}
        splits[split] = {"total_tokens": len(tokens), "shards": [shard]}
    write_manifest(
        directory,
        {
            "format_version": 2,
            "storage": {"format": "npy", "dtype": "uint16", "layout": "stream"},
            "tokenizer": {"name": "byte", **tokenizer},
            "splits": splits,
        },
    )


def composed(words: list[str]) -> TrainConfig:
    """What conf/ holds, and these words of train.py."""
    from hydra import compose, initialize_config_dir

    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = to_dataclass(compose("train", overrides=words))
    assert isinstance(config, TrainConfig)
    return config


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


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The narrowest interval of order statistics that covers the median with probability 0.95.

    Returns its ends and its coverage; with fewer than 6 values that is the whole range, and less than 0.95.
    """
    n, ordered = len(values), sorted(values)

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(n, below) for below in range(rank)) / 2**n

    rank = max((r for r in range(1, n // 2 + 1) if coverage(r) >= 0.95), default=1)
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
