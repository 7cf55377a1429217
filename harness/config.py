"""Every setting of a run as typed dataclasses (their ranges are in config_checks.py).

Plain dataclasses that any part of the harness may import; YAML under `conf/` holds the values.
Keys are DESIGN's names on the command line: `loader.seq_len` is `config.loader.seq_len`.
A group with variants (`loader=sequential|...`) has one dataclass a variant, found by `name` in `GROUPS`.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from harness.errors import UserError, did_you_mean

# `Optional[...]` instead of `... | None` where omegaconf 2.3 reads the annotation.


@dataclass
class DataConfig:
    """A prepared set of token shards and where it lies."""

    name: str = "npy"
    root: str = "data"
    path: Optional[str] = None  # noqa: UP045
    expect_sha256: Optional[str] = None  # noqa: UP045
    mmap: bool = True


@dataclass
class CorpusConfig:
    """Where documents come from. `stdlib` needs nothing: the sources of the running Python."""

    name: str = "stdlib"


@dataclass
class TextCorpusConfig(CorpusConfig):
    """Text files: each is one document, or as many as `separator` cuts it into."""

    name: str = "text"
    path: Any = None
    separator: Optional[str] = None  # noqa: UP045
    suffixes: list[str] = field(default_factory=list)


@dataclass
class JsonlCorpusConfig(CorpusConfig):
    """JSON lines (`.jsonl`, also `.gz` and `.zst`): each line's `field` is one document."""

    name: str = "jsonl"
    path: Any = None
    field: str = "text"


@dataclass
class TokenizerConfig:
    """Text to token ids. `byte` needs nothing: boundary 0, byte b is b + 1, vocabulary 257."""

    name: str = "byte"


@dataclass
class Gpt2TokenizerConfig(TokenizerConfig):
    """GPT-2's BPE; `path` is a folder with `vocab.bpe` and `encoder.json`, null downloads them."""

    name: str = "gpt2"
    path: Optional[str] = None  # noqa: UP045


@dataclass
class HfTokenizerConfig(TokenizerConfig):
    """Any Hugging Face `tokenizer.json`; the boundary is one of its special tokens."""

    name: str = "hf"
    path: Optional[str] = None  # noqa: UP045
    boundary_token: Optional[str] = None  # noqa: UP045


@dataclass
class PrepareConfig:
    """How documents become shards."""

    shard_tokens: int = 100_000_000
    val_fraction: float = 0.05
    max_document_tokens: Optional[int] = None  # noqa: UP045
    workers: Optional[int] = None  # noqa: UP045
    overwrite: bool = False
    max_bad_fraction: float = 0.01


@dataclass
class LoaderConfig:
    """The order in which tokens are read. `batch_size` is the global batch of one optimizer step."""

    name: str = "sequential"
    seq_len: int = 128
    batch_size: int = 16
    seed: int = 0
    prefetch: int = 2


@dataclass
class ModelConfig:
    """GPT-2's shape; the context length is `loader.seq_len`, the vocabulary is the tokenizer's."""

    name: str = "custom"  # of a model file that does not say its own
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0


@dataclass
class OptimizerConfig:
    """AdamW; weight decay acts on matrices only."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])


@dataclass
class ScheduleConfig:
    """The factor on `optimizer.lr` at each step.

    `total_steps` null means the run's budget, `warmup_steps` null a twentieth of the total.
    """

    name: str = "cosine"
    warmup_steps: Optional[int] = None  # noqa: UP045
    total_steps: Optional[int] = None  # noqa: UP045
    min_lr_ratio: float = 0.1


@dataclass
class WsdScheduleConfig(ScheduleConfig):
    """Warm-up, stable, decay: the last `decay_fraction` of the steps falls linearly."""

    name: str = "wsd"
    decay_fraction: float = 0.2


@dataclass
class TrackerConfig:
    """`none`: the run's own metrics.jsonl and nothing else."""

    name: str = "none"


@dataclass
class WandbTrackerConfig(TrackerConfig):
    """W&B; `mode` auto is online where a key is found, else offline. Times in seconds."""

    name: str = "wandb"
    mode: str = "auto"
    project: str = "gpt-run-harness"
    entity: Optional[str] = None  # noqa: UP045
    tags: list[str] = field(default_factory=list)
    init_timeout: float = 30.0
    finish_timeout: float = 60.0


@dataclass
class TrainerConfig:
    """The loop. One of `max_steps` and `max_tokens` is the budget; the other is null."""

    max_steps: Optional[int] = 1000  # noqa: UP045
    max_tokens: Optional[int] = None  # noqa: UP045
    micro_batch_size: Optional[int] = None  # noqa: UP045
    grad_clip: float = 1.0
    log_interval: int = 10
    log_batch_hash: bool = False


@dataclass
class EvaluationConfig:
    """Loss on a fixed part of a validation set, every `interval` steps and at the last one."""

    interval: int = 250
    tokens: int = 65_536
    set: Optional[str] = None  # noqa: UP045
    sample_tokens: int = 64


@dataclass
class CheckpointConfig:
    """Checkpoints every `interval` steps and at the end."""

    interval: int = 250


@dataclass
class RunConfig:
    """`name` null: a folder named by date and time; else `runs/NAME`."""

    name: Optional[str] = None  # noqa: UP045


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
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile: Any = "auto"
    deterministic: bool = False
    resume: Optional[str] = None  # noqa: UP045


@dataclass
class PrepareScriptConfig:
    """Everything `scripts/prepare_data.py` can be told."""

    data: DataConfig = field(default_factory=DataConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)


GROUPS: dict[str, dict[str, type]] = {
    "data": {"npy": DataConfig},
    "corpus": {"stdlib": CorpusConfig, "text": TextCorpusConfig, "jsonl": JsonlCorpusConfig},
    "tokenizer": {"byte": TokenizerConfig, "gpt2": Gpt2TokenizerConfig, "hf": HfTokenizerConfig},
    "loader": {"sequential": LoaderConfig},
    "optimizer": {"adamw": OptimizerConfig},
    "schedule": {"cosine": ScheduleConfig, "constant": ScheduleConfig, "wsd": WsdScheduleConfig},
    "tracker": {"none": TrackerConfig, "wandb": WandbTrackerConfig},
}

# Every key that names a file or folder: expanded, made absolute, and kept absolute at a resume.
PATH_KEYS = ("data.root", "data.path", "corpus.path", "tokenizer.path", "evaluation.set")


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
    return Path(config.data.root) / f"{config.data.name}-stream"


def total_steps(config: TrainConfig) -> int:
    """The budget in optimizer steps; a budget in tokens is rounded up to whole steps."""
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    assert config.trainer.max_tokens is not None
    return -(-config.trainer.max_tokens // (config.loader.batch_size * config.loader.seq_len))


def make_paths_absolute(config: TrainConfig | PrepareScriptConfig) -> None:
    """Expand `~` and make every path absolute, so a run means the same from any folder."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [absolute(item) for item in value]
        return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) else value

    for key in PATH_KEYS:
        group, name = key.split(".")
        if get(config, key) is not None:
            setattr(getattr(config, group), name, absolute(get(config, key)))


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain containers: what config.yaml and W&B hold."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], source: str) -> TrainConfig:
    """Rebuild a `TrainConfig` from a run's config.yaml; unknown keys and options are refused by name."""
    result = _build(TrainConfig, values, "", source)
    assert isinstance(result, TrainConfig)
    return result


def _build(kind: type, values: Any, prefix: str, source: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{source}: {prefix.rstrip('.') or 'the file'} must hold keys, not {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise UserError(f"{source}: unknown key {prefix}{key}{did_you_mean(str(key), hints)}")
    arguments = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(
                _variant(key, hints[key], value, source), value, f"{prefix}{key}.", source
            )
        else:
            _check_type(hints[key], value, f"{prefix}{key}", source)
            arguments[key] = value
    return kind(**arguments)


def _variant(group: str, default: Any, values: Any, source: str) -> type:
    name = values.get("name") if isinstance(values, dict) else None
    variants = GROUPS.get(group)
    if variants is None:
        return typing.cast(type, default)
    if name not in variants:
        raise UserError(f"{source}: {group}={name} is not one of {', '.join(variants)}")
    return variants[name]


def _check_type(hint: Any, value: Any, key: str, source: str) -> None:
    if hint is Any:
        return
    allowed = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    plain = tuple(typing.get_origin(kind) or kind for kind in allowed)
    number_as_float = float in plain and isinstance(value, int) and not isinstance(value, bool)
    if not number_as_float and (
        not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain)
    ):
        raise UserError(
            f"{source}: {key}={value!r} has the wrong type, expected {' or '.join(k.__name__ for k in plain)}"
        )
