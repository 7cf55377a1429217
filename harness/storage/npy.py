"""npy storage: each shard is one `.npy` file, one extent behind its header."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from harness.errors import UserError
from harness.storage.io import Descriptor, FileIdentity, unreadable
from harness.storage.manifest import Manifest, Shard
from harness.storage.opening import stream_manifest
from harness.storage.tokens import Extent, TokenStore

_MAGIC = b"\x93NUMPY"
_USUAL_HEADER = 128  # bytes before the array, of one or two dimensions, as NumPy writes them
# NumPy reads a header with Python's parser, whose depth counter CPython 3.11 shares between threads: two at
# once can, rarely, make a good header look broken.
_PARSING = threading.Lock()


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

    @classmethod
    def of(cls, manifest: Manifest, split: str, *, mmap: bool = True) -> ShardedTokenDataset:
        """The split of a manifest that is loaded already; else as the constructor."""
        store = cls.__new__(cls)
        TokenStore.__init__(store, manifest, split, npy_extents(manifest, split), mmap=mmap)
        return store


def npy_extents(manifest: Manifest, split: str) -> list[Extent]:
    """The extents of a split, one a shard, each file's header and size checked against the manifest."""
    return [_extent(manifest, shard) for shard in manifest.splits[split].shards]


def _extent(manifest: Manifest, shard: Shard) -> Extent:
    path = manifest.directory / shard.file
    file, offset = checked_npy(path, (shard.tokens,), manifest.storage.dtype)
    return Extent(path, offset, shard.tokens, file)


def checked_npy(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[FileIdentity, int]:
    """Which file it is and at which byte its array begins, header and size compared with `shape` and `dtype`.

    `shape` has one dimension of tokens, or two of rows one after another. `UserError` where the file is
    missing or anything else than that.
    """
    descriptor = Descriptor(path)
    size = descriptor.identity.size
    try:
        offset = _usual_offset(os.read(descriptor.fd, _USUAL_HEADER), shape, dtype)
        if size == offset + math.prod(shape) * dtype.itemsize:
            return descriptor.identity, offset
        os.lseek(descriptor.fd, 0, os.SEEK_SET)
        with open(descriptor.fd, "rb", closefd=False) as file:
            found_shape, by_columns, found = _header(path, file)
            offset = file.tell()
    except OSError as error:
        raise unreadable(path, error) from error
    if found.newbyteorder("<") == dtype != found:
        raise _damaged(path, f"holds big-endian {found.str}, expected little-endian {dtype.str}")
    if found != dtype:
        raise _damaged(path, f"holds {found.str}, but the manifest says {dtype.name} ({dtype.str})")
    _check_shape(path, found_shape, shape)
    if by_columns and len(shape) > 1:
        raise _damaged(path, "is stored column by column (fortran_order), expected row by row")
    expected = offset + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise _damaged(path, f"is {size} bytes long, but header and tokens take {expected}")
    return descriptor.identity, offset


def _check_shape(path: Path, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if len(found) != len(shape):
        expected = (
            f"one dimension of {shape[0]} tokens" if len(shape) == 1 else f"{shape[0]} rows of {shape[1]}"
        )
        raise _damaged(path, f"has the shape {found}, expected {expected}")
    if found != shape:
        was, said = (f"{s[0]} tokens" if len(s) == 1 else f"{s[0]} rows of {s[1]}" for s in (found, shape))
        raise _damaged(path, f"holds {was}, but the manifest says {said}")


def _usual_offset(start: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Where the array begins in a file that starts with the very header that NumPy writes for it.

    -1 for any other start, which only a parser knows how to take.
    """
    offset = 10 + int.from_bytes(start[8:10], "little")
    header = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    usual = start[:8] == _MAGIC + b"\x01\x00" and start[10:] == header.ljust(len(start) - 11) + b"\n"
    return offset if usual and offset == len(start) else -1


def _header(path: Path, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise _damaged(path, f"starts with {magic!r}, but an npy file starts with {_MAGIC!r}")
    version = tuple(file.read(2))
    try:
        with _PARSING:
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
