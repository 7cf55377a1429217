"""Which checkpoint a run goes on from.

`resume=auto` takes the newest one that is whole. Damaged ones after it are named with what is wrong, and set
aside under another name once the run really goes on; a checkpoint that was itself named has no stand-in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from harness.checkpoints import checkpoint
from harness.checkpoints.checkpoint import Checkpoint
from harness.commandline.commands import shown
from harness.config import TrainConfig
from harness.distributed import rendezvous
from harness.distributed.meeting import Meeting
from harness.errors import UserError
from harness.files import write_atomic
from harness.resuming import together

_LATEST = "latest"


class Found(NamedTuple):
    """The checkpoint to go on from, None for a fresh start; the later ones that cannot be used, and why."""

    saved: Checkpoint | None
    damaged: dict[Path, str]


def find(config: TrainConfig, path: Path, meeting: Meeting | None = None) -> Found:
    """The checkpoint that `config.resume` means for a run in `path`, all its files checked.

    Every rank of the `meeting` calls it. Raises `UserError` where a checkpoint that was named is damaged, or
    all that there are; where the ranks do not find the same one.
    """
    meeting = meeting or rendezvous.current()
    if config.resume is None:
        return Found(None, {})
    if config.resume != "auto":
        return Found(together.opened(meeting, find_named(config.resume)), {})
    if not checkpoint.complete_steps(path):
        together.check_alike(None, meeting)
        return Found(None, {})
    damaged: dict[Path, str] = {}
    incomplete = [int(name.removeprefix("step-")) for name in checkpoint.incomplete_steps(path)]
    for step in sorted([*checkpoint.complete_steps(path), *incomplete], reverse=True):
        folder = checkpoint.step_dir(path, step)
        if step in incomplete:
            damaged[folder] = f"{folder} has no checkpoint.json, which is written last"
            continue
        together.check_alike(folder, meeting)
        try:
            return Found(together.checked(meeting, folder), damaged)
        except UserError as error:
            damaged[folder] = str(error)
    lines = "\n".join(f"  - {problem}" for problem in damaged.values())
    raise UserError(
        f"{shown(path)} has no checkpoint that is whole:\n{lines}\n"
        "A start from nothing would write over its steps. Put a checkpoint back from a copy; or move "
        f"{shown(path)} away, to begin again"
    )


def find_named(word: str) -> Path:
    """The checkpoint that `resume=PATH` means: PATH, or the newest of a run directory.

    Raises `UserError` where there is none, and where a newer step of the run lost its index: an older one is
    not taken for it in silence.
    """
    path = Path(os.path.abspath(os.path.expanduser(word)))
    folder = checkpoint.find(path)
    if folder.parent.parent != path:
        return folder
    newer = [name for name in checkpoint.incomplete_steps(folder.parent.parent) if name > folder.name]
    if newer:
        raise UserError(
            f"{shown(folder.parent / newer[-1])} has no checkpoint.json, which is written last: it is "
            f"damaged, and the newest complete checkpoint is {folder.name}. Put the file back; or go on from "
            "the older one, and keep the damaged one beside it: "
            f"resume=auto hydra.run.dir={shown(folder.parent.parent)}"
        )
    return folder


def report(found: Found) -> list[str]:
    """A line for each checkpoint that is not used, with what is wrong with it, and for rows that are lost."""
    lines = [
        f"damaged and not used, kept as {shown(checkpoint.aside(folder))}: {problem}"
        for folder, problem in found.damaged.items()
    ]
    if found.saved is not None and not (metrics := found.saved.run_dir / "metrics.jsonl").exists():
        lines.append(
            f"{shown(metrics)} is gone, and with it the rows of the steps up to {found.saved.step}: "
            "what follows is complete"
        )
    return lines


def set_aside(found: Found) -> None:
    """Rename the damaged checkpoints, oldest first, and point `latest` at the one that is used."""
    for folder in reversed(found.damaged):
        checkpoint.set_aside(folder)


def mend_latest(saved: Checkpoint) -> None:
    """Let `latest` name the checkpoint: a kill may have come between them, or another one was set aside."""
    if not latest_names(saved):
        write_atomic(saved.path.parent / _LATEST, saved.path.name + "\n")


def latest_names(saved: Checkpoint) -> bool:
    """Whether the run's `latest` names the checkpoint."""
    try:
        return (saved.path.parent / _LATEST).read_text().strip() == saved.path.name
    except (OSError, UnicodeDecodeError):
        return False
