"""Where a run stands and how it came there, in a few lines, from its directory alone: no torch, no data.

Whatever a run directory lacks, or cannot be read, is left out: this is for looking at runs that went wrong.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from harness.checkpoints import checkpoint
from harness.checkpoints.checkpoint_files import INDEX
from harness.commandline.commands import shown
from harness.errors import UserError
from harness.run_files import incidents, run_dir

_MOST_STARTS = 8


def history(path: Path) -> list[str]:
    """The lines about the run in `path`, a run directory or one of its checkpoints."""
    directory = path.parent.parent if (path / INDEX).is_file() else path
    status = run_dir.read_status(directory)
    lines = [*_state(status), *_starts(directory), *_parent(status), *_incidents(directory)]
    steps = checkpoint.complete_steps(directory)
    if steps:
        lines.append(f"saved      {len(steps)} checkpoints, of steps {', '.join(map(str, _ends(steps)))}")
    return lines


def _state(status: dict[str, Any]) -> list[str]:
    if not status:
        return []
    where = f"at step {status.get('step')}, in the phase {status.get('phase')}, {status.get('updated')}"
    lines = [f"state      {status.get('state')} {where}"]
    if status.get("error"):
        lines.append(f"error      {status['error']}")
    if status.get("wandb_id"):
        lines.append(f"W&B        run {status['wandb_id']}, which has step {status.get('wandb_last_step')}")
    return lines


def _starts(directory: Path) -> list[str]:
    starts = [start for start in run_dir.read_starts(directory) if isinstance(start, dict)]
    words = [
        f"           after step {start.get('step')}, {start.get('time')}, on {start.get('host')}"
        for start in starts
    ]
    return [f"starts     {len(words)}", *_ends(words, "           ...")] if words else []


def _parent(status: dict[str, Any]) -> list[str]:
    parent = status.get("parent")
    if not isinstance(parent, dict):
        return []
    at_wandb = f", W&B run {parent['wandb_id']}" if parent.get("wandb_id") else ""
    return [f"branch of  {shown(Path(str(parent.get('path'))))} at step {parent.get('step')}{at_wandb}"]


def _incidents(directory: Path) -> list[str]:
    try:
        rows = incidents.read(directory)
    except (OSError, UserError):
        return []
    counts = Counter(f"{row.get('kind')} ({row.get('action')})" for row in rows)
    last = f", the last at step {rows[-1].get('step')}" if rows else ""
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return [f"incidents  {words}{last}: {shown(directory / incidents.FILE)}"] if rows else []


def _ends(values: list[Any], between: str = "...") -> list[Any]:
    """All of a short list, the ends of a long one."""
    half = _MOST_STARTS // 2
    return values if len(values) <= _MOST_STARTS else [*values[:half], between, *values[-half:]]
