"""A run in memory: how far it is, and everything its loop works with."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config import TrainConfig, total_steps
from harness.distributed.parallel import is_sharded
from harness.distributed.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from harness.auditing.data_chain import DataChain
    from harness.checkpoints.saving import Saver
    from harness.distributed.agreement import Agreement
    from harness.hardware.device_feed import DeviceFeed
    from harness.hardware.peak_memory import PeakMemory
    from harness.loaders import Loader
    from harness.model import GPT
    from harness.run_files.run_dir import Status
    from harness.storage import Store
    from harness.training.guard import Guard
    from harness.training.objectives import Objective
    from harness.training.profiling import StepProfiler
    from harness.training.sample import Sampler
    from harness.training.step_log import StepLog
    from harness.training.time_limit import TimeLimit


@dataclass
class Progress:
    """Where a run is: what a checkpoint's trainer.json holds, beside what identifies the run.

    `tokens`: `batch_size * seq_len` a step, padding included; a pair of rows counts as one sequence.
    `val_loss` is the validation loss of step `val_step`. `elapsed_s`: seconds in the loop, over all starts;
    `train_s` those without evaluations, samples and saves, in which `timed_tokens` were trained, and
    `waited_s` of them were spent waiting for data: 0 in the part of a run that an older version trained.
    `peak_memory_mb` as in `PeakMemory`, the largest of all starts.
    """

    step: int = 0
    epoch: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    val_loss: float | None = None
    val_step: int | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    train_s: float = 0.0
    waited_s: float = 0.0
    timed_tokens: int = 0
    peak_memory_mb: float | None = None

    def evaluated(self, loss: float) -> None:
        """Take in the validation loss of this step, nats.

        A checkpoint says null where it is no number; the row in metrics.jsonl says which.
        """
        self.val_loss, self.val_step = (loss if math.isfinite(loss) else None), self.step
        if math.isfinite(loss) and (self.best_val_loss is None or loss < self.best_val_loss):
            self.best_val_loss, self.best_step = loss, self.step


@dataclass
class Run:
    """Everything the loop needs, built by `launch`.

    `judge` is the objective of evaluations; `unevaluated`: the evaluation of the step to go on from is due
    and was not made before the run stopped.
    """

    config: TrainConfig
    path: Path
    model: GPT
    objective: Objective
    optimizer: torch.optim.Optimizer
    loader: Loader
    validation: Store
    judge: Objective
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    progress: Progress
    cursor: dict[str, Any]
    identity: dict[str, Any]
    log: StepLog
    guard: Guard
    saver: Saver
    limit: TimeLimit
    feed: DeviceFeed
    chain: DataChain
    memory: PeakMemory
    status: Status
    sample: Sampler | None
    agreement: Agreement
    unevaluated: bool = False
    profiler: StepProfiler | None = None
    ranks: Ranks = ALONE

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the model."""
        return is_sharded(self.config, self.ranks)

    @property
    def budget(self) -> int:
        """The step to train to; the same at every step of the run."""
        return total_steps(self.config, self.progress.step, self.progress.tokens)
