"""Whether a run may start or go on in a directory: asked before anything is built, and under its lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from harness.checkpoints import checkpoint
from harness.commandline.commands import command, shown
from harness.config import TrainConfig
from harness.errors import UserError
from harness.resuming.auto_resume import Found
from harness.run_files import run_dir

try:
    import fcntl
except ImportError:  # no such locks here: two processes in one directory go unnoticed
    fcntl = None  # type: ignore[assignment]


def check(config: TrainConfig, path: Path, found: Found, *, again: bool = False, held: bool = False) -> None:
    """Raise `UserError` where a run that begins at what was found may not write into `path`.

    `again`: it is the run of `path` that its launcher starts again. `held`: this process has it `locked`.
    """
    saved = found.saved
    if saved is not None and saved.run_dir == path:
        steps = checkpoint.complete_steps(path)
        newest = max((s for s in steps if checkpoint.step_dir(path, s) not in found.damaged), default=None)
        if newest != saved.step and config.resume == "auto":
            raise UserError(
                f"{shown(path)}: the newest checkpoint was step {saved.step} and is now step {newest}: "
                "another process goes on with this run. Wait for it, then give the same command again"
            )
        if newest != saved.step:
            raise UserError(
                f"{shown(saved.path)} is not the newest checkpoint of its run, step {newest} is: going on "
                "from it makes a branch, which needs a directory of its own: run.name=NEW_NAME or "
                "hydra.run.dir=FOLDER"
            )
        return
    if (path / "checkpoints").exists() and not (path / "checkpoints").is_dir():
        raise UserError(f"{shown(path / 'checkpoints')} is no folder: no step could be saved. Move it away")
    if not run_dir.holds_a_run(path):
        return
    steps, begun = checkpoint.complete_steps(path), checkpoint.incomplete_steps(path)
    if again and not steps and not begun:
        return
    if config.resume == "auto" and not steps:
        if not begun:
            _check_no_branch(path)
            return  # a run that died before its first checkpoint starts again
        raise UserError(
            f"{shown(path)} has checkpoints without their index, {', '.join(begun)}: starting again would "
            "lose them. Put their checkpoint.json back, or move them away."
        )
    if not held:
        with locked(path):
            pass  # nobody writes into it now: what it holds is another run
    newest_step = f"step {steps[-1]}" if steps else "none"
    go_on = f"Go on with it: {command('train', f'resume={shown(path)}')}; or start" if steps else "Start"
    raise UserError(
        f"{shown(path)} already holds a run (newest checkpoint: {newest_step}); a fresh start would mix two "
        f"runs. {go_on} in another directory: run.name=NAME or hydra.run.dir=FOLDER"
    )


def _check_no_branch(path: Path) -> None:
    """Started from nothing, a branch that died before its first checkpoint would be another run."""
    parent = run_dir.read_status(path).get("parent")
    if isinstance(parent, dict):
        raise UserError(
            f"{shown(path)} holds a branch of {parent.get('path')} at step {parent.get('step')} that ended "
            "before its first checkpoint: resume=auto would start it from nothing, as another run. Move it "
            "away, and start the branch again as it was started"
        )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the directory `path` alone, as long as this process lives; leaves no file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                status = run_dir.read_status(path)
                raise UserError(
                    f"another process is writing into {shown(path)} (pid {status.get('pid')} on "
                    f"{status.get('host')}, step {status.get('step')}): two would mix their runs. Wait for "
                    "it, or use another directory: run.name=NAME"
                ) from None
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether another process writes into the directory `path`."""
    try:
        with locked(path):
            return False
    except UserError:
        return True
    except OSError:  # there is none, or no such locks
        return False
