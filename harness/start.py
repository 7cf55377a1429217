"""What a run begins with, found out before anything is written: here a start is refused, or may go on.

A run (launch.py) and its plan (`check=true`, check.py) both come through here, so that they cannot differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from harness.build import Learner, build_learner
from harness.checkpoints import weights
from harness.checkpoints.checkpoint import Checkpoint
from harness.config import TrainConfig
from harness.data_setup import Data, open_data
from harness.distributed import rendezvous
from harness.distributed.meeting import Meeting
from harness.distributed.parallel import check_shares, loader_share
from harness.hardware.device import select_device
from harness.loaders import Loader, make_loader
from harness.optim import check_available
from harness.resuming import auto_resume, branch, resume, resume_data, take_up, together
from harness.resuming.identity import progress_of
from harness.resuming.resume import Changes
from harness.training import completion


@dataclass(frozen=True)
class Start:
    """What can be said of a start without its data. `initial`: whose weights a fresh one takes."""

    found: auto_resume.Found
    changes: Changes | None
    initial: Checkpoint | None
    device: torch.device


@dataclass(frozen=True)
class Plan:
    """What was decided before anything is written. `changes`: lines for the log."""

    config: TrainConfig
    path: Path
    saved: Checkpoint | None
    initial: Checkpoint | None
    data: Data
    loader: Loader
    device: torch.device
    changes: list[str]
    found: auto_resume.Found

    @property
    def goes_on(self) -> bool:
        return self.saved is not None and self.saved.run_dir == self.path


def settle(
    config: TrainConfig, path: Path, found: auto_resume.Found, meeting: Meeting | None = None
) -> Start | None:
    """Check what needs no data of a start from what was found; None where nothing is left to do.

    Every rank of the `meeting` calls it. Raises `UserError` where the run may not start.
    """
    meeting = meeting or rendezvous.current()
    saved, changes, ranks = found.saved, None, meeting.ranks
    if saved is not None:
        changes = resume.check_settings(saved, config)
        branch.check_directory(saved, path, changes.accepted)
        # Rank 0's word: other hosts may have the checkpoint alone of the run's directory.
        if meeting.agree("complete", ranks.leads and completion.is_complete(config, path, saved)):
            return None
        branch.check_budget(saved, path, completion.budget_of(config, saved))
        resume_data.check_place(saved, config)
    completion.check_warmup(config, saved)
    check_shares(config, ranks)
    check_available(config.optimizer)
    device = select_device(config.device, ranks)
    initial = weights.open_initial(config, partial(together.opened, meeting)) if saved is None else None
    meeting.gather("settled")  # nobody prepares or writes before that
    return Start(found, changes, initial, device)


@contextlib.contextmanager
def opened(
    config: TrainConfig,
    path: Path,
    start: Start,
    report: Callable[[str], None],
    *,
    writes: bool = True,
    meeting: Meeting | None = None,
) -> Iterator[Plan]:
    """The start with its data open and its loader where the first step reads.

    `writes` False leaves no trace of it beside the data either. Raises `UserError` where the data does not
    fit the run.
    """
    saved, meeting = start.found.saved, meeting or rendezvous.current()
    ranks, pin = meeting.ranks, start.device.type == "cuda"
    with (
        contextlib.closing(open_data(config, report, writes=writes, meeting=meeting)) as data,
        contextlib.closing(make_loader(config.loader, data.train, **loader_share(ranks), pin=pin)) as loader,
    ):
        if start.initial is not None:
            weights.check_tokenizer(start.initial, data.train.manifest)
        lines = auto_resume.report(start.found)
        if saved is not None and start.changes is not None:
            saved, more = take_up.taken_up(config, saved, start.changes, data, loader)
            lines += more
        yield Plan(
            config, path, saved, start.initial, data, loader, start.device, changes=lines, found=start.found
        )


def learner_of(plan: Plan) -> Learner:
    """Model and optimizer, fresh or as the checkpoint left them; what is not as it was joins `changes`."""
    saved = plan.saved
    learner = build_learner(plan.config, plan.data.train.vocab_size, plan.device, saved, plan.initial)
    if saved is not None:
        plan.changes.extend(take_up.restore_rng(saved, learner, plan.config, plan.device))
    return learner


def first_batch(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the step that the run would begin with."""
    try:
        batch = plan.loader.next_batch()
    except StopIteration:
        plan.loader.start_epoch(progress_of(plan.saved).epoch + 1)
        batch = plan.loader.next_batch()
    return batch.inputs, batch.targets
