"""Where the rows of a split and their masks lie: each header compared with the manifest, no content."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.storage.extents import Extent
from harness.storage.manifest import Manifest, Shard
from harness.storage.npy import checked_npy


class RowShard(NamedTuple):
    """The rows of one shard and their mask, row after row."""

    rows: Extent
    mask: Extent


def row_shards(manifest: Manifest, split: str) -> list[RowShard]:
    """The shards of a split of rows; `UserError` where a file is missing or not what the manifest says."""
    width = manifest.splits[split].row_width
    assert width is not None
    find = _FORMATS[manifest.storage.format]
    return [find(manifest, shard, (shard.rows or 0, width)) for shard in manifest.splits[split].shards]


def _npy(manifest: Manifest, shard: Shard, shape: tuple[int, int]) -> RowShard:
    assert shard.mask_file is not None
    extents = []
    for name, dtype in ((shard.file, manifest.storage.dtype), (shard.mask_file, np.dtype(np.bool_))):
        path = manifest.directory / name
        file, offset = checked_npy(path, shape, dtype)
        extents.append(Extent(path, offset, shape[0] * shape[1], file))
    return RowShard(*extents)


_FORMATS = {"npy": _npy}
