"""Where a run's figures go: metrics.jsonl always (`jsonl.py`), and an optional mirror of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from harness.config_groups import TrackerConfig, WandbTrackerConfig
from harness.errors import UserError


class Tracker(Protocol):
    """A mirror of metrics.jsonl. It never prompts, never raises, never ends a run.

    `id` names the run at the tracker (kept in status.json for a resume), None where there is none.
    """

    id: str | None

    def log(self, row: dict[str, Any]) -> None:
        """Send one row of metrics.jsonl; `row["step"]` is its step. Rows of one step are merged."""

    def finish(self, exit_code: int) -> None:
        """Close the run at the tracker; later calls of anything do nothing."""


class NoTracker:
    """`tracker=none`, and what is left of a tracker that could not start."""

    id: str | None = None

    def log(self, row: dict[str, Any]) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        pass


def open_tracker(
    config: TrackerConfig,
    *,
    run_dir: Path,
    run_config: dict[str, Any],
    name: str,
    digests: Mapping[str, str | None],
    manifest_path: Path,
    wandb_id: str | None,
    report: Callable[[str], None],
) -> Tracker:
    """The tracker that `config` names; its own files lie in `run_dir`.

    `run_config` is the run's whole configuration as plain containers, `name` the run's name,
    `digests` has the set's `metadata_sha256` and `content_sha256`, `manifest_path` its manifest.
    `wandb_id` is the `id` of the same run before a resume. Whatever goes wrong is one line given
    to `report`, and the run goes on without the mirror.
    """
    if config.name == "none":
        return NoTracker()
    if isinstance(config, WandbTrackerConfig):
        from harness.tracking.wandb_tracker import open_wandb

        return open_wandb(
            config,
            run_dir=run_dir,
            run_config=run_config,
            name=name,
            digests=digests,
            manifest_path=manifest_path,
            run_id=wandb_id,
            report=report,
        )
    raise UserError(f"tracker.name={config.name} must be one of none, wandb")
