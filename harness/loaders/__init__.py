"""In which order it is read: loaders by name, and the prefetch around them."""

from __future__ import annotations

from harness.config_groups import LoaderConfig
from harness.loaders.batch import Batch, Loader
from harness.loaders.prefetch import Prefetcher
from harness.loaders.sequential import TokenDataLoader
from harness.storage import TokenStore

__all__ = ["Batch", "Loader", "Prefetcher", "TokenDataLoader", "make_loader"]


def _sequential(config: LoaderConfig, store: TokenStore, rank: int, world_size: int) -> Loader:
    return TokenDataLoader(store, config.batch_size, config.seq_len, rank=rank, world_size=world_size)


LOADERS = {"sequential": _sequential}


def make_loader(config: LoaderConfig, store: TokenStore, *, rank: int = 0, world_size: int = 1) -> Prefetcher:
    """The loader that `config.name` names, read `config.prefetch` batches ahead.

    Raises `UserError` where the split is too small for one batch or the ranks cannot share it evenly.
    """
    return Prefetcher(LOADERS[config.name](config, store, rank, world_size), config.prefetch)
