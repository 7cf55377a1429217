"""Scattered rows out of large files: through mappings, or by sorted parallel reads where those are faster."""

from __future__ import annotations

import os
import time
from bisect import bisect_right, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from harness.errors import UserError
from harness.storage import forks
from harness.storage.addresses import AddressRange, places_for
from harness.storage.io import (
    Descriptor,
    Descriptors,
    FileIdentity,
    identity_of,
    replaced,
    unreadable,
)
from harness.storage.read_mode import ReadMode
from harness.storage.row_bytes import MappedFile, Rows, Source, read_parallel
from harness.storage.row_table import RowTable

_Array = np.ndarray[Any, Any]


class RowReader:
    """Batches of scattered rows from large files that do not change: fixed-width tokens and their masks.

    `map` gives a file as a read-only array `(rows, columns)` and reads nothing yet; `read` takes such arrays,
    or slices of them that keep adjacent columns (`tokens[:, 8:72]`, `tokens[100:]`), and row ids, and returns
    one array for each. Rows in several files are one source as a `row_table.RowTable`. How the bytes are
    fetched never shows in the answer: a read goes directly through the mappings, or, once those have been
    slow, as sorted positional reads by eight threads at once, as long as that is observed to be clearly
    faster; both check the same things first. `parallel` fixes the way.

    Example, with rows of a sequence and one more token, the last target::

        import numpy as np
        from harness.storage import RowReader

        shape = (1000, 1025)
        np.arange(1000 * 1025, dtype=np.uint32).reshape(shape).tofile("train.bin")
        np.ones(shape, np.bool_).tofile("train.bin.mask")

        with RowReader() as reader:
            tokens = reader.map("train.bin", np.uint32, shape)
            masks = reader.map("train.bin.mask", np.bool_, shape)
            for row_ids in ([9, 2, 9], [999, 0, 5]):
                samples, mask = reader.read((tokens, masks), row_ids)
                assert samples.shape == mask.shape == (3, 1025)
                assert samples[0, 0] == row_ids[0] * 1025

    Keep one reader and its mappings for all batches: files are opened once, and the choice rests on what
    earlier reads cost. A mapping keeps no descriptor, and the positional reads a bounded number. After a fork
    reader and mappings can be used on both sides. To another process they cannot be sent: a pickled reader
    arrives without its mappings, and `map` is called there. Mappings are plain arrays, not `np.memmap`, whose
    indexing is slower and which would hold a descriptor each. Not for several threads at the same time.
    """

    def __init__(self, parallel: bool | None = None) -> None:
        if parallel is not None and type(parallel) is not bool:
            raise UserError(f"parallel={parallel!r} must be True, False or None (whichever is faster)")
        self._fixed = parallel
        self._mode = ReadMode()
        self._by_path: dict[Path, MappedFile] = {}
        self._by_address: list[MappedFile] = []
        self._descriptors = Descriptors()
        self._pid = forks.pid
        self._closed = False

    def map(
        self, path: Path | str, dtype: DTypeLike, shape: tuple[int, int], offset: int = 0
    ) -> np.ndarray[Any, Any]:
        """The rows of a raw, row-major file from byte `offset`, as a read-only array `shape` of `dtype`.

        The file may be longer, but not shorter, and may be mapped several times. `UserError` for a file that
        cannot be read, is too short or has changed since it was first mapped here, and for a shape that is
        not two integers.
        """
        self._check_open()
        kind = _checked_dtype(dtype)
        rows, columns, offset = _checked_shape(shape, offset)
        file = self._file(Path(os.path.abspath(path)))
        end = offset + rows * columns * kind.itemsize
        if end > len(file.data):
            raise UserError(
                f"{file.path} has {len(file.data)} bytes, but {rows} rows of {columns} {kind} from byte "
                f"{offset} need {end}: the file was cut short or was written with another shape or dtype. "
                "Restore the file or give the shape that was written"
            )
        return file.data[offset:end].view(kind).reshape(rows, columns)

    def read(
        self, sources: Sequence[np.ndarray[Any, Any] | RowTable], row_ids: ArrayLike
    ) -> list[np.ndarray[Any, Any]]:
        """The rows `row_ids` of every source, in that order and with repetitions: `(len(row_ids), columns)`.

        Each array is a writable copy of its source's dtype, in the order of `sources`. `row_ids` is one row
        of integers of at least 0. `UserError`, before anything is read, where an id is no row of a source, a
        source is no mapping of this reader, or a file has changed since it was mapped.
        """
        self._check_open()
        if isinstance(sources, np.ndarray):
            raise UserError("sources must be a tuple of mappings, not an array: read((tokens,), row_ids)")
        checked = [self._source(index, source) for index, source in enumerate(sources)]
        ids = _checked_ids(row_ids, checked)
        for file in {file.path: file for source in checked for file in source.files}.values():
            _check_unchanged(file)
        count = len(ids) * len(checked)
        if count == 0:
            return [np.empty((0, source.width), np.uint8).view(source.dtype) for source in checked]
        parallel = self._mode.choose(count) if self._fixed is None else self._fixed
        begun = time.perf_counter()
        if parallel:
            found = read_parallel(checked, ids, self.descriptors())
        else:
            found = [source.gather(ids) for source in checked]
        self._mode.record(parallel, count, time.perf_counter() - begun)
        return [data.view(source.dtype) for data, source in zip(found, checked, strict=True)]

    def close(self) -> None:
        """Let go of all files; arrays that `map` gave stay valid as long as they are held."""
        self._closed = True
        self._by_path.clear()
        self._by_address.clear()
        self._descriptors = Descriptors()

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[RowReader], tuple[bool | None]]:
        return RowReader, (self._fixed,)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this RowReader is closed; make a new one and map its files")

    def _file(self, path: Path) -> MappedFile:
        file = self._by_path.get(path)
        if file is not None:
            _check_unchanged(file)
            return file
        identity = Descriptor(path).identity
        # Nothing of an empty file can be mapped, but no rows of it are rows, too.
        data = _mapped(path, identity) if identity.size else np.empty(0, np.uint8)
        file = self._by_path[path] = MappedFile(path, identity, data, _address(data))
        insort(self._by_address, file, key=_begin)
        return file

    def _source(self, index: int, source: _Array | RowTable) -> Source:
        """The source as bytes; an array is one of the mapped files, recognised by where it lies in memory."""
        if isinstance(source, RowTable):
            return source
        if not isinstance(source, np.ndarray) or source.ndim != 2:
            raise _no_mapping(index, source)
        rows, columns = source.shape
        width = columns * source.itemsize
        stride = source.strides[0] if rows > 1 else width
        begin = _address(source)
        at = bisect_right(self._by_address, begin, key=_begin) - 1
        if at < 0 or columns == 0 or stride < width or (columns > 1 and source.strides[1] != source.itemsize):
            raise _no_mapping(index, source)
        file = self._by_address[at]
        offset = begin - file.address
        if offset + (rows - 1) * stride + width > len(file.data):
            raise _no_mapping(index, source)
        data = np.ndarray((rows, width), np.uint8, file.data, offset, (stride, 1))
        return Rows(file, offset, stride, data, source.dtype)

    def descriptors(self) -> Descriptors:
        """What positional reads go through, also those that are begun beside this reader."""
        if self._pid != forks.pid:
            # In a forked child the parent's lock may be held for ever.
            self._descriptors, self._pid = Descriptors(), forks.pid
        return self._descriptors


def _begin(file: MappedFile) -> int:
    return file.address


def _address(array: _Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _mapped(path: Path, identity: FileIdentity) -> _Array:
    (place,), size = places_for([identity.size])
    try:
        area = AddressRange(size)
        area.map_file(path, identity, place)
    except OSError as error:
        raise unreadable(path, error) from error
    mapped = area.bytes[place : place + identity.size]
    mapped.setflags(write=False)
    return mapped


def _check_unchanged(file: MappedFile) -> None:
    """Raise `UserError` unless the file at the path is the one that is mapped, so far as `stat` can tell.

    Touching the mapping of a file that was cut short would end the process; and only one of the two ways
    would notice that the file was replaced.
    """
    try:
        now = identity_of(os.stat(file.path))
    except OSError as error:
        raise unreadable(file.path, error) from error
    if now != file.identity:
        raise replaced(file.path, file.identity, now)


def _checked_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise UserError(f"dtype={dtype!r}: {error}") from error
    if kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
        raise UserError(f"dtype={dtype!r} cannot be mapped: elements must have one size and hold no objects")
    return kind


def _checked_shape(shape: tuple[int, int], offset: int) -> tuple[int, int, int]:
    values = (*shape, offset) if isinstance(shape, tuple | list) else ()
    if len(values) != 3 or any(isinstance(n, bool) or not isinstance(n, int | np.integer) for n in values):
        raise UserError(f"shape={shape!r}, offset={offset!r}: rows, columns and the offset must be integers")
    rows, columns, offset = (int(value) for value in values)
    if rows < 0 or columns < 1 or offset < 0:
        raise UserError(
            f"shape={shape!r}, offset={offset}: give at least 0 rows, 1 column and an offset of 0 bytes"
        )
    return rows, columns, offset


def _checked_ids(row_ids: ArrayLike, sources: Sequence[Source]) -> _Array:
    ids = np.asarray(row_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UserError(f"row ids must be one row of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        for index, source in enumerate(sources):
            if low < 0 or high >= source.rows:
                wrong = low if low < 0 else high
                raise UserError(
                    f"row {wrong} was asked for (place {int(np.argmax(ids == wrong))} of {len(ids)}), but "
                    f"source {index} ({source.name}) has {source.rows} rows: ids count from 0"
                )
    return ids.astype(np.intp, copy=False)


def _no_mapping(index: int, source: object) -> UserError:
    shown = (
        f"an array of {source.dtype}, shape {source.shape}, strides {source.strides}"
        if isinstance(source, np.ndarray)
        else type(source).__name__
    )
    return UserError(
        f"source {index} ({shown}) is neither a mapping of this reader nor a slice of one with adjacent "
        "columns. Give what map() returned, or such a slice of it; a copied or pickled array is no mapping "
        "any more"
    )
