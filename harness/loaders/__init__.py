"""In which order it is read: loaders by name, and the prefetch around them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.config_loaders import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SeededLoaderConfig,
    SlidingWindowConfig,
    layout,
    row_width,
)
from harness.loaders.batch import Batch, Loader, Origin, SeekableLoader
from harness.loaders.memory import keep_freed_memory
from harness.loaders.prefetch import Prefetcher
from harness.storage.opening import wrong_layout

if TYPE_CHECKING:
    from harness.loaders.block_shuffle import BlockShuffleLoader
    from harness.loaders.contrastive_rows import ContrastivePaddedDataset
    from harness.loaders.padded_rows import PaddedDataset
    from harness.loaders.sequential import TokenDataLoader
    from harness.loaders.sliding_window import SlidingWindowLoader
    from harness.loaders.torch_dataset import SlidingWindowDataset, make_dataloader
    from harness.storage import PairStore, RowStore, Store, TokenStore

__all__ = [
    "Batch",
    "BlockShuffleLoader",
    "ContrastivePaddedDataset",
    "Loader",
    "Origin",
    "PaddedDataset",
    "Prefetcher",
    "SeekableLoader",
    "SlidingWindowDataset",
    "SlidingWindowLoader",
    "TokenDataLoader",
    "build_loader",
    "make_dataloader",
    "make_loader",
]

# Imported when they are asked for: the command line answers without PyTorch, and one loader needs no other.
_PLACES = {
    "BlockShuffleLoader": "block_shuffle",
    "ContrastivePaddedDataset": "contrastive_rows",
    "PaddedDataset": "padded_rows",
    "SlidingWindowDataset": "torch_dataset",
    "SlidingWindowLoader": "sliding_window",
    "TokenDataLoader": "sequential",
    "make_dataloader": "torch_dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def _sequential(config: LoaderConfig, store: TokenStore, **ranks: int) -> SeekableLoader:
    from harness.loaders.sequential import TokenDataLoader

    return TokenDataLoader(
        store, config.batch_size, config.seq_len, mask_boundary=config.mask_boundary, **ranks
    )


def _sliding_window(config: SlidingWindowConfig, store: TokenStore, **ranks: int) -> SeekableLoader:
    from harness.loaders.sliding_window import SlidingWindowLoader

    return SlidingWindowLoader(
        store, config.batch_size, config.seq_len, stride=config.stride, sampling=config.sampling,
        **_seeded(config), **ranks,
    )  # fmt: skip


def _block_shuffle(config: BlockShuffleConfig, store: TokenStore, **options: Any) -> SeekableLoader:
    from harness.loaders.block_shuffle import BlockShuffleLoader

    return BlockShuffleLoader(
        store, config.batch_size, config.seq_len, window_tokens=config.window_tokens,
        **_seeded(config), **options,
    )  # fmt: skip


def _padded_rows(config: PaddedRowsConfig, store: RowStore, **ranks: int) -> SeekableLoader:
    from harness.loaders.padded_rows import PaddedDataset

    return PaddedDataset(store, config.batch_size, config.seq_len, **_seeded(config), **ranks)


def _contrastive_rows(config: ContrastiveRowsConfig, store: PairStore, **ranks: int) -> SeekableLoader:
    from harness.loaders.contrastive_rows import ContrastivePaddedDataset

    return ContrastivePaddedDataset(store, config.batch_size, config.seq_len, **_seeded(config), **ranks)


def _seeded(config: SeededLoaderConfig) -> dict[str, Any]:
    """What every `SampledLoader` takes of its configuration, sizes apart."""
    return {
        "seed": config.seed,
        "epoch_seed": config.epoch_seed,
        "mask_boundary": config.mask_boundary,
    }


LOADERS: dict[str, Callable[..., SeekableLoader]] = {
    "sequential": _sequential,
    "sliding_window": _sliding_window,
    "padded_rows": _padded_rows,
    "block_shuffle": _block_shuffle,
    "contrastive_rows": _contrastive_rows,
}


def make_loader(
    config: LoaderConfig, store: Store, *, rank: int = 0, world_size: int = 1, pin: bool = False
) -> Prefetcher:
    """The loader that `config.name` names, read `config.prefetch` batches ahead; else as `build_loader`.

    `pin` as `Prefetcher`'s.
    """
    loader = build_loader(config, store, rank=rank, world_size=world_size)
    return Prefetcher(loader, config.prefetch, pin=pin)


def build_loader(config: LoaderConfig, store: Store, **options: Any) -> SeekableLoader:
    """The loader that `config.name` names by itself; `options`: `rank`, `world_size` and the loader's own.

    Raises `UserError` where the set is laid out for another loader, and where the split is too small for one
    batch or the ranks cannot share it evenly.
    """
    if store.manifest.storage.layout != layout(config):
        width = row_width(config)
        words = config.name
        if width is not None:
            words += f" loader.row_width={width} loader.seq_len={config.seq_len}"
        raise wrong_layout(store.manifest, f"loader={config.name}", layout(config), words)
    keep_freed_memory()
    return LOADERS[config.name](config, store, **options)
