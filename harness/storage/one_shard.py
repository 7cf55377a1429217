"""A store over a single shard, for what looks at shards one by one: verification and conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.storage.hdf5 import hdf5_extents
from harness.storage.manifest import Manifest, Shard
from harness.storage.manifest_schema import SIDES, Split
from harness.storage.npy import npy_extents
from harness.storage.rows import PairStore, RowStore
from harness.storage.tokens import TokenStore


@dataclass(frozen=True)
class Place:
    """A shard of the split `key`, and which of its tokens (of rows: rows) is the shard's first."""

    key: str
    split: Split
    shard: Shard
    start: int

    @property
    def stem(self) -> str:
        """The file's name without its extension, such as `train_00000`."""
        return self.shard.file.split(".")[0]

    @property
    def range(self) -> str:
        """Which tokens or rows of the split it holds, for people."""
        if self.shard.rows is None:
            return f"tokens {self.start:,} to {self.start + self.shard.tokens:,} of {self.key}"
        return f"rows {self.start:,} to {self.start + self.shard.rows:,} of {self.key}"


def places(manifest: Manifest) -> Iterator[Place]:
    """Every shard of a set, split by split, in order."""
    for key, split in manifest.splits.items():
        start = 0
        for shard in split.shards:
            yield Place(key, split, shard, start)
            start += shard.tokens if shard.rows is None else shard.rows


def open_shard(manifest: Manifest, place: Place) -> TokenStore | RowStore:
    """The shard by itself, read at positions; `UserError` where its header is not what the manifest says."""
    shard, key = place.shard, place.key
    split = replace(place.split, total_tokens=shard.tokens, documents=shard.documents, shards=(shard,))
    alone = replace(manifest, splits={key: split})
    return open_part(alone, key, mmap=False)


def open_known(manifest: Manifest, split: str, *, mmap: bool = True) -> TokenStore | RowStore | PairStore:
    """The split `train` or `val` of a manifest that is loaded already; else as `open_part`."""
    if manifest.storage.layout != "contrastive":
        return open_part(manifest, split, mmap=mmap)
    return PairStore(*(RowStore.of(manifest, f"{split}.{side}", mmap=mmap) for side in SIDES))


def open_part(manifest: Manifest, key: str, *, mmap: bool = True) -> TokenStore | RowStore:
    """The split `key` of `Manifest.splits`; `UserError` where a header is not what the manifest says."""
    if manifest.storage.layout != "stream":
        return RowStore.of(manifest, key, mmap=mmap)
    if manifest.storage.format == "npy":
        return TokenStore(manifest, key, npy_extents(manifest, key), mmap=mmap)
    extents, open_reader = hdf5_extents(manifest, key)
    return TokenStore(manifest, key, extents, mmap=mmap, open_reader=open_reader)
