"""HDF5 datasets that only h5py can read: decoded blocks and open files are kept, both within bounds."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import UserError
from harness.storage import forks
from harness.storage.extents import Extent, Reader, TokenArray
from harness.storage.hdf5_file import hdf5_errors, open_hdf5
from harness.storage.io import MAX_DESCRIPTORS, FileIdentity, will_need

if TYPE_CHECKING:
    import h5py

# Bytes of decoded blocks that one cache keeps at most; the newest block stays whatever its size.
CACHE_BYTES = 64 << 20
# A block has at least so many elements, and so many where a dataset has no chunks.
_SMALLEST, _UNCHUNKED = 1 << 10, 1 << 16


class DecodedBlocks:
    """Datasets of some HDF5 files, read in blocks of whole chunks.

    The most recently used blocks are kept, `CACHE_BYTES` at most, and `MAX_DESCRIPTORS` files open. Every
    opening compares a file with the identity given for it. For the threads of one process.
    """

    def __init__(self, files: Sequence[tuple[Path, FileIdentity]]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._open: OrderedDict[int, tuple[h5py.File, dict[str, h5py.Dataset]]] = OrderedDict()
        self._block_rows: dict[tuple[int, str], int] = {}
        self._blocks: OrderedDict[tuple[int, str, int], TokenArray] = OrderedDict()
        self._kept = 0

    def slice(self, index: int, name: str, start: int, count: int) -> TokenArray:
        """Entries `[start, start+count)` of the dataset `name` of a file, `count` at least 1; only read it.

        Raises `UserError` where the file is not the one that was checked or a chunk cannot be decoded.
        """
        stop = start + count
        with self._lock:
            rows = self._rows(index, name)
            parts = [
                self._block(index, name, number)[max(start - number * rows, 0) : stop - number * rows]
                for number in range(start // rows, (stop - 1) // rows + 1)
            ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def take(self, index: int, name: str, ids: TokenArray) -> TokenArray:
        """The entries `ids` `(k,)` of a dataset in that order, duplicates included, as an owned array."""
        with self._lock:
            shape, dtype = self._dataset(index, name).shape, self._dataset(index, name).dtype
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < shape[0]:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise UserError(f"row {wrong} was asked for, but {self._files[index][0]} has {shape[0]} rows")
            out = np.empty((len(ids), *shape[1:]), dtype)
            numbers, locals_ = np.divmod(ids, self._rows(index, name))
            for number in np.unique(numbers).tolist():
                here = numbers == number
                out[here] = self._block(index, name, number)[locals_[here]]
        return out

    def will_need(self, index: int, name: str, start: int, count: int) -> None:
        """Ask the system to read the chunks of these entries ahead, where they are not decoded yet."""
        if not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            rows, dataset = self._rows(index, name), self._dataset(index, name)
            if dataset.chunks is None:
                return
            for number in range(start // rows, (start + count - 1) // rows + 1):
                if (index, name, number) not in self._blocks:
                    self._hint(dataset, number * rows, min((number + 1) * rows, len(dataset)))

    def _hint(self, dataset: h5py.Dataset, start: int, stop: int) -> None:
        fd = dataset.file.id.get_vfd_handle()
        for at in range(start, stop, dataset.chunks[0]):
            chunk = dataset.id.get_chunk_info_by_coord((at, *[0] * (dataset.ndim - 1)))
            if chunk.byte_offset is not None:
                will_need(fd, chunk.byte_offset, chunk.size)

    def _rows(self, index: int, name: str) -> int:
        """Entries of the first axis in one block of a dataset."""
        rows = self._block_rows.get((index, name))
        if rows is None:
            dataset = self._dataset(index, name)
            width = max(1, int(np.prod(dataset.shape[1:])))
            rows = dataset.chunks[0] if dataset.chunks else -(-_UNCHUNKED // width)
            rows *= -(-_SMALLEST // (rows * width))
            self._block_rows[index, name] = rows
        return rows

    def _block(self, index: int, name: str, number: int) -> TokenArray:
        key = (index, name, number)
        block = self._blocks.get(key)
        if block is None:
            rows, dataset = self._rows(index, name), self._dataset(index, name)
            start, stop = number * rows, min((number + 1) * rows, len(dataset))
            with hdf5_errors(self._files[index][0], f"cannot be decoded in {name} [{start}, {stop})"):
                block = dataset[start:stop]
            block.setflags(write=False)
            self._blocks[key] = block
            self._kept += block.nbytes
            while self._kept > CACHE_BYTES and len(self._blocks) > 1:
                self._kept -= self._blocks.popitem(last=False)[1].nbytes
        else:
            self._blocks.move_to_end(key)
        return block

    def _dataset(self, index: int, name: str) -> h5py.Dataset:
        opened = self._open.get(index)
        if opened is None:
            while len(self._open) >= MAX_DESCRIPTORS:
                self._open.popitem(last=False)[1][0].close()
            opened = self._open[index] = (open_hdf5(*self._files[index])[0], {})
        self._open.move_to_end(index)
        file, datasets = opened
        if name not in datasets:
            datasets[name] = file[name]
        return datasets[name]


class Decoded(Reader):
    """Extents that are whole shards behind filters."""

    def __init__(self, extents: Sequence[Extent], dtype: np.dtype[Any]) -> None:
        super().__init__(extents, dtype)
        self._blocks = DecodedBlocks([(extent.path, extent.file) for extent in extents])

    def slice(self, index: int, start: int, count: int) -> TokenArray:
        """Tokens `[start, start+count)` of a shard, `(count,)`; perhaps a view of what is kept."""
        return self._blocks.slice(index, "tokens", start, count)

    def gather(self, starts: TokenArray, length: int) -> tuple[TokenArray, Sequence[int]]:
        """As in `Reader`: all windows are left, by place, so that each block is decoded once a batch."""
        return super().gather(starts, length)[0], np.argsort(starts).tolist()

    def will_need(self, index: int, start: int, count: int) -> None:
        """Ask the system to read the chunks of these tokens ahead."""
        self._blocks.will_need(index, "tokens", start, count)


class ChunkedRows:
    """The rows and masks of HDF5 files of padded rows that cannot be mapped; see `hdf5_rows_layout`.

    `files` are paths with the identities found when they were checked. May be used, forked or pickled, and
    used again on either side. Thread-safe.
    """

    def __init__(self, files: Sequence[tuple[Path, FileIdentity]]) -> None:
        self._files = list(files)
        self._opened: tuple[int, DecodedBlocks] | None = None

    def read(self, index: int, row_ids: Sequence[int] | TokenArray) -> tuple[TokenArray, TokenArray]:
        """Rows `(k, W)` and their mask `(k, W)` of bool: the rows `row_ids` `(k,)` of the file `index`.

        In the order asked for, duplicates included, as owned arrays; `UserError` for a row that is not there,
        a file that is not the one that was checked, and a chunk that cannot be decoded.
        """
        ids = np.asarray(row_ids, np.int64)
        blocks = self._open()
        return blocks.take(index, "rows", ids), blocks.take(index, "mask", ids)

    def read_mask(self, index: int, row_ids: Sequence[int] | TokenArray) -> TokenArray:
        """The mask alone; else as `read`."""
        return self._open().take(index, "mask", np.asarray(row_ids, np.int64))

    def will_need(self, index: int, row_ids: Sequence[int] | TokenArray) -> None:
        """Ask the system to read the chunks of these rows and of their mask ahead."""
        for row in np.sort(np.asarray(row_ids, np.int64)).tolist():
            for name in ("rows", "mask"):
                self._open().will_need(index, name, row, 1)

    def close(self) -> None:
        """Let go of files and decoded blocks; a later read opens them again."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _open(self) -> DecodedBlocks:
        opened = self._opened
        if opened is None or opened[0] != forks.pid:
            opened = self._opened = (forks.pid, DecodedBlocks(self._files))
        return opened[1]
