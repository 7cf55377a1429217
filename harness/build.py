"""The parts of a run put together: model, optimizer, restored state, logs."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from harness import __version__, reference, resume, weights
from harness.checkpoint import Checkpoint
from harness.config import TrainConfig
from harness.data_setup import Data
from harness.device import make_autocast, peak_flops, set_numerics, should_compile
from harness.loaders import Loader
from harness.model import GPT, flops_per_token
from harness.objectives import LanguageModelling, Objective, make_preference
from harness.optim import make_optimizer
from harness.run_dir import Status
from harness.sample import make_sampler
from harness.step_log import StepLog
from harness.storage import PairStore
from harness.tracking import Tracker
from harness.tracking.jsonl import MetricsFile
from harness.trainer import Progress, Run

log = logging.getLogger("harness")


@dataclass(frozen=True)
class Learner:
    """What a checkpoint's tensors hold. `rng` is None at a fresh start: the seed is set already.

    `reference`: the frozen starting weights of a run that is trained on preferences.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    rng: dict[str, Any] | None
    reference: GPT | None = None


def build_learner(
    config: TrainConfig,
    vocab_size: int,
    device: torch.device,
    saved: Checkpoint | None,
    initial: Checkpoint | None = None,
) -> Learner:
    """Model and optimizer on the device: fresh from the seed, or exactly as `saved` left them.

    A fresh model gets the weights of `initial`; the random numbers after it are those of any fresh start.
    """
    set_numerics(config, device)
    resume.seed_rng(config.seed)
    model = GPT(config.model, vocab_size=vocab_size, seq_len=config.loader.seq_len).to(device)
    optimizer = make_optimizer(model, config.optimizer, device)
    needs_reference = reference.is_needed(config)
    if saved is None:
        if initial is not None:
            weights.load_initial(model, initial)
        return Learner(model, optimizer, None, reference.frozen(model) if needs_reference else None)
    frozen = reference.load(model, saved) if needs_reference else None
    saved.restore_into(model, optimizer)
    return Learner(model, optimizer, saved.rng_state(), frozen)


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
    origin: dict[str, Any] | None = None,
) -> Run:
    """Everything the loop needs, in one place. `origin`: what `origin_of` says."""
    model, manifest = learner.model, data.train.manifest
    compiled = should_compile(config.compile, device)
    language: Objective = LanguageModelling(torch.compile(model.loss) if compiled else model.loss)
    objective = language
    if learner.reference is not None:
        objective = make_preference(model, learner.reference, config.trainer.dpo_beta, compiled=compiled)
    return Run(
        config=config,
        path=path,
        model=model,
        objective=objective,
        optimizer=learner.optimizer,
        loader=loader,
        validation=data.validation,
        judge=objective if isinstance(data.validation, PairStore) else language,
        device=device,
        autocast=make_autocast(config.precision, device),
        progress=progress_of(saved),
        cursor=loader.state_dict(),
        identity=_identity(path, data, saved) | (origin or {}),
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
    return {"run_id": saved.trainer["run_id"], "path": str(saved.run_dir), "step": saved.step}
