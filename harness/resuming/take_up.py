"""A checkpoint as the data and the settings of now take it up: where its cursor is, what its numbers mean."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from harness.checkpoints import rng
from harness.checkpoints.checkpoint import RNG, Checkpoint
from harness.config import TrainConfig
from harness.data_setup import Data
from harness.distributed import rendezvous
from harness.loaders import Loader
from harness.resuming import branch, growth, resume_data
from harness.training import completion

if TYPE_CHECKING:
    import torch

    from harness.build import Learner
    from harness.resuming.resume import Changes

_BEST = ("best_val_loss", "best_step")


def taken_up(
    config: TrainConfig, saved: Checkpoint, changes: Changes, data: Data, loader: Loader
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint as this data and these settings take it up, `loader` at its cursor, lines for the log.

    Raises `UserError` where the data is another.
    """
    manifest = data.train.manifest
    lines = resume_data.check_data(saved, config, manifest) + changes.lines
    if saved.trainer["metadata_sha256"] != manifest.metadata_sha256:  # and that was accepted
        saved = growth.taken_over(saved, manifest)
    saved, moved = branch.begun(completion.with_evaluation(saved), config, changes.accepted, data.train)
    if changes.other_losses:
        saved = dataclasses.replace(saved, trainer=saved.trainer | dict.fromkeys(_BEST))
    loader.start_epoch(saved.trainer["epoch"])
    loader.load_state_dict(saved.loader)
    return saved, lines + moved


def restore_rng(saved: Checkpoint, learner: Learner, config: TrainConfig, device: torch.device) -> list[str]:
    """Set every generator to the checkpoint's state; lines for the log. `UserError` where that cannot be."""
    assert learner.rng is not None
    ranks = rendezvous.current().ranks  # not only of those that have joined: a plan is made without that
    return rng.restore(
        learner.rng, device, source=saved.path / RNG, anew=config.seed + saved.step, ranks=ranks
    )
