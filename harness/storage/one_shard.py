"""A store over a single shard, for what looks at shards one by one: verification and conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.storage.known import open_part
from harness.storage.manifest import Manifest, Shard
from harness.storage.manifest_schema import Split
from harness.storage.rows import RowStore
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
