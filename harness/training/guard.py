"""Numbers that go wrong: a step that is not finite changes nothing, a loss that jumps is written down.

Whether loss and gradient norm are finite is decided on the device, and the weights are held back there; the
host learns of it a step or two later on CUDA (of several ranks, eight), and for certain before anything is
logged, evaluated or saved.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from harness.auditing.data_chain import batch_sha256
from harness.commandline.commands import shown
from harness.distributed.ranks import ALONE, Ranks
from harness.errors import FailedAlike, RunFailed
from harness.run_files import incidents
from harness.run_files.incidents import batch_in_words, look_command, numbers_in_words
from harness.tracking.jsonl import last_rows
from harness.training.spikes import WINDOW, Spike, SpikeDetector

if TYPE_CHECKING:
    from harness.config import TrainConfig
    from harness.loaders import Batch

MOST_SKIPS = 10  # steps in a row; more is no bad batch but a model that is lost
_BEHIND = 8  # steps that the host may be behind the device before it waits
_QUIET = 100  # steps from one line about spikes to the next

log = logging.getLogger("harness")


@dataclass(frozen=True)
class _Taken:
    """A step whose numbers are on their way to the host: float32 `(2,)`, loss and gradient norm."""

    step: int
    epoch: int
    batch: Batch
    values: Tensor
    arrived: torch.cuda.Event | None


class Guard:
    """Stands between the gradients and the optimizer.

    With `trainer.on_nonfinite=stop` no step changes weights or optimizer state from the first one on whose
    loss or gradient norm is not finite, until `note` or `settle` raises `RunFailed`. With `skip` such a step
    alone changes nothing; the one after `MOST_SKIPS` in a row stops the run.

    `step`: where the run goes on. The skips in a row and the losses up to it are read back from the run
    directory. `finish_saving` is called before a stop lists the checkpoints. Of several `ranks`, which all
    give the same numbers, each holds its optimizer back, skips and stops alike; rank 0 alone writes and says
    it, and looks for spikes.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        step: int,
        finish_saving: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.run_dir, self.config, self.optimizer = run_dir, config, optimizer
        self.finish_saving, self._leads, self._several = finish_saving, ranks.leads, ranks.several
        self._stops = config.trainer.on_nonfinite == "stop"
        self._last_skip = step
        self._skips: int = ranks.broadcast(incidents.skips_before(run_dir, step) if ranks.leads else 0)
        before = _losses_before(run_dir) if ranks.leads else []
        self._detector = SpikeDetector(config.trainer.spike_zscore if ranks.leads else None, before)
        self._said, self._unsaid = -_QUIET, 0
        self._values: Tensor | None = None
        self._pending: deque[_Taken] = deque()
        self._failed: RunFailed | None = None
        self._held: Tensor | None = None
        if _can_be_held(optimizer):
            # torch's fused steps read this on the device: at 1 they leave weights, moments and step counter
            # as they are. Its gradient scaler uses it in the same way; it is no part of the state_dict.
            self._held = torch.zeros((), device=device)
            optimizer.found_inf = self._held  # type: ignore[attr-defined]

    def step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Take the optimizer's step if both scalars are finite, without waiting for the device to say so.

        Clipping by a norm that is not finite has spoilt the gradients; they must not be used any more.
        """
        self._values = torch.stack([loss.detach().float(), grad_norm.detach().float()])
        bad = torch.isfinite(self._values).all().logical_not()
        if self._held is not None:
            self._held.copy_(torch.maximum(self._held, bad) if self._stops else bad)
            self.optimizer.step()
        elif not bad.item():  # an optimizer that cannot be held back on the device: this waits for it
            self.optimizer.step()

    def note(self, step: int, epoch: int, batch: Batch) -> None:
        """Say which step and batch that was, and look at the numbers that have come in.

        Raises `RunFailed` where the run must stop. A batch without targets takes no step, and is not judged.
        """
        if self._values is None:
            return
        self._pending.append(_Taken(step, epoch, batch, *_to_host(self._values)))
        self._values = None
        self._look(wait=False)

    def settle(self) -> None:
        """Look at all numbers, waiting for the device. Raises `RunFailed` where the run must stop."""
        self._look(wait=True)

    def has_skipped(self, step: int) -> bool:
        """Whether `step`, the last one, changed nothing; after `settle`."""
        return self._skips > 0 and self._last_skip == step

    def _look(self, *, wait: bool) -> None:
        if self._failed is not None:  # whoever goes on after a stop, to save perhaps, hears of it again
            raise self._failed
        while self._pending:
            first = self._pending[0]
            # Several ranks look at a step so many later, for all must stop at the same one: what has arrived
            # already is not the same on each.
            if first.arrived is not None and (self._several or not first.arrived.query()):
                if not wait and len(self._pending) <= _BEHIND:
                    return
                first.arrived.synchronize()
            self._judge(self._pending.popleft())

    def _judge(self, taken: _Taken) -> None:
        loss, grad_norm = taken.values.tolist()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._on_nonfinite(taken, self._row("nonfinite", taken, loss, grad_norm))
        elif (spike := self._detector.judge(loss)) is not None:
            self._on_spike(taken, self._row("spike", taken, loss, grad_norm), spike)

    def _on_nonfinite(self, taken: _Taken, row: dict[str, Any]) -> None:
        if self._last_skip != taken.step - 1:
            self._skips = 0
        if self._stops or self._skips >= MOST_SKIPS:
            self._stop(taken, row)
        self._skips, self._last_skip = self._skips + 1, taken.step
        if not self._leads:
            return
        incidents.append(self.run_dir, row | {"action": "skip"})
        log.warning(
            "step %d: %s, at %s: skipped, it changes neither weights nor optimizer",
            taken.step, numbers_in_words(row), batch_in_words(row, taken.batch.cursor),
        )  # fmt: skip

    def _stop(self, taken: _Taken, row: dict[str, Any]) -> NoReturn:
        self._pending.clear()
        if not self._leads:
            self._failed = FailedAlike(
                f"step {taken.step}: {numbers_in_words(row)}; rank 0 says more", "diverged"
            )
            raise self._failed
        skips = 0 if self._stops else self._skips
        where = f"Written to {shown(self.run_dir / incidents.FILE)}"
        try:
            self.finish_saving()
            keep = incidents.good_steps(self.run_dir, row, skips)
            incidents.append(self.run_dir, row | {"action": "stop", "keep": keep})
        except Exception as error:  # a full disk must not hide what happened first
            where = f"It could not be written to {shown(self.run_dir / incidents.FILE)}: {error}"
        lr, cursor = self.config.optimizer.lr, taken.batch.cursor
        self._failed = RunFailed(
            incidents.stop_in_words(self.run_dir, row, cursor, lr, skips, where), reason="diverged"
        )
        raise self._failed

    def _on_spike(self, taken: _Taken, row: dict[str, Any], spike: Spike) -> None:
        incidents.append(self.run_dir, row | {"action": "none", **spike._asdict()})
        if taken.step - self._said < _QUIET:
            self._unsaid += 1
            return
        since = f"; {self._unsaid} more since step {self._said}" if self._unsaid else ""
        log.warning(
            "step %d: the loss jumped to %.4f, %.1f robust deviations above %.4f, the median of the last %d, "
            "at %s%s. Look at the batch: %s",
            taken.step, row["loss"], spike.zscore, spike.median, WINDOW,
            batch_in_words(row, taken.batch.cursor), since, look_command(self.run_dir, row),
        )  # fmt: skip
        self._said, self._unsaid = taken.step, 0

    def _row(self, kind: str, taken: _Taken, loss: float, grad_norm: float) -> dict[str, Any]:
        position, loader = taken.batch.cursor["position"], self.config.loader
        size = loader.batch_size * (loader.seq_len if loader.name == "sequential" else 1)
        return {
            "kind": kind,
            "step": taken.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "epoch": taken.epoch,
            "position_before": position - size,
            "position": position,
            "batch_sha256": batch_sha256(taken.batch) if self._leads else None,  # others have a part of it
        }


def _can_be_held(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's fused ones, and MuonAdamW


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy that the host may read once the event has come; on a CPU the values themselves, at once."""
    if values.device.type != "cuda":
        return values.cpu(), None
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(values.device))
    return copy, arrived


def _losses_before(run_dir: Path) -> list[float]:
    """The last losses in metrics.jsonl, so that the first step after a resume can be judged.

    Where not every step is logged they reach further back than those of a run that was never stopped.
    """
    path = run_dir / "metrics.jsonl"
    rows = last_rows(path) if path.exists() else []
    losses = [row["loss"] for row in rows if "loss" in row and not row.get("skipped")]
    return [loss for loss in losses if math.isfinite(loss)][-WINDOW:]
