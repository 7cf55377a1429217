"""Following a shard while another process writes it with `HDF5ShardWriter(path, growing=True)`.

The growing file lies beside the final name. HDF5's single-writer-multiple-reader mode keeps its structure
readable at any moment; the tokens are read from the file at the places of those chunks that the structure
lists already, because a dataset's length may run ahead of its data. HDF5 waits for ever for structure that
never becomes whole, so nothing of it is read once the writer is gone or the file has shrunk.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from harness.errors import UserError
from harness.storage.chunk_cache import DecodedBlocks
from harness.storage.extents import TokenArray
from harness.storage.hdf5_file import hdf5_errors, open_hdf5
from harness.storage.io import Descriptor, read_exactly

if TYPE_CHECKING:
    import h5py

try:
    import fcntl
except ImportError:  # no such locks on this system: a writer that died is not noticed
    fcntl = None  # type: ignore[assignment]


def growing_path(path: Path) -> Path:
    """Where the shard that will be `path` grows."""
    return path.with_name(f"{path.name}.growing")


def hold(fd: int) -> None:
    """Mark a growing file as having a living writer, until all processes that have `fd` are gone."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # this file system has no locks: a death is not noticed
            fcntl.flock(fd, fcntl.LOCK_EX)


def open_growing(path: Path | str) -> GrowingShard:
    """Follow the shard that will be `path`, or read it where it is finished already.

        with open_growing("train_00000.h5") as shard:
            while not shard.finished:
                shard.refresh()
                ...  shard.read(seen, len(shard) - seen)

    Raises `UserError` where neither is there, or its writer has died.
    """
    return GrowingShard(Path(path))


class GrowingShard:
    """A shard and how much of it is there: `len(shard)` or `tokens`, `dtype`, `finished`.

    For one process and one thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = 0
        self.finished = False
        self._offsets: list[int] = []
        self._size = 0
        self._sealed: DecodedBlocks | None = None
        self._growing: Descriptor | None = None
        self._file: h5py.File | None = None
        if not self._switch_to_sealed():
            try:
                self._open()
                self._look()
            except UserError:
                if not self._switch_to_sealed():  # unless it was finished between the two looks
                    raise

    def __len__(self) -> int:
        return self.tokens

    def refresh(self) -> int:
        """See what was written since; returns the tokens that can be read by now.

        Raises `UserError` where the writer died or gave up, or the file was cut short. What was seen before
        can still be read then, unless it was cut off.
        """
        if self.finished or self._switch_to_sealed():
            return self.tokens
        if not self._is_written():
            if self._switch_to_sealed():  # it was finished between the two looks
                return self.tokens
            raise self._no_writer()
        self._look()
        return self.tokens

    def read(self, start: int, count: int) -> TokenArray:
        """Tokens `[start, start+count)` as an owned array; `UserError` beyond `tokens`."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise UserError(
                f"tokens [{start}, {start + count}) were asked for, but {self.path} has {self.tokens} so far"
                ": refresh() until they are there"
            )
        out = np.empty(count, self.dtype)
        if self._sealed is not None:
            if count:
                out[:] = self._sealed.slice(0, "tokens", start, count)
            return out
        at = start
        while at < start + count:
            chunk, local = divmod(at, self._chunk)
            part = out[at - start : at - start + self._chunk - local]
            offset = self._offsets[chunk] + local * self.dtype.itemsize
            assert self._growing is not None
            read_exactly(growing_path(self.path), self._growing, part, offset)
            at += len(part)
        return out

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        self._file = self._growing = self._sealed = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        import h5py

        place = growing_path(self.path)
        if not place.exists():
            raise UserError(
                f"neither {self.path} nor {place.name} is there: no shard of that name is being written. "
                "Start its writer first (HDF5ShardWriter(path, growing=True)), or give the path that it has"
            )
        self._growing = Descriptor(place)
        if not self._is_written():
            raise self._no_writer()
        with hdf5_errors(place, "cannot be followed"):
            file = h5py.File(place, "r", libver="latest", swmr=True, locking=False, rdcc_nbytes=0)
            self._file, self._dataset = file, file["tokens"]
            self.dtype, self._chunk = self._dataset.dtype, self._dataset.chunks[0]
        if not self._is_written():  # else another writer may have begun between the two openings
            raise self._no_writer()

    def _look(self) -> None:
        """Count the chunks that are there; the structure is read only as far as it has been written."""
        assert self._growing is not None
        place, size = growing_path(self.path), os.fstat(self._growing.fd).st_size
        if size < self._size:
            raise UserError(
                f"{place} is {size} bytes long and was {self._size}: it was cut short while it was written. "
                "Its writer cannot finish it: stop it, remove the file and write the shard again"
            )
        self._size = size
        with hdf5_errors(place, "cannot be followed"):
            self._dataset.refresh()
            length = self._dataset.shape[0]
            while len(self._offsets) * self._chunk < length:
                start = (len(self._offsets) * self._chunk,)
                offset = self._dataset.id.get_chunk_info_by_coord(start).byte_offset
                if offset is None:
                    break
                self._offsets.append(offset)
        self.tokens = max(self.tokens, min(length, len(self._offsets) * self._chunk))

    def _is_written(self) -> bool:
        """Whether the file we read still has its name, and a writer that lives."""
        assert self._growing is not None
        try:
            named = os.stat(growing_path(self.path))
        except FileNotFoundError:
            return False
        if not os.path.samestat(named, os.fstat(self._growing.fd)):
            return False
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._growing.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is held, or this file system has no locks
            return True
        fcntl.flock(self._growing.fd, fcntl.LOCK_UN)
        return False

    def _switch_to_sealed(self) -> bool:
        """Go on with the finished file, if it is there: it begins with what was seen."""
        if not self.path.exists():
            return False
        file, identity = open_hdf5(self.path)
        with hdf5_errors(self.path), file:
            length, dtype = file["tokens"].shape[0], file["tokens"].dtype
        if length < self.tokens or (self._file is not None and dtype != self.dtype):
            raise UserError(
                f"{self.path} has {length} tokens of {dtype}, but {self.tokens} were seen growing: it is not "
                "the shard that was followed. Open it anew to read it"
            )
        self.close()
        self.tokens, self.dtype, self.finished = length, dtype, True
        self._sealed = DecodedBlocks([(self.path, identity)])
        return True

    def _no_writer(self) -> UserError:
        return UserError(
            f"{growing_path(self.path)} has no writer any more, and {self.path.name} is not there: the "
            f"writer was killed or gave up, after {self.tokens} tokens were seen here. Remove what is left "
            "of the file and write the shard again"
        )
