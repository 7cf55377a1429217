"""What lies on disk: manifests, and one reader for every storage."""

from __future__ import annotations

from pathlib import Path

from harness.storage.hdf5 import MmapTokenStore
from harness.storage.manifest import load_manifest
from harness.storage.npy import ShardedTokenDataset
from harness.storage.tokens import TokenStore

__all__ = ["MmapTokenStore", "ShardedTokenDataset", "TokenStore", "open_store"]

_STORES = {"npy": ShardedTokenDataset, "hdf5": MmapTokenStore}


def open_store(
    directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
) -> TokenStore:
    """The split `train` or `val` of a prepared set, whatever its storage; `UserError` where it is damaged.

    `prepare_command` is what messages say to run where it is known, as in `load_manifest`.
    """
    store = _STORES[load_manifest(directory, prepare_command=prepare_command).storage.format]
    return store(directory, split, mmap=mmap, prepare_command=prepare_command)
