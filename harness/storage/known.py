"""The split of a manifest that is loaded: a store of its layout and storage, imported when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.storage.manifest import Manifest
from harness.storage.manifest_schema import SIDES
from harness.storage.tokens import TokenStore

if TYPE_CHECKING:
    from harness.storage.rows import PairStore, RowStore


def open_known(manifest: Manifest, split: str, *, mmap: bool = True) -> TokenStore | RowStore | PairStore:
    """The split `train` or `val`; else as `open_part`."""
    if manifest.storage.layout != "contrastive":
        return open_part(manifest, split, mmap=mmap)
    from harness.storage.rows import PairStore, RowStore

    return PairStore(*(RowStore.of(manifest, f"{split}.{side}", mmap=mmap) for side in SIDES))


def open_part(manifest: Manifest, key: str, *, mmap: bool = True) -> TokenStore | RowStore:
    """The split `key` of `Manifest.splits`; `UserError` where a header is not what the manifest says."""
    if manifest.storage.layout != "stream":
        from harness.storage.rows import RowStore

        return RowStore.of(manifest, key, mmap=mmap)
    return open_stream(manifest, key, mmap=mmap)


def open_stream(manifest: Manifest, split: str, *, mmap: bool = True) -> TokenStore:
    """The split `train` or `val` of a stream of tokens; else as `open_part`."""
    assert manifest.storage.layout == "stream"
    if manifest.storage.format == "npy":
        from harness.storage.npy import ShardedTokenDataset

        return ShardedTokenDataset.of(manifest, split, mmap=mmap)
    from harness.storage.hdf5 import MmapTokenStore

    return MmapTokenStore.of(manifest, split, mmap=mmap)
