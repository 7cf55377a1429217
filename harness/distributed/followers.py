"""In a rank that does not lead, what stands for what writes a run down: the same calls, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.checkpoints.saving import Saver
from harness.config import CheckpointConfig
from harness.run_files.run_dir import Status
from harness.tracking.jsonl import MetricsFile


class NoStatus(Status):
    """No status.json; what it would say is known."""

    def __init__(self) -> None:
        self.fields = {}

    def update(self, **fields: Any) -> None:
        self.fields |= fields

    def note(self, **fields: Any) -> None:
        self.fields |= fields

    def end(self, exit_code: int) -> None:
        pass


class NoMetrics(MetricsFile):
    """No metrics.jsonl."""

    def __init__(self) -> None:
        pass

    def append(self, row: dict[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoSaver(Saver):
    """Knows when a save is due, as rank 0 does; rank 0 makes it, and ends the run where it cannot."""

    last_saved = seconds = None
    waits = is_writing = is_late = False

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config

    def save(self, parts: dict[str, Any], before: Callable[[], object] = lambda: None) -> None:
        pass

    def remove_surplus(self, trainer: dict[str, Any]) -> None:
        pass

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _raise_if_hopeless(self) -> None:
        pass
