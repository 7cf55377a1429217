"""The loops that `bench_train.py` compares, as functions that make a block of steps and say its seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from unittest import mock

import torch

from harness.build import assemble, build_learner, objectives_of
from harness.config import TrainConfig
from harness.data_setup import open_data
from harness.hardware.device import make_autocast
from harness.loaders import TokenDataLoader, make_loader
from harness.preemption import StopRequest
from harness.run_files.run_dir import Status
from harness.storage import TokenStore
from harness.tracking import NoTracker
from harness.training import garbage, trainer
from harness.training.profiling import StepProfiler
from harness.training.run import Run
from parts.bench_parts import BlockClock
from parts.train_ladder import VOCAB_SIZE, Step, bare_step, synchronise

Block = Callable[[], float]


@contextlib.contextmanager
def harness_block(
    config: TrainConfig, path: Path, steps: int, device: torch.device
) -> Iterator[tuple[Run, Block, TokenStore]]:
    """A run, a function that trains a block of its loop and returns the seconds, and what it reads."""
    with contextlib.closing(open_data(config, print)) as data:
        assert isinstance(data.train, TokenStore)
        learner = build_learner(config, VOCAB_SIZE, device, None)
        path.mkdir()
        with contextlib.closing(make_loader(config.loader, data.train)) as loader:
            run = assemble(
                config, path, learner=learner, data=data, loader=loader, device=device, saved=None,
                status=Status(path / "status.json"), tracker=NoTracker(), identity={"run_id": "bench"},
            )  # fmt: skip

            def block() -> float:
                clock = BlockClock(run.progress, steps, device)
                with mock.patch.object(trainer, "save"):  # a checkpoint a block would cost more than it
                    trainer.train(run, cast(StopRequest, clock))
                return clock.seconds

            yield run, block, data.train


def traced(run: Run, block: Block) -> None:
    """Train a block more, of which three steps are traced into the run's `profile/`."""
    run.profiler = StepProfiler(run.path, run.device)
    with contextlib.closing(run.profiler):
        block()
    run.profiler = None


def bare_loop(config: TrainConfig, store: TokenStore, device: torch.device) -> Step:
    """One step of the bare loop: the same model, loss and optimizer, over batches in (pinned) memory."""
    learner = build_learner(config, VOCAB_SIZE, device, None)
    objective, _ = objectives_of(config, learner, device)
    loader = TokenDataLoader(store, config.loader.batch_size, config.loader.seq_len)
    pairs = [loader.next_batch()[:2] for _ in range(4)]
    if device.type == "cuda":
        pairs = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in pairs]
    count = 0

    def loss() -> torch.Tensor:
        nonlocal count
        inputs, targets = (part.to(device, non_blocking=True) for part in pairs[count % len(pairs)])
        count += 1
        return objective.sums(inputs, targets)["loss"] / targets.numel()

    return bare_step(loss, learner.model, learner.optimizer, make_autocast(config.precision, device))


def block_of(step: Step, steps: int, device: torch.device) -> Block:
    """A function that makes `steps` steps and returns the seconds they took.

    The collector is kept away, as it is by the harness.
    """

    @garbage.frozen()
    def block() -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise(device)
        return time.perf_counter() - start

    return block


def in_turns(sides: dict[str, Block], blocks: int, seconds: dict[str, list[float]]) -> Iterator[None]:
    """Add the seconds of `blocks` blocks a side to `seconds`, round by round; who begins changes."""
    names = list(sides)
    for block in range(blocks):
        for name in names if block % 2 else reversed(names):
            seconds[name].append(sides[name]())
        yield
