"""What is said of each step: a row in metrics.jsonl and the tracker, and a line for people."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.tracking.jsonl import read_rows

if TYPE_CHECKING:
    from harness.run_files.run_dir import Status
    from harness.tracking import Tracker
    from harness.tracking.jsonl import MetricsFile
    from harness.training.evaluation import Evaluation
    from harness.training.run import Progress

log = logging.getLogger("harness")

_METRICS = ("accuracy", "reward_margin")  # what an objective may give beside its loss


class StepLog:
    """Times the loop between logged steps and writes their rows.

    `flops_per_token` and `peak_flops` give the MFU; None where the device's peak is not known.
    Evaluations and saves are left out of the times by `paused()`. The tracker is given each step once and
    whole, a step's row and its evaluation's in one: it could not take another part after a kill.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        tracker: Tracker,
        status: Status,
        flops_per_token: int,
        peak_flops: float | None,
    ) -> None:
        self.metrics, self.tracker, self.status = metrics, tracker, status
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._incomplete: dict[str, Any] = {}  # the row of a step whose evaluation is to come
        self._late = False  # whether that row is at the tracker already, from before a resume

    def begin(
        self, progress: Progress, budget: int, tokens_per_step: int, *, unevaluated: bool = False
    ) -> None:
        """Start the clocks at the step of `progress`, of `budget`; the tracker gets what it lacks.

        `unevaluated`: the evaluation of that step is made next.
        """
        step = progress.step
        self._catch_up(step, unevaluated)
        self.budget, self.said, self.tokens_per_step = budget, set[str](), tokens_per_step
        self.started = self.interval_started = time.perf_counter()
        self.paused_s = self.waited_s = 0.0
        self.before = dataclasses.replace(progress)
        self.interval_step, self.waits = step, list[float]()  # seconds, of each step since the last row

    def waited(self, seconds: float) -> None:
        """A step waited so long for its batch."""
        self.waits.append(seconds)
        self.waited_s += seconds

    def take_times(self, progress: Progress) -> None:
        """Set the times of the run so far, those before this start included."""
        seconds = time.perf_counter() - self.started
        progress.elapsed_s = self.before.elapsed_s + seconds
        progress.train_s = self.before.train_s + seconds - self.paused_s
        progress.waited_s = self.before.waited_s + self.waited_s
        progress.timed_tokens = self.before.timed_tokens + progress.tokens - self.before.tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.paused_s += spent
            self.interval_started += spent

    def step(
        self, progress: Progress, position: int, values: dict[str, Any], *, evaluates: bool = False
    ) -> None:
        """Write the row of a logged step. `values`: the objective's metrics, lr, grad_norm, ....

        Of the steps since the row before: `data_wait_ms` is the median of what a step waited for its batch,
        `data_wait_ms_max` the longest, `data_wait_share` their sum as a share of the time.

        `evaluates`: an evaluation of the same step follows.
        """
        steps = progress.step - self.interval_step
        seconds = time.perf_counter() - self.interval_started
        speed = steps * self.tokens_per_step / seconds if seconds > 0 else 0.0
        row = {
            "step": progress.step,
            "epoch": progress.epoch,
            "tokens": progress.tokens,
            **values,
            "tokens_per_s": round(speed, 1),
            "data_wait_ms": round(statistics.median(self.waits) * 1e3, 3),
            "data_wait_ms_max": round(max(self.waits) * 1e3, 3),
            "data_wait_share": round(sum(self.waits) / seconds, 6) if seconds > 0 else 0.0,
            "position": position,
        }
        if self.peak_flops is not None:
            row["mfu"] = round(speed * self.flops_per_token / self.peak_flops, 4)
        self.metrics.append(row)
        if evaluates:
            self._incomplete = row
        else:
            self._mirror(row)
        log.info("%s", self._line(row, seconds / steps))
        self.interval_started, self.interval_step, self.waits = time.perf_counter(), progress.step, []

    def targets(self, step: int, rows: int, empty: int) -> None:
        """Say once what teaches nothing: of a batch's `rows` so many are `empty`, without a target."""
        if empty == rows:
            self._warn_once(
                "batch",
                f"step {step}: the batch has no target, all of it is padding or masked "
                "(loader.mask_boundary): the step changes nothing. This is said once",
            )
        elif empty:
            self._warn_once(
                "row",
                f"step {step}: {empty} of the batch's {rows} sequences have no target, they are "
                "padding or masked (loader.mask_boundary) and teach nothing. This is said once",
            )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self.said:
            self.said.add(about)
            log.warning("%s", message)

    def evaluation(
        self, progress: Progress, position: int, result: Evaluation, hashes: dict[str, str]
    ) -> None:
        """Write the row of an evaluation. `hashes`: what it says of the data so far."""
        row = {
            "step": progress.step,
            "epoch": progress.epoch,
            "tokens": progress.tokens,
            **{f"val_{name}": value for name, value in result.scores().items()},
            "position": position,
            **hashes,
        }
        self.metrics.append(row)
        self._mirror(self._incomplete | row, late=self._late)
        self._incomplete, self._late = {}, False
        bits = "" if result.bits_per_byte is None else f" = {result.bits_per_byte:.4f} bits a byte"
        bits += _named(result.metrics)
        log.info(
            "step %d/%d: validation loss %.4f%s (%d tokens)",
            progress.step, self.budget, result.loss, bits, result.tokens,
        )  # fmt: skip

    def _mirror(self, row: dict[str, Any], *, late: bool = False) -> None:
        self.tracker.log(row, late=late)
        mirrored = {} if self.tracker.last_step is None else {"wandb_last_step": self.tracker.last_step}
        self.status.note(step=row["step"], **mirrored)

    def _catch_up(self, step: int, unevaluated: bool) -> None:
        """Give the tracker the steps up to `step` that it lacks: it lost them in a kill, or was not there."""
        if self.tracker.id is None:
            return
        known = self.tracker.last_step or 0
        missing: dict[int, dict[str, Any]] = {}
        for row in read_rows(self.metrics.path):
            if row["step"] > known:
                missing.setdefault(row["step"], {}).update(row)
        if unevaluated:
            self._incomplete, self._late = missing.pop(step, {}), step <= known
        for row in missing.values():
            self._mirror(row)
        if missing:
            log.info(
                "W&B: it lacked %d rows, of steps %d to %d, which are sent now",
                len(missing), min(missing), max(missing),
            )  # fmt: skip
        if known > step:
            log.info("W&B: it has steps %d to %d already: they are not sent twice", step + 1, known)

    def _line(self, row: dict[str, Any], seconds_a_step: float) -> str:
        parts = [
            f"step {row['step']}/{self.budget}",
            f"epoch {row['epoch']}",
            f"loss {row['loss']:.4f}{_named({key: row[key] for key in _METRICS if key in row})}",
            f"lr {row['lr']:.2e}",
            f"grad {row['grad_norm']:.3f}",
            f"{row['tokens_per_s'] / 1e3:.1f}k tok/s",
            f"wait {row['data_wait_ms']:.2f} ms (max {row['data_wait_ms_max']:.2f})",
            f"position {row['position']}",
            f"eta {clock((self.budget - row['step']) * seconds_a_step)}",
        ]
        if "mfu" in row:
            parts.insert(6, f"mfu {row['mfu']:.1%}")
        return " | ".join(parts)


def _named(metrics: dict[str, float]) -> str:
    return "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
