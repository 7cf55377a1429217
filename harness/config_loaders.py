"""The variants of the group `loader`, and how the sets are laid out that they read.

By themselves, because reading a set needs nothing else of a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

# `Optional[...]` instead of `... | None` where omegaconf 2.3 reads the annotation.


@dataclass
class LoaderConfig:
    """The order in which tokens are read. `batch_size` is the global batch of one optimizer step."""

    name: str = "sequential"
    seq_len: int = 128
    batch_size: int = 16
    seed: int = 0
    prefetch: int = 2
    mask_boundary: str = "none"


@dataclass
class SeededLoaderConfig(LoaderConfig):
    """An order that follows from `seed` and the epoch, joined as `epoch_seed` says."""

    epoch_seed: str = "mixed"


@dataclass
class SlidingWindowConfig(SeededLoaderConfig):
    """Windows of `seq_len + 1` tokens every `stride` tokens (null: `seq_len`)."""

    name: str = "sliding_window"
    stride: Optional[int] = None  # noqa: UP045
    sampling: str = "permutation"


@dataclass
class PaddedRowsConfig(SeededLoaderConfig):
    """Rows of `row_width` tokens with a mask (null: `seq_len + 1`)."""

    name: str = "padded_rows"
    row_width: Optional[int] = None  # noqa: UP045


@dataclass
class ContrastiveRowsConfig(PaddedRowsConfig):
    """Pairs of rows, preferred and not; `batch_size` counts pairs."""

    name: str = "contrastive_rows"


@dataclass
class BlockShuffleConfig(SeededLoaderConfig):
    """Rows shuffled inside windows of `window_tokens` tokens, one window in memory at a time."""

    name: str = "block_shuffle"
    window_tokens: int = 134_217_728


# loader.name -> how the set it reads is laid out on disk; every other loader reads a stream of tokens.
_LAYOUTS = {"padded_rows": "rows", "contrastive_rows": "contrastive"}


def layout(loader: LoaderConfig) -> str:
    """What a loader reads: a `stream` of tokens, `rows` with masks, or `contrastive` pairs of rows."""
    return _LAYOUTS.get(loader.name, "stream")


def row_width(loader: LoaderConfig) -> int | None:
    """The columns of the rows that a loader reads; None where it reads a stream."""
    if not isinstance(loader, PaddedRowsConfig):
        return None
    return loader.seq_len + 1 if loader.row_width is None else loader.row_width
