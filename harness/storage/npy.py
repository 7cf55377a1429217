"""npy storage: each shard is one `.npy` file, one extent behind its header."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from harness.errors import UserError
from harness.storage.io import Descriptor, unreadable
from harness.storage.manifest import Manifest, Shard
from harness.storage.opening import stream_manifest
from harness.storage.tokens import Extent, TokenStore

_MAGIC = b"\x93NUMPY"


class ShardedTokenDataset(TokenStore):
    """A split of an npy set. Headers and sizes are checked here, contents are not read.

    `split` is `train` or `val`, `prepare_command` as in `load_manifest`. Raises `UserError` where manifest
    and shards do not agree.
    """

    def __init__(
        self, directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
    ) -> None:
        with stream_manifest(directory, split, "npy", prepare_command) as manifest:
            extents = npy_extents(manifest, split)
        super().__init__(manifest, split, extents, mmap=mmap)


def npy_extents(manifest: Manifest, split: str) -> list[Extent]:
    """The extents of a split, one a shard, each file's header and size checked against the manifest."""
    return [_extent(manifest, shard) for shard in manifest.splits[split].shards]


def _extent(manifest: Manifest, shard: Shard) -> Extent:
    path = manifest.directory / shard.file
    dtype = manifest.storage.dtype
    descriptor = Descriptor(path)
    size = descriptor.identity.size
    try:
        with open(descriptor.fd, "rb", closefd=False) as file:
            shape, _, found = _header(path, file)
            offset = file.tell()
    except OSError as error:
        raise unreadable(path, error) from error
    if found.newbyteorder("<") == dtype != found:
        raise _damaged(path, f"holds big-endian {found.str}, expected little-endian {dtype.str}")
    if found != dtype:
        raise _damaged(path, f"holds {found.str}, but the manifest says {dtype.name} ({dtype.str})")
    if len(shape) != 1:
        raise _damaged(path, f"has the shape {shape}, expected one dimension of {shard.tokens} tokens")
    if shape[0] != shard.tokens:
        raise _damaged(path, f"holds {shape[0]} tokens, but the manifest says {shard.tokens}")
    expected = offset + shard.tokens * dtype.itemsize
    if size != expected:
        raise _damaged(path, f"is {size} bytes long, but header and tokens take {expected}")
    return Extent(path, offset, shard.tokens, descriptor.identity)


def _header(path: Path, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise _damaged(path, f"starts with {magic!r}, but an npy file starts with {_MAGIC!r}")
    version = tuple(file.read(2))
    try:
        if version == (1, 0):
            return npy_format.read_array_header_1_0(file)
        if version == (2, 0):
            return npy_format.read_array_header_2_0(file)
    except OSError:
        raise
    except Exception as error:  # NumPy's parser lets those of the Python parser through
        raise _damaged(path, f"has a broken npy header: {error}") from error
    raise _damaged(path, f"has the npy version {version}, expected (1, 0) or (2, 0)")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} {what}. A shard that is not what the manifest says would give other tokens than promised. "
        "Restore the file or prepare the set again with prepare.overwrite=true"
    )
