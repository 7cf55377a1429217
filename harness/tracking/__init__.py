"""Where a run's figures go: metrics.jsonl always (`jsonl.py`), and an optional mirror of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harness.config_groups import TrackerConfig, WandbTrackerConfig
from harness.errors import UserError


class Tracker(Protocol):
    """A mirror of metrics.jsonl. It never prompts, never raises, never ends a run.

    `id` names the run at the tracker (kept in status.json for a resume), None where there is none;
    `last_step` is the last step it has, also from before a resume: it lacks none before that.
    """

    id: str | None
    last_step: int | None

    def log(self, row: dict[str, Any], *, late: bool = False) -> None:
        """Send one step: its rows of metrics.jsonl, merged. A step that is there already is passed over,
        but for what came to it `late`, an evaluation that was made at a resume."""

    def summarize(self, values: dict[str, Any]) -> None:
        """Set figures of the whole run."""

    def finish(self, exit_code: int, at_most: float = math.inf) -> None:
        """Close the run at the tracker, in `at_most` seconds; later calls of anything do nothing."""


class NoTracker:
    """`tracker=none`, and what is left of a tracker that could not start."""

    id: str | None = None
    last_step: int | None = None

    def log(self, row: dict[str, Any], *, late: bool = False) -> None:
        pass

    def summarize(self, values: dict[str, Any]) -> None:
        pass

    def finish(self, exit_code: int, at_most: float = math.inf) -> None:
        pass


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run.

    `id` is its name at the tracker, the same after each resume; its own files lie in `directory`. `config`:
    the whole configuration as plain containers; `digests`: the set's `metadata_sha256` and
    `content_sha256`; `last_step`: the last step that was handed to the tracker before a resume; `parent`:
    of a branch, `run_id`, `path`, `step` and `wandb_id` of what it began from; `group`: the sweep that it
    is a job of; `tags`: what was chosen for it, beside the user's own.
    """

    id: str
    directory: Path
    config: dict[str, Any]
    digests: Mapping[str, str | None]
    manifest_path: Path
    resumes: bool = False
    last_step: int | None = None
    parent: dict[str, Any] | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


def open_tracker(config: TrackerConfig, tracked: TrackedRun, report: Callable[[str], None]) -> Tracker:
    """The tracker that `config` names.

    Whatever goes wrong is one line given to `report`, and the run goes on without the mirror.
    """
    if config.name == "none":
        return NoTracker()
    if isinstance(config, WandbTrackerConfig):
        from harness.tracking.wandb_tracker import open_wandb

        return open_wandb(config, tracked, report)
    raise UserError(f"tracker.name={config.name} must be one of none, wandb")
