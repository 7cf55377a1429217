"""Which checkpoints of a run stay, and the removal of the others and of what killed writers left.

Whatever the run did not write stays: a checkpoint counts as its own where its files are those of a
checkpoint and its trainer.json names this run and the folder's step.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from harness.checkpoints.checkpoint import checkpoints_dir, complete_steps, step_dir
from harness.checkpoints.checkpoint_files import INDEX, TRAINER, expected_files
from harness.config import CheckpointConfig
from harness.files import fsync_dir
from harness.run_files import incidents

log = logging.getLogger("harness")

_LEFT_FOLDER = re.compile(r"step-\d{8,}\.tmp|\.step-\d{8,}\.removed")  # of a writer, of a removal
_LEFT_FILE = re.compile(r"\..+\.\d+\.tmp")  # of harness.files.replacing


def remove_surplus(run_dir: Path, config: CheckpointConfig, newest: int, run_id: str) -> None:
    """Remove what `config` does not keep, oldest first; only after the step `newest` is on disk.

    Raises `OSError` where a removal failed, after the others, and `UserError` where the incidents that keep
    some cannot be read.
    """
    failed = None
    for step in surplus(run_dir, config, newest, run_id):
        try:
            _remove(step_dir(run_dir, step))
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def surplus(run_dir: Path, config: CheckpointConfig, newest: int, run_id: str) -> list[int]:
    """The steps that may go, ascending."""
    if config.keep_last is None:
        return []
    kept = incidents.kept_steps(run_dir) | {newest}
    if skipped := incidents.skips_before(run_dir, newest):  # should that end in a stop, here is the way back
        kept |= set([step for step in complete_steps(run_dir) if step <= newest - skipped][-1:])
    own = _own(run_dir, run_id)
    if config.keep_best:
        kept |= _best(own)
    older = sorted(own)[: -config.keep_last]
    every = config.keep_every
    return [step for step in older if step not in kept and (every is None or step % every)]


def _best(own: dict[int, dict[str, Any]]) -> set[int]:
    """Of the checkpoints whose step was evaluated, the one of the smallest loss, the first of equal ones.

    The best loss of all may be of a step that was not saved; then its checkpoint is not to be had.
    """
    losses = {
        step: trainer["val_loss"]
        for step, trainer in own.items()
        if trainer.get("val_step") == step and isinstance(trainer.get("val_loss"), float)
    }
    return {min(losses, key=lambda step: (losses[step], step))} if losses else set()


def clean_leftovers(run_dir: Path) -> list[Path]:
    """Remove what killed writers left in a run directory that this process holds alone; what went."""
    gone = []
    for path in _leftovers(run_dir):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            gone.append(path)
        except OSError as error:
            log.warning("%s, which a writer that was killed had left, cannot be removed: %s", path, error)
    return gone


def _leftovers(run_dir: Path) -> list[Path]:
    """What is named as only our unfinished writing is, in each of the folders that we write to."""
    checkpoints = checkpoints_dir(run_dir)
    found = []
    for folder in (run_dir, run_dir / ".hydra", checkpoints):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            is_file = path.is_file() and _LEFT_FILE.fullmatch(path.name)
            is_step = path.is_dir() and _LEFT_FOLDER.fullmatch(path.name) and folder == checkpoints
            if (is_file or is_step) and not path.is_symlink():
                found.append(path)
    return found


def _remove(folder: Path) -> None:
    """Rename, so that a removal that is killed leaves nothing that looks like a checkpoint, then remove."""
    going = folder.with_name(f".{folder.name}.removed")
    if going.exists():
        shutil.rmtree(going)
    os.rename(folder, going)
    fsync_dir(folder.parent)
    shutil.rmtree(going)


def _own(run_dir: Path, run_id: str) -> dict[int, dict[str, Any]]:
    """The checkpoints that the run wrote: what trainer.json says of each, by step."""
    found = {}
    for step in complete_steps(run_dir):
        folder = step_dir(run_dir, step)
        try:
            names = {path.name for path in folder.iterdir()}
            trainer = json.loads((folder / TRAINER).read_bytes())
        except (OSError, ValueError):
            continue
        whole = names == {*expected_files(names), INDEX}
        if folder.is_symlink() or not whole or not isinstance(trainer, dict):
            continue
        if trainer.get("run_id") == run_id and trainer.get("step") == step:
            found[step] = trainer
    return found
