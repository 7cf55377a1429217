"""The parts of a run put together: model, optimizer, restored state, logs."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from harness import __version__, resume
from harness.checkpoint import Checkpoint
from harness.config import TrainConfig
from harness.data_setup import Data
from harness.device import make_autocast, peak_flops, set_numerics, should_compile
from harness.loaders import Loader
from harness.model import GPT, flops_per_token
from harness.objectives import LanguageModelling
from harness.optim import make_optimizer
from harness.run_dir import Status
from harness.sample import make_sampler
from harness.step_log import StepLog
from harness.tracking import Tracker
from harness.tracking.jsonl import MetricsFile
from harness.trainer import Progress, Run

log = logging.getLogger("harness")


@dataclass(frozen=True)
class Learner:
    """What a checkpoint's tensors hold. `rng` is None at a fresh start: the seed is set already."""

    model: GPT
    optimizer: torch.optim.Optimizer
    rng: dict[str, Any] | None


def build_learner(
    config: TrainConfig, vocab_size: int, device: torch.device, saved: Checkpoint | None
) -> Learner:
    """Model and optimizer on the device: fresh from the seed, or exactly as `saved` left them."""
    set_numerics(config, device)
    resume.seed_rng(config.seed)
    model = GPT(config.model, vocab_size=vocab_size, seq_len=config.loader.seq_len).to(device)
    optimizer = make_optimizer(model, config.optimizer, device)
    if saved is None:
        return Learner(model, optimizer, None)
    saved.restore_into(model, optimizer)
    return Learner(model, optimizer, saved.rng_state())


def assemble(
    config: TrainConfig,
    path: Path,
    *,
    learner: Learner,
    data: Data,
    loader: Loader,
    device: torch.device,
    saved: Checkpoint | None,
    status: Status,
    tracker: Tracker,
) -> Run:
    """Everything the loop needs, in one place."""
    model, manifest = learner.model, data.train.manifest
    compiled = should_compile(config.compile, device)
    objective = LanguageModelling(torch.compile(model.loss) if compiled else model.loss)
    return Run(
        config=config,
        path=path,
        model=model,
        objective=objective,
        optimizer=learner.optimizer,
        loader=loader,
        validation=data.validation,
        device=device,
        autocast=make_autocast(config.precision, device),
        progress=progress_of(saved),
        cursor=loader.state_dict(),
        identity=_identity(path, data, saved),
        log=StepLog(
            MetricsFile(path / "metrics.jsonl"),
            tracker,
            status,
            round(objective.flops * flops_per_token(model)),
            peak_flops(device),
        ),
        status=status,
        sample=make_sampler(model, manifest, seed=config.seed),
    )


def progress_of(saved: Checkpoint | None) -> Progress:
    """Where the checkpoint stands; the start where there is none."""
    if saved is None:
        return Progress()
    return Progress(**{field.name: saved.trainer[field.name] for field in fields(Progress)})


def _identity(path: Path, data: Data, saved: Checkpoint | None) -> dict[str, Any]:
    """What trainer.json says beside the progress: which run, which data, which code."""
    manifest = data.train.manifest
    goes_on = saved is not None and saved.run_dir == path
    return {
        "run_id": saved.trainer["run_id"] if saved is not None and goes_on else uuid.uuid4().hex,
        "parent": parent_of(path, saved),
        "metadata_sha256": manifest.metadata_sha256,
        "content_sha256": manifest.content_sha256,
        "vocab_size": manifest.tokenizer.vocab_size,
        "versions": {"harness": __version__, "torch": torch.__version__},
    }


def parent_of(path: Path, saved: Checkpoint | None) -> dict[str, Any] | None:
    """The checkpoint a branch began from; a run that goes on keeps the parent it had."""
    if saved is None:
        return None
    if saved.run_dir == path:
        parent: dict[str, Any] | None = saved.trainer["parent"]
        return parent
    return {"run_id": saved.trainer["run_id"], "path": str(saved.run_dir), "step": saved.step}
