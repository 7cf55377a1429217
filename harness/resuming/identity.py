"""Who a run is: what trainer.json says beside the progress, and where its steps came from."""

from __future__ import annotations

import uuid
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness import __version__
from harness.auditing.data_chain import first_value
from harness.checkpoints import reference, weights
from harness.checkpoints.checkpoint import Checkpoint
from harness.config import TrainConfig
from harness.config_record import to_dict
from harness.data_setup import Data
from harness.resuming import lineage
from harness.run_files.run_dir import read_status
from harness.training.run import Progress

if TYPE_CHECKING:
    from harness.build import Learner


def progress_of(saved: Checkpoint | None) -> Progress:
    """Where the checkpoint stands; the start where there is none."""
    if saved is None:
        return Progress()
    names = [field.name for field in fields(Progress) if field.name in saved.trainer]
    return Progress(**{name: saved.trainer[name] for name in names})


def chain_start(config: TrainConfig, data: Data, saved: Checkpoint | None) -> str | None:
    """The data chain before the next step; None where none is kept or the checkpoint's cannot go on."""
    if not config.trainer.data_chain:
        return None
    return first_value(data.train.metadata_sha256, None if saved is None else saved.trainer)


def lineage_of(
    config: TrainConfig, path: Path, data: Data, saved: Checkpoint | None, cursor: dict[str, Any], run_id: str
) -> list[lineage.Segment]:
    """The run's segments as it starts: a branch and a change of the data begin a new one at `cursor`."""
    before = [] if saved is None else lineage.of_checkpoint(saved)
    goes_on = saved is not None and saved.run_dir == path
    if goes_on and before and before[-1].metadata_sha256 == data.train.metadata_sha256:
        return before
    new = lineage.Segment(
        step=0 if saved is None else saved.step,
        run_id=run_id,
        path=str(path),
        data_path=str(data.train.manifest.directory),
        metadata_sha256=data.train.metadata_sha256,
        loader=to_dict(config.loader),
        cursor=cursor,
        epoch=cursor.get("epoch", progress_of(saved).epoch),
        data_chain=chain_start(config, data, saved),
    )
    return lineage.extended(before, new)


def identity_of(path: Path, data: Data, saved: Checkpoint | None) -> dict[str, Any]:
    """What trainer.json says beside the progress: which run, which data, which code."""
    manifest = data.train.manifest
    goes_on = saved is not None and saved.run_dir == path
    return {
        "run_id": saved.trainer["run_id"] if saved is not None and goes_on else uuid.uuid4().hex,
        "parent": parent_of(path, saved),
        "metadata_sha256": manifest.metadata_sha256,
        "data_changes": [] if saved is None else saved.trainer.get("data_changes", []),
        "content_sha256": manifest.content_sha256,
        "vocab_size": manifest.tokenizer.vocab_size,
        "versions": {"harness": __version__, "torch": torch.__version__},
    }


def keep_origin(
    path: Path, learner: Learner, saved: Checkpoint | None, initial: Checkpoint | None
) -> dict[str, Any]:
    """What trainer.json says of the weights a run began with; writes its reference at the start."""
    sha256: str | None = None
    if learner.reference is not None:
        if saved is None:
            sha256 = reference.write(path, learner.reference)
        elif saved.run_dir != path:
            sha256 = reference.copy_into(path, saved)
        else:
            sha256 = saved.trainer["reference_sha256"]
    if saved is not None:
        return {"init_from": saved.trainer.get("init_from"), "reference_sha256": sha256}
    record = None if initial is None else weights.initial_record(initial)
    return {"init_from": record, "reference_sha256": sha256}


def parent_of(path: Path, saved: Checkpoint | None) -> dict[str, Any] | None:
    """The checkpoint a branch began from; a run that goes on keeps the parent it had."""
    if saved is None:
        return None
    if saved.run_dir == path:
        parent: dict[str, Any] | None = saved.trainer["parent"]
        return parent
    return {
        "run_id": saved.trainer["run_id"],
        "path": str(saved.run_dir),
        "step": saved.step,
        "wandb_id": read_status(saved.run_dir).get("wandb_id"),
    }
