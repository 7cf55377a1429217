"""What a run says of itself when it begins and when it ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from harness.commandline.commands import command, shown
from harness.config import TrainConfig, layout
from harness.model import parameter_count
from harness.run_files.run_dir import JOB_FILE

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint
    from harness.loaders import Loader
    from harness.start import Plan
    from harness.training.run import Run

log = logging.getLogger("harness")


def describe(run: Run, plan: Plan, places: list[dict[str, Any]]) -> None:
    """What begins, from what, on what; `places` of its ranks."""
    config, train_split = run.config, plan.data.train
    log.info("run       %s", shown(run.path))
    log.info(
        "data      %s, %s train tokens, metadata_sha256 %s",
        shown(train_split.manifest.directory), f"{train_split.total_tokens:,}", train_split.metadata_sha256,
    )  # fmt: skip
    log.info("loader    %s, %s", config.loader.name, _epoch_in_words(config, run.loader))
    log.info(
        "model     %s, %s parameters, on %s", config.model.name, f"{parameter_count(run.model):,}", run.device
    )
    if plan.initial is not None:
        log.info("weights   of %s%s", shown(plan.initial.path), _cut_positions(run, plan.initial))
    if plan.saved is not None and not plan.goes_on:
        log.info("branch    of %s at step %d", shown(plan.saved.run_dir), plan.saved.step)
    log.info(
        "trains    to step %d, a line every %d steps",
        run.budget, 1 if config.trainer.log_batch_hash else config.trainer.log_interval,
    )  # fmt: skip
    if run.ranks.several:
        log.info("ranks     %s", _ranks_in_words(run, places))
    if run.limit.minutes is not None:
        log.info(
            "time      trainer.max_minutes=%g of this process: it stops before, in time to save",
            run.limit.minutes,
        )
    if run.progress.step:
        log.info("resumed   at step %d, epoch %d", run.progress.step, run.progress.epoch)


def _ranks_in_words(run: Run, places: list[dict[str, Any]]) -> str:
    hosts = list(dict.fromkeys(place["host"] for place in places))
    rows = run.loader.batch_size // run.ranks.size
    return f"{run.ranks.size} on {', '.join(hosts)}, {rows} of a step's sequences each"


def _epoch_in_words(config: TrainConfig, loader: Loader) -> str:
    times = "pairs of" if layout(config.loader) == "contrastive" else "x"
    words = [
        f"{loader.batch_size} {times} {loader.seq_len} tokens a step",
        f"{loader.batches_per_epoch} steps an epoch",
        f"{loader.dropped_tokens} tokens dropped at its end",
    ]
    if loader.skipped_tokens:
        words.append(f"{loader.skipped_tokens} tokens that no epoch reads")
    return ", ".join(words)


def _cut_positions(run: Run, initial: Checkpoint) -> str:
    known, kept = initial.config["loader"]["seq_len"], run.model.seq_len
    return f", the first {kept} of its {known} positions" if known > kept else ""


def say_goodbye(run: Run, stopped_by: str | None) -> None:
    """How it ended, and the command that goes on."""
    step, again = run.progress.step, command("train", f"resume={shown(run.path)}")
    if stopped_by is not None:
        log.info("stopped by %s after step %d, which is saved. Go on: %s", stopped_by, step, again)
        return
    # Trained on where it lies, a sweep's job would be no result of the sweep any more.
    elsewhere = " run.name=NEW_NAME" if (run.path / JOB_FILE).is_file() else ""
    log.info("done at step %d. Train on: %s%s trainer.max_steps=%d", step, again, elsewhere, 2 * step)
