"""The groups of a configuration and their variants: data, corpus, tokenizer, loader, model and the like.

A group with variants (`loader=sequential|...`) has one dataclass a variant, found by its `name` in `GROUPS`.
Those of the group `loader` are in config_loaders.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from harness.config_loaders import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)

# `Optional[...]` instead of `... | None` where omegaconf 2.3 reads the annotation.


@dataclass
class DataConfig:
    """A prepared set of token shards and where it lies."""

    name: str = "npy"
    root: str = "data"
    path: Optional[str] = None  # noqa: UP045
    verify: str = "full"
    expect_sha256: Optional[str] = None  # noqa: UP045
    mmap: bool = True


@dataclass
class Hdf5DataConfig(DataConfig):
    """HDF5 shards: chunks of `chunk_tokens` tokens, mapped unless they are compressed."""

    name: str = "hdf5"
    chunk_tokens: int = 65_536
    compression: str = "none"


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
    """JSON lines (`.jsonl`, also `.gz` and `.zst`): each line's `field` is one document.

    For contrastive rows a line is a pair instead: `pair_fields` name its prompt, chosen and rejected text.
    """

    name: str = "jsonl"
    path: Any = None
    pair_fields: list[str] = field(default_factory=lambda: ["prompt", "chosen", "rejected"])
    field: str = "text"


@dataclass
class ParquetCorpusConfig(CorpusConfig):
    """Parquet files: each row's string column `field` is one document."""

    name: str = "parquet"
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
class BpeTokenizerConfig(TokenizerConfig):
    """A byte-level BPE learnt from the training documents; it is kept with the set."""

    name: str = "bpe"
    vocab_size: int = 4096
    train_bytes: int = 16_777_216


@dataclass
class PrepareConfig:
    """How documents become shards."""

    shard_tokens: int = 100_000_000
    sharding: str = "tokens"
    val_fraction: float = 0.05
    max_document_tokens: Optional[int] = None  # noqa: UP045
    workers: Optional[int] = None  # noqa: UP045
    overwrite: bool = False
    append: bool = False
    max_bad_fraction: float = 0.01


@dataclass
class ModelConfig:
    """GPT-2's shape; the context length is `loader.seq_len`, the vocabulary is the tokenizer's.

    `gelu`: GPT-2's own approximation by `tanh`, or the exact function (`erf`), which a CPU computes faster.
    The last two say how its steps are computed: `activation_checkpointing` takes blocks forward again in the
    backward pass instead of keeping what they computed, `loss_chunk_tokens` bounds the logits that are held.
    """

    name: str = "custom"  # of a model file that does not say its own
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0
    gelu: str = "tanh"
    activation_checkpointing: bool = False
    loss_chunk_tokens: Optional[int] = None  # noqa: UP045


@dataclass
class OptimizerConfig:
    """AdamW; weight decay acts on matrices only."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])


@dataclass
class MuonConfig(OptimizerConfig):
    """Muon for the matrices inside the model, with `momentum`; AdamW, which `betas` are of, for the rest."""

    name: str = "muon"
    lr: float = 6e-3
    momentum: float = 0.95


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


GROUPS: dict[str, dict[str, type]] = {
    "data": {"npy": DataConfig, "hdf5": Hdf5DataConfig},
    "corpus": {
        "stdlib": CorpusConfig,
        "text": TextCorpusConfig,
        "jsonl": JsonlCorpusConfig,
        "parquet": ParquetCorpusConfig,
    },
    "tokenizer": {
        "byte": TokenizerConfig,
        "gpt2": Gpt2TokenizerConfig,
        "hf": HfTokenizerConfig,
        "bpe": BpeTokenizerConfig,
    },
    "loader": {
        "sequential": LoaderConfig,
        "sliding_window": SlidingWindowConfig,
        "padded_rows": PaddedRowsConfig,
        "block_shuffle": BlockShuffleConfig,
        "contrastive_rows": ContrastiveRowsConfig,
    },
    "optimizer": {"adamw": OptimizerConfig, "muon": MuonConfig},
    "schedule": {"cosine": ScheduleConfig, "constant": ScheduleConfig, "wsd": WsdScheduleConfig},
    "tracker": {"none": TrackerConfig, "wandb": WandbTrackerConfig},
}
