"""The parts of a run put together: model, optimizer, restored state, logs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.auditing.data_chain import DataChain
from harness.checkpoints import reference, rng, weights
from harness.checkpoints.checkpoint import Checkpoint
from harness.checkpoints.restore import restore
from harness.checkpoints.saving import Saver
from harness.checkpoints.sharded_saving import ShardedSaver
from harness.config import TrainConfig
from harness.data_setup import Data
from harness.distributed import followers, rendezvous
from harness.distributed.agreement import Agreement
from harness.distributed.parallel import distribute, is_sharded, settle_buckets, shard
from harness.distributed.ranks import ALONE, Ranks, current
from harness.hardware.device import make_autocast, peak_flops, set_numerics, should_compile
from harness.hardware.device_feed import DeviceFeed
from harness.hardware.peak_memory import PeakMemory
from harness.loaders import Loader
from harness.model import GPT, compiled_loss, flops_per_token
from harness.optim import make_optimizer, state_numbers
from harness.resuming.identity import chain_start, progress_of
from harness.run_files.run_dir import Status
from harness.storage import PairStore
from harness.tracking import Tracker
from harness.tracking.jsonl import MetricsFile
from harness.training.guard import Guard
from harness.training.objectives import Distributed, LanguageModelling, Loss, Objective, make_preference
from harness.training.run import Run
from harness.training.sample import make_sampler
from harness.training.step_log import StepLog
from harness.training.time_limit import TimeLimit

if TYPE_CHECKING:
    from harness.training.profiling import StepProfiler

log = logging.getLogger("harness")


@dataclass(frozen=True)
class Learner:
    """What a checkpoint's tensors hold. `rng` is None at a fresh start: the seed is set already.

    `reference`: the frozen starting weights of a run that is trained on preferences. Of a sharded model they
    are whole, and in the host's memory, until `assemble`.
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
    Sharded, this is a collective: each rank makes the whole model in its host's memory and keeps its part.
    """
    set_numerics(config, device)
    rng.seed(config.seed)
    model = GPT(config.model, vocab_size=vocab_size, seq_len=config.loader.seq_len)
    sharded = is_sharded(config, current())
    if not sharded:
        model.to(device)
    if saved is None and initial is not None:
        weights.load_initial(model, initial)
    frozen = None
    if reference.is_needed(config):
        frozen = reference.frozen(model) if saved is None else reference.load(model, saved)
    if sharded:
        shard(model, config, device)
    optimizer = make_optimizer(model, config.optimizer, device)
    if saved is None:
        rng.part(config.seed, current())
        return Learner(model, optimizer, None, frozen)
    restore(saved, model, optimizer)
    return Learner(model, optimizer, saved.rng_state(), frozen)


def objectives_of(
    config: TrainConfig, learner: Learner, device: torch.device, ranks: Ranks = ALONE
) -> tuple[Objective, LanguageModelling]:
    """What is trained on, and the loss on a stream or on rows of this process's model alone."""
    model, compiled = learner.model, should_compile(config.compile, device)
    if is_sharded(config, ranks):
        compiled = False  # its blocks are
        if learner.reference is not None:
            shard(learner.reference, config, device)

    def shared(loss: Loss) -> Distributed:
        return distribute(model, loss, ranks)

    loss: Loss = compiled_loss(model) if compiled else model.loss
    language = LanguageModelling(loss)
    if learner.reference is not None:
        beta = config.trainer.dpo_beta
        preference = make_preference(model, learner.reference, beta, compiled=compiled, distribute=shared)
        return preference, language
    trained = shared(loss)
    return LanguageModelling(trained.loss, trained.accumulating), language


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
    identity: dict[str, Any],
    unevaluated: bool = False,
    memory: PeakMemory | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Everything the loop needs, in one place.

    `identity`: what trainer.json says beside the progress; `memory` None counts from here on. With several
    `ranks` this is a collective, and what does not lead writes nothing, whatever `status` and `tracker` are.
    """
    model, manifest = learner.model, data.train.manifest
    objective, language = objectives_of(config, learner, device, ranks)
    autocast = make_autocast(config.precision, device)
    settle_buckets(objective, config, device, autocast, ranks)
    learner.optimizer.zero_grad(set_to_none=True)
    progress, leads = progress_of(saved), ranks.leads
    saver, sampler = _saver(config, path, status, ranks), make_sampler(model, manifest, seed=config.seed)
    peak = _peak_flops(device)
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
        autocast=autocast,
        progress=progress,
        cursor=loader.state_dict(),
        identity=identity,
        log=StepLog(
            MetricsFile(path / "metrics.jsonl") if leads else followers.NoMetrics(),
            tracker,
            status,
            round(objective.flops * flops_per_token(model)),
            None if peak is None else peak * ranks.size,
        ),
        guard=Guard(
            path, config, learner.optimizer, device,
            step=progress.step, finish_saving=saver.wait, ranks=ranks,
        ),
        saver=saver,
        feed=DeviceFeed(device),
        limit=TimeLimit(
            config.trainer.max_minutes if leads else None,
            _checkpoint_bytes(config, model),
            late=int(ranks.several),
        ),
        chain=_chain(config, data, saved) if leads else DataChain(None),
        memory=memory or PeakMemory(device),
        unevaluated=unevaluated,
        profiler=_profiler(config, path, device, ranks),
        ranks=ranks,
        agreement=Agreement(ranks),
        status=status,
        sample=None if ranks.any(sampler is None) else sampler,
    )  # fmt: skip


def _peak_flops(device: torch.device) -> float | None:
    """The device's peak; that of a GPU which is not known is said to be missing."""
    peak = peak_flops(device)
    if peak is None and device.type == "cuda":
        log.info(
            "mfu       is left out: the peak of a %s is not known (harness/hardware/peak_flops.py)",
            torch.cuda.get_device_name(device),
        )
    return peak


def _profiler(config: TrainConfig, path: Path, device: torch.device, ranks: Ranks) -> StepProfiler | None:
    """Rank 0's alone: the others do the same work."""
    if not (config.profile and ranks.leads):
        return None
    from harness.training.profiling import StepProfiler

    return StepProfiler(path, device)


def _saver(config: TrainConfig, path: Path, status: Status, ranks: Ranks) -> Saver:
    holding = rendezvous.current().holding
    if is_sharded(config, ranks):
        return ShardedSaver(path, config.checkpoint, ranks, status.note, holding)
    if ranks.leads:
        return Saver(path, config.checkpoint, status.note, holding)
    return followers.NoSaver(config.checkpoint)


def _checkpoint_bytes(config: TrainConfig, model: GPT) -> int:
    """About what a checkpoint takes: the weights and the optimizer's state."""
    return 4 * (sum(p.numel() for p in model.parameters()) + state_numbers(model, config.optimizer))


def _chain(config: TrainConfig, data: Data, saved: Checkpoint | None) -> DataChain:
    """What hashes the batches; a chain that the checkpoint lacks is said to be missing."""
    start = chain_start(config, data, saved)
    if start is None and config.trainer.data_chain and saved is not None:
        log.info(
            "no data chain: step %d was saved without one (trainer.data_chain=false, or an older version), "
            "and steps that it does not cover cannot be made up for",
            saved.step,
        )
    return DataChain(start, hash_batches=config.trainer.log_batch_hash)
