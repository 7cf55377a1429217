"""What must hold of a configuration: ranges, choices and rules between keys, all reported at once."""

from __future__ import annotations

import math
import re
from typing import Any

from harness.commandline.escapes import unescape
from harness.config import PrepareScriptConfig, TrainConfig, get, layout, row_width, total_steps
from harness.config_groups import HfTokenizerConfig, JsonlCorpusConfig, ParquetCorpusConfig, TextCorpusConfig
from harness.errors import UserError
from harness.resuming.resume import accept_problems

# key -> (smallest, largest, what it is); null is allowed wherever the dataclass allows it.
_RANGES: dict[str, tuple[float, float, str]] = {
    "data.chunk_tokens": (1, 2**30, "tokens a chunk"),
    "tokenizer.vocab_size": (257, 2**20, "ids: 256 bytes and the boundary at least"),
    "tokenizer.train_bytes": (1, math.inf, "bytes of text"),
    "prepare.shard_tokens": (1, 2**40, "tokens a shard"),
    "prepare.val_fraction": (0.0, 0.999, "a share of the documents"),
    "prepare.max_document_tokens": (1, math.inf, "tokens a document"),
    "prepare.workers": (1, 1024, "processes"),
    "prepare.max_bad_fraction": (0.0, 1.0, "a share of the documents"),
    "loader.seq_len": (1, 2**24, "tokens a sequence"),
    "loader.batch_size": (1, 2**24, "sequences an optimizer step"),
    "loader.seed": (0, 2**63 - 1, "a seed"),
    "loader.prefetch": (0, 4096, "batches ahead"),
    "loader.stride": (1, 2**40, "tokens from one window to the next"),
    "loader.row_width": (2, 2**24 + 1, "columns of a row"),
    "loader.window_tokens": (2, 2**36, "tokens shuffled together"),
    "model.n_layer": (1, 10_000, "layers"),
    "model.n_head": (1, 10_000, "heads"),
    "model.n_embd": (1, 2**20, "channels"),
    "model.dropout": (0.0, 0.999, "a probability"),
    "model.loss_chunk_tokens": (1, 2**40, "tokens whose logits are held at a time"),
    "optimizer.lr": (0.0, 1e3, "a learning rate"),
    "optimizer.weight_decay": (0.0, 1e3, "a weight decay"),
    "optimizer.momentum": (0.0, 0.9999, "the share of the momentum that stays"),
    "schedule.warmup_steps": (0, math.inf, "steps"),
    "schedule.total_steps": (1, math.inf, "steps"),
    "schedule.min_lr_ratio": (0.0, 1.0, "a share of optimizer.lr"),
    "schedule.decay_fraction": (0.0, 1.0, "a share of the steps"),
    "tracker.init_timeout": (0.1, 3600, "seconds"),
    "tracker.finish_timeout": (0.1, 86_400, "seconds"),
    "trainer.max_steps": (1, math.inf, "steps"),
    "trainer.max_tokens": (1, math.inf, "tokens"),
    "trainer.micro_batch_size": (1, 2**24, "sequences a device takes at once"),
    "trainer.grad_clip": (0.0, math.inf, "a gradient norm, 0 for none"),
    "trainer.log_interval": (1, math.inf, "steps"),
    "trainer.spike_zscore": (1.0, 1e9, "robust standard deviations above the median loss"),
    "trainer.max_minutes": (0.01, math.inf, "minutes of one process"),
    "trainer.dpo_beta": (0.0, 1e3, "a weight of the DPO loss"),
    "evaluation.interval": (1, math.inf, "steps"),
    "evaluation.tokens": (1, math.inf, "target tokens"),
    "evaluation.sample_tokens": (0, 100_000, "tokens of sampled text, 0 for none"),
    "checkpoint.interval": (1, math.inf, "steps"),
    "checkpoint.minutes": (0.01, math.inf, "minutes between checkpoints"),
    "checkpoint.keep_last": (1, math.inf, "checkpoints"),
    "checkpoint.keep_every": (1, math.inf, "steps"),
    "checkpoint.max_failures": (1, math.inf, "failed saves in a row"),
    "seed": (0, 2**63 - 1, "a seed"),
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "data.verify": ("full", "headers"),
    "data.compression": ("none", "gzip", "lzf"),
    "prepare.sharding": ("tokens", "source"),
    "loader.sampling": ("permutation", "ordered", "uniform"),
    "loader.epoch_seed": ("mixed", "additive"),
    "loader.mask_boundary": ("none", "target", "after"),
    "model.gelu": ("tanh", "erf"),
    "tracker.mode": ("auto", "online", "offline"),
    "trainer.on_nonfinite": ("stop", "skip"),
    "precision": ("auto", "bf16", "float32"),
    "compile": ("auto", True, False),
    "parallel": ("auto", "ddp", "fsdp"),
}


def validate(config: TrainConfig | PrepareScriptConfig) -> None:
    """Check every range and cross-field rule; raise one `UserError` that lists all problems."""
    problems = _range_problems(config) + _corpus_problems(config) + _set_problems(config)
    if isinstance(config, TrainConfig):
        problems += _training_problems(config)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(f"{count} in the configuration:\n" + "\n".join(f"  - {p}" for p in problems))


def _range_problems(config: TrainConfig | PrepareScriptConfig) -> list[str]:
    problems = []
    for key, (low, high, meaning) in _RANGES.items():
        value = get(config, key)
        if value is None:
            continue
        if not (math.isfinite(value) and low <= value <= high):
            limits = f"at least {low:,}" if math.isinf(high) else f"between {low:,} and {high:,}"
            problems.append(f"{key}={value} must be {limits} ({meaning})")
    for key in ("data.root", "data.path", "evaluation.set", "tokenizer.path", "init_from"):
        if get(config, key) == "":
            problems.append(f"{key}='' is empty: name a folder or file, or leave it out")
    for key, choices in _CHOICES.items():
        value = get(config, key)
        if value is not None and not any(
            value is c or (value == c and type(value) is type(c)) for c in choices
        ):
            problems.append(f"{key}={value} must be one of {', '.join(str(c).lower() for c in choices)}")
    return problems


def _corpus_problems(config: TrainConfig | PrepareScriptConfig) -> list[str]:
    """A run may leave out the files that its set was made from; a preparation may not."""
    problems = []
    is_run = isinstance(config, TrainConfig)
    if isinstance(config.corpus, TextCorpusConfig | JsonlCorpusConfig | ParquetCorpusConfig):
        path = config.corpus.path
        paths = path if isinstance(path, list) else [path]
        if not (is_run and path is None) and not (
            paths and all(isinstance(item, str) and item for item in paths)
        ):
            problems.append(
                f"corpus.path={path} must be a file, a folder or a list of them: "
                f"corpus={config.corpus.name} corpus.path=FOLDER"
            )
    if isinstance(config.corpus, TextCorpusConfig) and config.corpus.separator is not None:
        problems += _separator_problems(config.corpus.separator)
    if isinstance(config.tokenizer, HfTokenizerConfig) and config.tokenizer.path is None and not is_run:
        problems.append("tokenizer.path is needed: tokenizer=hf tokenizer.path=FOLDER/tokenizer.json")
    return problems


def _set_problems(config: TrainConfig | PrepareScriptConfig) -> list[str]:
    problems = []
    loader, pair_fields = config.loader, get(config, "corpus.pair_fields")
    width = row_width(loader)
    if isinstance(config, TrainConfig) and width is not None and width < loader.seq_len + 1:
        problems.append(
            f"loader.row_width={width} is too narrow for loader.seq_len={loader.seq_len}: a row holds a "
            f"sequence and the last target. Use loader.row_width={loader.seq_len + 1}, or null"
        )
    if get(config, "loader.sampling") == "uniform" and get(config, "loader.stride") is not None:
        problems.append(
            f"loader.stride={get(config, 'loader.stride')} means nothing with loader.sampling=uniform, whose "
            "starts are random: drop one of the two"
        )
    window = get(config, "loader.window_tokens")
    if window is not None and window < loader.seq_len:
        problems.append(
            f"loader.window_tokens={window} is smaller than loader.seq_len={loader.seq_len}: rows are "
            "shuffled inside of a window, so one must fit. Use a larger loader.window_tokens"
        )
    if pair_fields is not None and (len(set(pair_fields)) != 3 or not all(pair_fields)):
        problems.append(
            f"corpus.pair_fields={pair_fields} must name three different keys: of the prompt, the chosen and "
            "the rejected text"
        )
    if layout(loader) == "contrastive" and pair_fields and config.prepare.max_document_tokens is not None:
        problems.append(
            f"prepare.max_document_tokens={config.prepare.max_document_tokens} means nothing to pairs from "
            f"corpus.pair_fields, which are cut to the rows' width: use null, and loader.row_width={width}"
        )
    if config.prepare.append and config.prepare.overwrite:
        problems.append(
            "prepare.append=true keeps what is there and prepare.overwrite=true replaces it: set one of them"
        )
    return problems


def _separator_problems(separator: str) -> list[str]:
    try:
        if unescape(separator).encode():
            return []
        problem = "it is empty, and nothing is found everywhere"
    except ValueError as error:
        problem = str(error)
    return [
        f"corpus.separator='{separator}' cannot separate documents: {problem}. Write what stands between "
        "them, as in \"corpus.separator='\\n\\n\\n'\", with \\\\ for a backslash; null: a file is a document"
    ]


def warmup_problems(config: TrainConfig, steps: int) -> list[str]:
    """What is wrong with the warm-up of a schedule of `steps` steps."""
    warmup = config.schedule.warmup_steps
    if warmup is None or warmup <= steps:
        return []
    return [
        f"schedule.warmup_steps={warmup} is more than the schedule's {steps} steps: "
        f"use schedule.warmup_steps<={steps} or a larger budget"
    ]


def _training_problems(config: TrainConfig) -> list[str]:
    problems = []
    model, loader, trainer, schedule = config.model, config.loader, config.trainer, config.schedule
    if model.n_head > 0 and model.n_embd % model.n_head:
        problems.append(
            f"model.n_embd={model.n_embd} must be a multiple of model.n_head={model.n_head}: "
            "each head takes an equal share of the channels"
        )
    if model.loss_chunk_tokens is not None and layout(loader) == "contrastive":
        problems.append(
            f"model.loss_chunk_tokens={model.loss_chunk_tokens} is about the loss of the next token, and "
            f"loader={loader.name} is trained with another: use null, and a smaller trainer.micro_batch_size"
        )
    micro = trainer.micro_batch_size
    if micro is not None and micro > 0 and loader.batch_size % micro:
        problems.append(
            f"loader.batch_size={loader.batch_size} must be a multiple of "
            f"trainer.micro_batch_size={micro}: a step is whole micro-batches. "
            "Use null, or one that divides it"
        )
    # How many steps a budget in tokens leaves to a run that goes on, its checkpoint says.
    left_open = config.resume is not None and trainer.max_tokens is not None and schedule.total_steps is None
    if (trainer.max_steps is None) == (trainer.max_tokens is None):
        problems.append(
            f"trainer.max_steps={trainer.max_steps} and trainer.max_tokens={trainer.max_tokens}: "
            "set one of them, it is the budget, and leave the other null"
        )
    elif not left_open and loader.batch_size > 0 and loader.seq_len > 0:
        problems += warmup_problems(config, schedule.total_steps or total_steps(config))
    problems += accept_problems(config)
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        problems.append(f"optimizer.betas={betas} must be two numbers in [0, 1), such as [0.9,0.95]")
    name = config.run.name
    if name is not None and (not name.strip("/. ") or name.startswith("/") or ".." in name.split("/")):
        problems.append(
            f"run.name={name!r} must name a folder below runs/; for another place use hydra.run.dir"
        )
    if bad := [tag for tag in get(config, "tracker.tags") or () if not 1 <= len(tag) <= 64]:
        problems.append(f"tracker.tags={bad}: W&B takes tags of 1 to 64 characters")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        problems.append(f"device={config.device} must be auto, cpu, cuda or cuda:N")
    return problems
