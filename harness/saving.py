"""When a run is saved, and that it was."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from harness import checkpoint
from harness.commands import shown
from harness.config import CheckpointConfig

log = logging.getLogger("harness")


class Saver:
    """Writes the checkpoints of the run in `run_dir`, as often as `config` says."""

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self._run_dir, self._config = run_dir, config
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether step `step`, just done, is to be saved."""
        minutes = self._config.minutes
        if minutes is not None and time.monotonic() - self._last >= 60 * minutes:
            return True
        return step % self._config.interval == 0

    def save(self, parts: dict[str, Any]) -> None:
        """Write a checkpoint of `parts`, the arguments of `checkpoint.save`."""
        path = checkpoint.save(self._run_dir, **parts)
        self._last = time.monotonic()
        log.info("saved %s", shown(path))

    def finish(self) -> None:
        """Return when the newest checkpoint is on disk; raises what kept it from there."""

    def close(self) -> None:
        """End what still runs."""
