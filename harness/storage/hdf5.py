"""HDF5 storage: each shard is one file with the dataset `tokens`, mapped where its bytes are plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import UserError
from harness.storage.chunk_cache import Decoded
from harness.storage.extents import Extent, OpenReader, TokenArray
from harness.storage.hdf5_file import check_attributes, checked_dataset, hdf5_errors, open_hdf5
from harness.storage.hdf5_layout import Run, find_runs
from harness.storage.io import FileIdentity
from harness.storage.manifest import Manifest, Shard
from harness.storage.opening import stream_manifest
from harness.storage.tokens import TokenStore


class MmapTokenStore(TokenStore):
    """A split of an hdf5 set. Headers and chunk tables are checked here, contents are not read.

    Arguments as for `ShardedTokenDataset`. Unfiltered shards are mapped and read as npy shards are; if a
    shard has a filter (`data.compression`), the split is read through h5py, with `chunk_cache.CACHE_BYTES` of
    decoded chunks kept. Raises `UserError` where manifest and shards do not agree.
    """

    def __init__(
        self, directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
    ) -> None:
        with stream_manifest(directory, split, "hdf5", prepare_command) as manifest:
            extents, open_reader = hdf5_extents(manifest, split)
        super().__init__(manifest, split, extents, mmap=mmap, open_reader=open_reader)

    @classmethod
    def of(cls, manifest: Manifest, split: str, *, mmap: bool = True) -> MmapTokenStore:
        """The split of a manifest that is loaded already; else as the constructor."""
        store = cls.__new__(cls)
        extents, open_reader = hdf5_extents(manifest, split)
        TokenStore.__init__(store, manifest, split, extents, mmap=mmap, open_reader=open_reader)
        return store

    def get_slice(self, start: int, stop: int) -> TokenArray:
        """Tokens `[start, stop)` as an owned array of the stored dtype; empty where both are equal.

        `UserError` (a ValueError) where a bound is negative, `stop` before `start` or beyond the stream.
        """
        for name, bound in (("start", start), ("stop", stop)):
            if isinstance(bound, bool | np.bool_) or not isinstance(bound, int | np.integer) or bound < 0:
                raise UserError(f"{name}={bound!r} must be an integer of at least 0: positions count from 0")
        if stop < start:
            raise UserError(f"the slice [{start}, {stop}) ends before it begins: start must not exceed stop")
        return self.read_tokens(int(start), int(stop) - int(start))


def hdf5_extents(manifest: Manifest, split: str) -> tuple[list[Extent], OpenReader | None]:
    """The extents of a split, and what reads them where h5py must: then each is a whole shard.

    Each file is opened, compared with the manifest and closed again, one at a time.
    """
    shards = manifest.splits[split].shards
    found = [_check_shard(manifest, shard) for shard in shards]
    paths = [manifest.directory / shard.file for shard in shards]
    if any(runs is None for _, runs in found):
        whole = zip(paths, shards, found, strict=True)
        return [Extent(path, 0, shard.tokens, file) for path, shard, (file, _) in whole], Decoded
    return [
        Extent(path, run.offset, run.elements, file)
        for path, (file, runs) in zip(paths, found, strict=True)
        for run in runs or ()
    ], None


def _check_shard(manifest: Manifest, shard: Shard) -> tuple[FileIdentity, list[Run] | None]:
    path = manifest.directory / shard.file
    file, identity = open_hdf5(path)
    with hdf5_errors(path), file:
        dataset = checked_dataset(path, file, "tokens", (shard.tokens,), manifest.storage.dtype)
        said = {"token_count": shard.tokens, "document_count": shard.documents, "sha256": shard.sha256}
        check_attributes(path, dataset, said)
        return identity, find_runs(path, dataset, (shard.tokens,), identity.size)


class RowsLayout(NamedTuple):
    """Where rows and mask lie in an HDF5 file; both offsets are None where only `ChunkedRows` reads them."""

    file: FileIdentity
    rows_offset: int | None
    mask_offset: int | None


def hdf5_rows_layout(
    path: Path,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    *,
    sha256: str | None = None,
    mask_sha256: str | None = None,
) -> RowsLayout:
    """Check a file of padded rows against the manifest's shape `(n, W)`, dtype and hashes (of the header).

    For an unfiltered file the offsets are those that `RowReader.map(path, dtype, shape, offset)` takes,
    `rows` of `dtype` and `mask` of bool. `UserError` where anything is not as said.
    """
    file, identity = open_hdf5(path)
    offsets = []
    with hdf5_errors(path), file:
        for name, kind, said in (("rows", dtype, sha256), ("mask", np.dtype(np.bool_), mask_sha256)):
            dataset = checked_dataset(path, file, name, shape, kind)
            check_attributes(path, dataset, {"row_count": shape[0], "sha256": said})
            runs = find_runs(path, dataset, shape, identity.size)
            offsets.append(runs[0].offset if runs else 0 if runs == [] else None)
    mapped = None not in offsets
    return RowsLayout(identity, offsets[0] if mapped else None, offsets[1] if mapped else None)
