"""`profile=true`: a trace of a few steps, to see where their time goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from harness.commandline.commands import shown

log = logging.getLogger("harness")

# Of the steps that this process makes: the first ones compile and fill caches, two more warm the profiler up.
_SKIPPED, _WARM, _TRACED = 4, 2, 3  # after the very first
_ROWS, _NAME = 10, 60  # operators in the log, characters of their names


class StepProfiler:
    """Traces steps 8 to 10 from where the run begins or goes on into `profile/` in `run_dir`.

    It looks only: losses and weights are those of a run without it. The steps it watches are slower, and so
    are their rows. To be closed in a `finally`: torch has one profiler a process.
    """

    def __init__(self, run_dir: Path, device: torch.device) -> None:
        self._folder, self._device = run_dir / "profile", device
        self._profiler: torch.profiler.profile | None = None
        self._first = 0
        self._done = False

    def made(self, step: int) -> None:
        """Step `step` is done."""
        if self._done:
            return
        if self._profiler is not None:
            self._profiler.step()
            if self._done:
                self.close()
            return
        self._first = step + 1 + _SKIPPED + _WARM
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, schedule=self._action, on_trace_ready=self._write
        )
        self._profiler.step_num = step + 1  # the trace names the run's own steps
        self._profiler.start()

    def close(self) -> None:
        """Stop; what is not traced by then is not written."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            if not self._done:
                log.info(
                    "profile   none: the run ended before steps %d to %d were made",
                    self._first, self._first + _TRACED - 1,
                )  # fmt: skip
            self._done = True
            profiler.stop()

    def _action(self, step: int) -> ProfilerAction:
        last = self._first + _TRACED - 1
        if self._first - _WARM <= step < self._first:
            return ProfilerAction.WARMUP
        if self._first <= step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.NONE

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self._done:  # stopped early: a part of the steps would be taken for all of them
            return
        self._done = True
        last = self._first + _TRACED - 1
        path = self._folder / f"steps-{self._first:08d}-{last:08d}.json.gz"
        partial = path.with_name(f".{path.name}")  # torch compresses by the name's ending
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:  # torch has errors of its own for a full disk
            log.warning("profile   %s could not be written: %s; training goes on", shown(path), error)
            return
        log.info(
            "profile   steps %d to %d: %s, to be opened at https://ui.perfetto.dev or in chrome://tracing. "
            "The most time went into:",
            self._first, last, shown(path),
        )  # fmt: skip
        for line in _table(profiler.key_averages(), on_gpu=self._device.type == "cuda"):
            log.info("  %s", line)


def _table(events: Sequence[Any], *, on_gpu: bool) -> list[str]:
    """The operators, or a GPU's kernels, that took the most time by themselves, without what they called."""
    rows = []
    for event in events:
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        if event.key.startswith("ProfilerStep") or is_kernel != on_gpu or event.is_user_annotation:
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        rows.append((spent / 1e3, event.count, event.key))
    total = sum(spent for spent, _, _ in rows) or 1.0
    lines = [f"{'ms a step':>9} {'share':>6} {'calls':>6}  {'kernel' if on_gpu else 'operator'}"]
    for spent, count, name in sorted(rows, reverse=True)[:_ROWS]:
        name = name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."
        lines.append(f"{spent / _TRACED:9.3f} {spent / total:6.1%} {count / _TRACED:6.0f}  {name}")
    return lines
