"""What lies on disk: manifests, and one reader for every storage."""

from __future__ import annotations

from pathlib import Path

from harness.errors import UserError
from harness.storage.growing import open_growing
from harness.storage.hdf5 import MmapTokenStore
from harness.storage.manifest import load_manifest
from harness.storage.manifest_schema import SIDES, SPLITS
from harness.storage.npy import ShardedTokenDataset
from harness.storage.ranges import read_ranges
from harness.storage.row_reader import RowReader
from harness.storage.rows import PairStore, RowStore
from harness.storage.tokens import TokenStore

__all__ = [
    "MmapTokenStore",
    "PairStore",
    "RowReader",
    "RowStore",
    "ShardedTokenDataset",
    "Store",
    "TokenStore",
    "open_growing",
    "open_split",
    "open_store",
    "read_ranges",
]

# One split of a prepared set, of any layout.
Store = TokenStore | RowStore | PairStore

_STORES = {"npy": ShardedTokenDataset, "hdf5": MmapTokenStore}


def open_store(
    directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
) -> TokenStore:
    """The split `train` or `val` of a prepared stream of tokens, whatever its storage.

    `prepare_command` is what messages say to run where it is known, as in `load_manifest`. Raises `UserError`
    where the set is damaged or holds rows.
    """
    store = _STORES[load_manifest(directory, prepare_command=prepare_command).storage.format]
    return store(directory, split, mmap=mmap, prepare_command=prepare_command)


def open_split(
    directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
) -> Store:
    """The split `train` or `val` of a prepared set of any storage and layout; else as `open_store`.

    A stream is a `TokenStore`, padded rows are a `RowStore`, contrastive rows a `PairStore` of both sides.
    """
    layout = load_manifest(directory, prepare_command=prepare_command).storage.layout
    if layout == "stream":
        return open_store(directory, split, mmap=mmap, prepare_command=prepare_command)
    if split not in SPLITS:
        raise UserError(f"split={split!r} must be one of {', '.join(SPLITS)}: a set has no other")
    names = [split] if layout == "rows" else [f"{split}.{side}" for side in SIDES]
    stores = [RowStore(directory, name, mmap=mmap, prepare_command=prepare_command) for name in names]
    return stores[0] if layout == "rows" else PairStore(*stores)
