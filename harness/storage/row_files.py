"""Where the rows of a split and their masks lie: each header compared with the manifest, no content."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.storage.extents import Extent
from harness.storage.hdf5 import hdf5_rows_layout
from harness.storage.manifest import Manifest, Shard
from harness.storage.npy import checked_npy


class RowShard(NamedTuple):
    """The rows of one shard and their mask, row after row; not `plain`: only `ChunkedRows` can read them."""

    rows: Extent
    mask: Extent
    plain: bool = True


def row_shards(manifest: Manifest, split: str) -> list[RowShard]:
    """The shards of a split of rows; `UserError` where a file is missing or not what the manifest says."""
    width = manifest.splits[split].row_width
    assert width is not None
    find = _FORMATS[manifest.storage.format]
    return [find(manifest, shard, (shard.rows or 0, width)) for shard in manifest.splits[split].shards]


def _npy(manifest: Manifest, shard: Shard, shape: tuple[int, int]) -> RowShard:
    assert shard.mask_file is not None
    rows = _npy_extent(manifest.directory / shard.file, shape, manifest.storage.dtype)
    return RowShard(rows, _npy_extent(manifest.directory / shard.mask_file, shape, np.dtype(np.bool_)))


def _npy_extent(path: Path, shape: tuple[int, int], dtype: np.dtype[Any]) -> Extent:
    file, offset = checked_npy(path, shape, dtype)
    return Extent(path, offset, shape[0] * shape[1], file)


def _hdf5(manifest: Manifest, shard: Shard, shape: tuple[int, int]) -> RowShard:
    path, entries = manifest.directory / shard.file, shape[0] * shape[1]
    layout = hdf5_rows_layout(
        path, shape, manifest.storage.dtype, sha256=shard.sha256, mask_sha256=shard.mask_sha256
    )
    rows, mask = (
        Extent(path, at or 0, entries, layout.file) for at in (layout.rows_offset, layout.mask_offset)
    )
    return RowShard(rows, mask, plain=layout.rows_offset is not None)


_FORMATS = {"npy": _npy, "hdf5": _hdf5}
