"""How far a run is to go, and whether it has got there with everything that belongs to its end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from harness.checkpoints.checkpoint import Checkpoint
from harness.commandline.commands import shown
from harness.config import TrainConfig, total_steps
from harness.config_checks import warmup_problems
from harness.errors import UserError
from harness.resuming import lineage
from harness.resuming.auto_resume import latest_names
from harness.resuming.identity import progress_of
from harness.run_files import run_dir
from harness.tracking.jsonl import evaluation_of
from harness.training.trainer import evaluation_is_due


def budget_of(config: TrainConfig, saved: Checkpoint | None) -> int:
    """The step to train to, from the checkpoint on; a budget in tokens counts those it was trained on."""
    progress = progress_of(saved)
    return total_steps(config, progress.step, progress.tokens)


def check_warmup(config: TrainConfig, saved: Checkpoint | None) -> None:
    """Raise `UserError` where the warm-up is longer than the schedule, whose steps are known by now."""
    steps = config.schedule.total_steps or budget_of(config, saved)
    if problems := warmup_problems(config, steps):
        raise UserError("\n".join(problems))


def is_unevaluated(config: TrainConfig, path: Path, saved: Checkpoint | None) -> bool:
    """Whether the run was stopped before the evaluation of the step that it goes on from in `path`.

    A branch does not repeat the evaluation that its parent, which trained the step, has in its rows.
    """
    if saved is None or not evaluation_is_due(config, saved.step, budget_of(config, saved)):
        return False
    trained = [Path(segment.path) for segment in lineage.of_checkpoint(saved) if segment.step < saved.step]
    folders = {path, saved.run_dir, *trained[-1:]}
    return all(evaluation_of(folder / "metrics.jsonl", saved.step) is None for folder in folders)


def with_evaluation(saved: Checkpoint) -> Checkpoint:
    """The checkpoint with the validation loss of its step, which may have come after it was saved."""
    row = evaluation_of(saved.run_dir / "metrics.jsonl", saved.step)
    if row is None:
        return saved
    progress = progress_of(saved)
    progress.evaluated(float(row["val_loss"]))
    return dataclasses.replace(saved, trainer=saved.trainer | vars(progress))


def is_complete(config: TrainConfig, path: Path, saved: Checkpoint) -> bool:
    """Whether nothing is left to do for the run in `path`: no step, no evaluation, no last word."""
    return (
        saved.run_dir == path
        and saved.step >= budget_of(config, saved)
        and not is_unevaluated(config, path, saved)
        and run_dir.read_status(path).get("state") == "done"
        and latest_names(saved)
    )


def in_words(config: TrainConfig, path: Path, saved: Checkpoint) -> str:
    """What is said of a run that is complete."""
    return (
        f"already complete at step {saved.step}, the budget is {budget_of(config, saved)}: {shown(path)}. "
        "For more: trainer.max_steps=N"
    )
