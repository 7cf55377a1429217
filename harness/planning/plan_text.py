"""What a run would be, in lines: data, loader, budget, model and memory. For `check=true` (check.py)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.commandline.commands import shown
from harness.config import TrainConfig, get, in_file_order, layout, tokens_per_step, total_steps
from harness.loaders import build_loader
from harness.loaders.sampled import SampledLoader
from harness.optim import lr_at
from harness.storage import PairStore
from harness.training.step_log import clock

if TYPE_CHECKING:
    from harness.data_setup import Data
    from harness.loaders import Loader, SeekableLoader
    from harness.model import GPT
    from harness.planning.memory_estimate import Memory
    from harness.storage import Store
    from harness.training.run import Progress

_SAMPLES = {"sliding_window": "windows", "contrastive_rows": "pairs"}  # what a loader's samples are called


def data_lines(data: Data) -> list[str]:
    """Where the data lies and how much it is."""
    manifest, train = data.train.manifest, data.train
    lines = [
        str(shown(manifest.directory)),
        f"metadata_sha256 {manifest.metadata_sha256}",
        f"train {_amount(train)}; val {_amount(data.validation)}",
    ]
    if data.validation.manifest.path != manifest.path:
        lines[-1] += f" of {shown(data.validation.manifest.directory)}"
    if not isinstance(train, PairStore):
        split = manifest.splits[train.split]
        if split.documents is None:
            return [*lines, "share of boundary tokens unknown: the manifest does not count documents"]
        share = f"{split.documents / train.total_tokens:.2%} of the train tokens are boundaries"
        lines.append(f"{share} (one a document, as the manifest counts them){_bytes(train)}")
    return lines


def _bytes(train: Store) -> str:
    split = train.manifest.splits[train.split]
    text = split.total_tokens - (split.documents or 0)
    return f", {split.bytes / text:.2f} bytes a token of text" if split.bytes and text > 0 else ""


def _amount(store: Store) -> str:
    splits = store.manifest.splits
    split = splits[f"{store.split}.pos" if isinstance(store, PairStore) else store.split]
    amount = f"{store.total_tokens:,} tokens"
    if split.row_width is not None:
        amount += f" in {split.total_rows:,} {'pairs' if isinstance(store, PairStore) else 'rows'}"
    return amount if split.documents is None else f"{amount} of {many(split.documents, 'document')}"


def loader_lines(config: TrainConfig, train: Store) -> list[str]:
    """In which portions an epoch reads the data, and what it leaves out or reads again."""
    loader = build_loader(config.loader, train)
    batch, words = config.loader.batch_size, _SAMPLES.get(config.loader.name, "rows")
    samples = (
        loader.samples if isinstance(loader, SampledLoader) else (train.total_tokens - 1) // loader.seq_len
    )
    keys = ["sampling", "stride", "window_tokens", *([] if in_file_order(config.loader) else ["seed"])]
    values = {key: get(config, f"loader.{key}") for key in keys}
    order = [f"{key}={value}" for key, value in values.items() if value is not None]
    lines = [
        ", ".join([config.loader.name, *order]),
        f"{batch:,} {'pairs of ' if words == 'pairs' else 'x '}{loader.seq_len:,} tokens a step",
        f"an epoch: {samples:,} {words}, {loader.batches_per_epoch:,} batches; "
        f"{samples % batch:,} {words}, {loader.dropped_tokens:,} tokens dropped at its end",
    ]
    if loader.skipped_tokens:
        lines.append(f"{loader.skipped_tokens:,} target tokens that no epoch reads{_why_skipped(config)}")
    if (stride := get(config, "loader.stride")) is not None and stride < loader.seq_len:
        lines.append(
            f"overlap: an epoch shows a token {loader.seq_len / stride:.3g} times (seq_len / stride)"
        )
    if layout(config.loader) != "stream":
        lines.append(_padding(loader, train, samples))
    return lines


def _why_skipped(config: TrainConfig) -> str:
    if layout(config.loader) == "stream":
        return f": loader.stride={get(config, 'loader.stride')} is larger than loader.seq_len"
    return f": they are beyond the first {config.loader.seq_len + 1:,} columns of their rows"


def _padding(loader: SeekableLoader, train: Store, samples: int) -> str:
    places = samples * loader.seq_len * (2 if isinstance(train, PairStore) else 1)
    share = 1 - (train.total_tokens - loader.skipped_tokens) / places
    what = "padding, or the prompts of pairs" if isinstance(train, PairStore) else "padding"
    return f"{share:.2%} of the places in a batch hold no target ({what})"


def budget_lines(
    config: TrainConfig, loader: Loader | None, progress: Progress, checkpoint: int
) -> list[str]:
    """How far the run goes and what it leaves; `checkpoint`: the bytes of one."""
    budget = total_steps(config, progress.step, progress.tokens)
    left = budget - progress.step
    tokens = progress.tokens + left * tokens_per_step(config)
    line = f"{budget:,} steps, {tokens:,} tokens"
    if loader is not None:
        line += f" = {budget / loader.batches_per_epoch:.3g} epochs"
    if progress.step:
        line += f"; {left:,} steps are left"
    lines = [
        line,
        *_evaluations(config, budget, progress.step),
        *_saves(config, budget, progress.step, checkpoint),
    ]
    lines.append(_schedule(config, budget))
    if config.trainer.max_minutes is not None:
        lines.append(f"stops before trainer.max_minutes={config.trainer.max_minutes:g}")
    return lines


def _evaluations(config: TrainConfig, budget: int, step: int) -> list[str]:
    count = due(config.evaluation.interval, budget, step)
    return [f"{many(count, 'evaluation')} of at most {config.evaluation.tokens:,} tokens"]


def _saves(config: TrainConfig, budget: int, step: int, checkpoint: int) -> list[str]:
    settings = config.checkpoint
    line = f"{many(due(settings.interval, budget, step), 'checkpoint')} of {size(checkpoint)}"
    if settings.minutes is not None:
        line += f" and more every {settings.minutes:g} minutes"
    kept = checkpoints_kept(config, budget)
    return [f"{line}; at most {kept:,} stay: {size(kept * checkpoint)} on disk"]


def due(interval: int, budget: int, step: int = 0) -> int:
    """How often something comes after `step` that comes every `interval` steps and at the last one."""
    return budget // interval - step // interval + (budget % interval > 0)


def checkpoints_kept(config: TrainConfig, budget: int) -> int:
    """The most that stay at the end; incidents may keep more."""
    settings = config.checkpoint
    made = due(settings.interval, budget)
    if settings.keep_last is None or made <= settings.keep_last:
        return made
    last = settings.keep_last - (budget % settings.interval > 0)
    older = range(
        settings.interval, settings.interval * (budget // settings.interval - last) + 1, settings.interval
    )
    every = None if settings.keep_every is None else math.lcm(settings.keep_every, settings.interval)
    stay = 0 if every is None else len(range(every, older.stop, every))
    best = settings.keep_best and stay < len(older)
    return settings.keep_last + stay + best


def _schedule(config: TrainConfig, budget: int) -> str:
    schedule, lr = config.schedule, config.optimizer.lr
    steps = schedule.total_steps or budget
    warmup = steps // 20 if schedule.warmup_steps is None else schedule.warmup_steps
    last = lr_at(budget, lr, schedule, steps)
    over = "" if steps == budget else f" over {steps:,} steps"
    return f"lr: {schedule.name}{over}, {warmup:,} steps of warm-up to {lr:g}, {last:.3g} at the last step"


def model_line(config: TrainConfig, model: GPT) -> str:
    """How large the model is."""
    from harness.model import parameter_count

    everything = parameter_count(model)
    embeddings = (model.vocab_size + model.seq_len) * config.model.n_embd
    return (
        f"{config.model.name}, {everything:,} parameters, {everything - embeddings:,} without embeddings; "
        f"vocabulary {model.vocab_size:,}"
    )


def memory_lines(memory: Memory, room: int | None, place: str) -> list[str]:
    """The estimate, part by part."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "reference": memory.reference,
        "gathered": memory.gathered,
        "bf16 copies": memory.casts,
        "activations": memory.activations,
        "logits": memory.logits,
    }
    there = "" if room is None else f"; {place} has {size(room)} to give"
    return [
        f"estimate: {size(memory.total)}{there}",
        ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value),
    ]


def many(count: int, what: str) -> str:
    """`1 document`, `1,000 documents`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    units = ["bytes", "KiB", "MiB", "GiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:,.0f} {units[0]}" if count >= 100 else f"{count:.3g} {units[0]}"


def lasting(seconds: float) -> str:
    """A time for people."""
    if seconds >= 59.5:
        return clock(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def printed(title: str, lines: list[str]) -> None:
    """Print lines under one title."""
    for number, line in enumerate(lines):
        print(f"{title if number == 0 else '':<11}{line}", flush=True)
