"""Every setting of a run as typed dataclasses (their ranges are in config_checks.py).

Plain dataclasses that any part of the harness may import; YAML under `conf/` holds the values.
Keys are DESIGN's names on the command line: `loader.seq_len` is `config.loader.seq_len`.
The groups and their variants are in config_groups.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from harness.config_groups import (
    CorpusConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrepareConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrackerConfig,
)
from harness.config_loaders import LoaderConfig, layout, row_width

# `Optional[...]` instead of `... | None` where omegaconf 2.3 reads the annotation.


@dataclass
class TrainerConfig:
    """The loop. One of `max_steps` and `max_tokens` is the budget; the other is null."""

    max_steps: Optional[int] = 1000  # noqa: UP045
    max_tokens: Optional[int] = None  # noqa: UP045
    micro_batch_size: Optional[int] = None  # noqa: UP045
    grad_clip: float = 1.0
    log_interval: int = 10
    log_batch_hash: bool = False
    data_chain: bool = True
    on_nonfinite: str = "stop"
    spike_zscore: Optional[float] = 8.0  # noqa: UP045
    max_minutes: Optional[float] = None  # noqa: UP045
    dpo_beta: float = 0.1


@dataclass
class EvaluationConfig:
    """Loss on a fixed part of a validation set, every `interval` steps and at the last one."""

    interval: int = 250
    tokens: int = 65_536
    set: Optional[str] = None  # noqa: UP045
    sample_tokens: int = 64


@dataclass
class CheckpointConfig:
    """Checkpoints every `interval` steps, every `minutes`, and at the end; which of them stay.

    The last `keep_last` stay (null: all), those of steps that are multiples of `keep_every`, and the best.
    """

    interval: int = 250
    minutes: Optional[float] = None  # noqa: UP045
    keep_last: Optional[int] = 3  # noqa: UP045
    keep_every: Optional[int] = None  # noqa: UP045
    keep_best: bool = True
    background: bool = True
    max_failures: int = 3


@dataclass
class RunConfig:
    """`name` null: a folder named by date and time; else `runs/NAME`."""

    name: Optional[str] = None  # noqa: UP045


@dataclass
class SweepConfig:
    """`name`: the folder `multirun/NAME` of a sweep's jobs, and their group at a tracker; null: no sweep.

    `keys`: what is swept, as the command line or the experiment says; `-m` sets it.
    """

    name: Optional[str] = None  # noqa: UP045
    keys: list[str] = field(default_factory=list)


@dataclass
class TrainConfig:
    """Everything `train.py` can be told."""

    data: DataConfig = field(default_factory=DataConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile: Any = "auto"
    deterministic: bool = False
    parallel: str = "auto"
    profile: bool = False
    resume: Optional[str] = None  # noqa: UP045
    resume_accept: list[str] = field(default_factory=list)
    init_from: Optional[str] = None  # noqa: UP045
    check: bool = False


@dataclass
class PrepareScriptConfig:
    """Everything `scripts/prepare_data.py` can be told; of the loader only what shapes the set counts."""

    data: DataConfig = field(default_factory=DataConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    seed: int = 0


# Every key that names a file or folder: expanded, made absolute, and kept absolute at a resume.
PATH_KEYS = ("data.root", "data.path", "corpus.path", "tokenizer.path", "evaluation.set", "init_from")


def get(config: Any, key: str) -> Any:
    """The value at a dotted key, or None where this variant of a group has no such key."""
    for part in key.split("."):
        if not hasattr(config, part):
            return None
        config = getattr(config, part)
    return config


def set_directory(config: TrainConfig | PrepareScriptConfig) -> Path:
    """The folder of the prepared set: `data.path`, or `data.root` and the set's own name."""
    if config.data.path is not None:
        return Path(config.data.path)
    compression = get(config, "data.compression")
    storage = config.data.name if compression in (None, "none") else f"{config.data.name}-{compression}"
    return Path(config.data.root) / f"{storage}-{layout(config.loader)}{row_width(config.loader) or ''}"


def in_file_order(loader: LoaderConfig) -> bool:
    """Whether a stream's tokens come in the order of the file, in every epoch, whatever the seed."""
    return loader.name == "sequential" or getattr(loader, "sampling", None) == "ordered"


def tokens_per_step(config: TrainConfig) -> int:
    """What a step adds to the tokens of a run: padding counts too, and a pair is one sequence."""
    return config.loader.batch_size * config.loader.seq_len


def total_steps(config: TrainConfig, step: int = 0, tokens: int = 0) -> int:
    """The budget in optimizer steps; a budget in tokens is rounded up to whole steps.

    `tokens` were trained in the first `step` steps: a branch's parent may have had other batches.
    """
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    assert config.trainer.max_tokens is not None
    return step - (tokens - config.trainer.max_tokens) // tokens_per_step(config)


def make_paths_absolute(config: TrainConfig | PrepareScriptConfig) -> None:
    """Expand `~` and make every path absolute, so a run means the same from any folder."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [absolute(item) for item in value]
        return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) else value

    for key in PATH_KEYS:
        group, _, name = key.rpartition(".")
        if get(config, key) is not None:
            setattr(get(config, group) if group else config, name, absolute(get(config, key)))
