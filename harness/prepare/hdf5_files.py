"""HDF5 files while they are made: under another name until they are whole, else nothing is left of them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import UserError
from harness.files import fsync_dir
from harness.storage.growing import growing_path, hold
from harness.storage.manifest_schema import COMPRESSIONS

if TYPE_CHECKING:
    import h5py

BLOCK = 1 << 21  # elements copied at a time
_GZIP_LEVEL = 4
_PAGE = 4096
_SLACK = 1 << 20  # bytes that the structure of a file takes beside its data, at most


class NewFile:
    """An HDF5 file under a temporary name beside `path`, until it is published under that or removed.

    HDF5 ends the process where a write fails (a full disk, a quota). So room is asked for before each write,
    and a disk without it is an `OSError` here. Data begin at a page (`aligned`), so that they map well; of
    compressed chunks, which are never mapped, that would undo the compression.
    """

    def __init__(self, path: Path, *, aligned: bool) -> None:
        import h5py

        self.path = path
        refuse_existing(path)
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        # v110: checksummed headers, a flat chunk index. Metadata gathered in one block keeps chunks adjacent.
        self._disk = open(self.temporary, "xb", buffering=0)  # noqa: SIM115
        try:
            self._allocate(0, _SLACK)
        except BaseException:
            self._disk.close()
            self.temporary.unlink()
            raise
        self.file = h5py.File(
            self.temporary, "w", libver=("v110", "v110"), locking=False,
            alignment_threshold=_PAGE, alignment_interval=_PAGE if aligned else 1, meta_block_size=1 << 16,
        )  # fmt: skip
        self.reserve(0, 0)

    def reserve(self, parts: int, part_bytes: int) -> None:
        """Make room for this many more chunks or datasets; `OSError` where there is none."""
        aligned = part_bytes + -part_bytes % _PAGE
        self._allocate(self.file.id.get_filesize(), parts * (aligned + 64) + _SLACK)

    def publish(self) -> None:
        """Close, make durable, rename; `UserError` where `path` exists by now."""
        self.file.flush()
        size = self.file.id.get_filesize()
        self.file.close()
        self._disk.truncate(size)
        os.fsync(self._disk.fileno())
        self._disk.close()
        refuse_existing(self.path)
        os.rename(self.temporary, self.path)
        fsync_dir(self.path.parent)

    def remove(self) -> None:
        """Close and delete the temporary file, if there still is one."""
        with contextlib.suppress(Exception):  # on a full disk closing fails too; the first error counts
            self.file.close()
        self._disk.close()
        self.temporary.unlink(missing_ok=True)

    def _allocate(self, start: int, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._disk.fileno(), start, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise OSError(error.errno, error.strerror, str(self.temporary)) from error


class SealedFile:
    """The dataset `tokens` of a new file that nobody reads before it is whole."""

    def __init__(self, path: Path, dtype: np.dtype[Any], chunk_tokens: int, compression: str) -> None:
        self._options = filters(compression, dtype)
        self._new = NewFile(path, aligned=compression == "none")
        try:
            self._dataset = _tokens(self._new.file, dtype, chunk_tokens, self._options)
        except BaseException:
            self.remove()
            raise

    def extend(self, array: np.ndarray) -> None:
        """Append an array that begins at a chunk's start."""
        _extend(self._new, self._dataset, array)

    def finish(self, sha256: str, tokens: int, documents: int | None) -> None:
        """Describe what is there and give it its name."""
        describe(self._dataset, sha256, token_count=tokens, document_count=documents)
        self._new.publish()

    def remove(self) -> None:
        """Leave nothing of an unfinished shard."""
        self._new.remove()


class GrowingFile:
    """The same for a shard that `open_growing` follows: at the end it is written anew, sealed.

    So nothing that HDF5 forbids in its single-writer mode (attributes above all) is ever needed, and the
    shard under its final name never bears the marks of a file that is being written.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], chunk_tokens: int, compression: str) -> None:
        self._sealed = path, dtype, chunk_tokens, compression
        self._name = growing_path(path)
        filters(compression, dtype)  # refused now rather than at the end
        refuse_existing(path)
        self._new, self._lock, self._named = NewFile(self._name, aligned=True), -1, False
        try:
            self._dataset = _tokens(self._new.file, dtype, chunk_tokens, {})
            self._new.file.swmr_mode = True
            self._lock = os.open(self._new.temporary, os.O_RDONLY)
            hold(self._lock)
            refuse_existing(self._name)
            os.rename(self._new.temporary, self._name)
            self._named = True
        except BaseException:
            self.remove()
            raise

    def extend(self, array: np.ndarray) -> None:
        """Append an array that begins at a chunk's start, and let readers see it."""
        _extend(self._new, self._dataset, array)
        self._dataset.flush()

    def finish(self, sha256: str, tokens: int, documents: int | None) -> None:
        """Write the shard under its final name, then take the growing file away."""
        sealed = SealedFile(*self._sealed)
        try:
            step = block_of_chunks(self._dataset.chunks[0])
            for start in range(0, tokens, step):
                sealed.extend(self._dataset[start : start + step])
            sealed.finish(sha256, tokens, documents)
        except BaseException:
            sealed.remove()
            raise
        self.remove()

    def remove(self) -> None:
        """Take the growing file away."""
        self._new.remove()
        if self._named:
            self._name.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._named, self._lock = False, -1


def block_of_chunks(chunk_tokens: int) -> int:
    """How many tokens are copied at a time: whole chunks, about `BLOCK`."""
    return max(chunk_tokens, BLOCK - BLOCK % chunk_tokens)


def filters(compression: str, dtype: np.dtype[Any]) -> dict[str, Any]:
    """What h5py needs to know for `data.compression`; shuffle groups the bytes of tokens by their weight."""
    if compression not in COMPRESSIONS:
        raise UserError(f"data.compression={compression!r} must be one of {', '.join(COMPRESSIONS)}")
    if compression == "none":
        return {}
    level = {"compression_opts": _GZIP_LEVEL} if compression == "gzip" else {}
    return {"compression": compression, "shuffle": dtype.itemsize > 1, **level}


def describe(dataset: h5py.Dataset, sha256: str, **counts: int | None) -> None:
    """The attributes of a finished dataset, those that are known."""
    for name, value in counts.items():
        if value is not None:
            dataset.attrs[name] = value
    # Of a fixed length, so that it is in the checksummed header and not in HDF5's heap, which has none.
    dataset.attrs["sha256"] = np.bytes_(sha256)


def refuse_existing(path: Path) -> None:
    """`UserError` where there is anything at `path`."""
    if os.path.lexists(path):
        raise UserError(
            f"{path} exists, and a shard is never written over: it may be in use. If nothing writes or reads "
            "it (a killed writer leaves a .growing file), remove it first; or write to another name"
        )
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}. Make it first")


def _tokens(
    file: h5py.File, dtype: np.dtype[Any], chunk_tokens: int, options: dict[str, Any]
) -> h5py.Dataset:
    return file.create_dataset("tokens", (0,), dtype, maxshape=(None,), chunks=(chunk_tokens,), **options)


def _extend(new: NewFile, dataset: h5py.Dataset, array: np.ndarray) -> None:
    at, chunk = dataset.shape[0], dataset.chunks[0]
    assert at % chunk == 0
    new.reserve(-(-len(array) // chunk), chunk * array.itemsize)
    dataset.resize((at + len(array),))
    dataset[at:] = array
