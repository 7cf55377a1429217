"""What lies on disk: manifests, and one reader for every storage."""

from __future__ import annotations

from pathlib import Path

from harness.storage.manifest import load_manifest
from harness.storage.npy import ShardedTokenDataset
from harness.storage.tokens import TokenStore

__all__ = ["ShardedTokenDataset", "TokenStore", "open_store"]

_STORES = {"npy": ShardedTokenDataset}


def open_store(directory: Path | str, split: str, *, mmap: bool = True) -> TokenStore:
    """The split `train` or `val` of a prepared set, whatever its storage; `UserError` where it is damaged."""
    return _STORES[load_manifest(directory).storage.format](directory, split, mmap=mmap)
