"""Where the bytes of an HDF5 dataset lie in its file.

Without filters a dataset is nothing but runs of plain little-endian values, so it can be read as an npy file
is. What else HDF5 can do (filters, data inside a header, odd offsets, a user block) is left to h5py.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.errors import UserError
from harness.storage.hdf5_file import damaged

if TYPE_CHECKING:
    import h5py

# More chunks than this are not listed one by one: h5py looks each up as it is read.
MAX_LISTED_CHUNKS = 1 << 20


class Run(NamedTuple):
    """`elements` consecutive values in a file from byte `offset`."""

    offset: int
    elements: int


def find_runs(path: Path, dataset: h5py.Dataset, shape: tuple[int, ...], size: int) -> list[Run] | None:
    """Where the first `shape` elements of a dataset of `size` bytes' file lie, in C order.

    None where only h5py can read them. `UserError` where data are missing, lie outside of the file or over
    one another, or are behind a filter that is not installed.
    """
    import h5py

    plist = dataset.id.get_create_plist()
    _check_filters(path, plist)
    chunks = _checked_chunks(path, dataset)
    count, itemsize = math.prod(shape), dataset.dtype.itemsize
    if plist.get_nfilters() or dataset.file.userblock_size or not _is_plain(dataset):
        return None
    if count == 0:
        return []
    if plist.get_layout() == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        if offset is None or not 0 < offset <= size - count * itemsize:
            held = f"keeps {count * itemsize} bytes of {dataset.name} at byte {offset}"
            raise damaged(path, f"{held}, but is {size} bytes long")
        return None if offset % itemsize else [Run(offset, count)]
    if chunks is None or len(shape) > 1 or chunks > MAX_LISTED_CHUNKS:
        return None
    return _chunk_runs(path, dataset, count, size)


def _is_plain(dataset: h5py.Dataset) -> bool:
    """Whether a value's bytes in the file are those NumPy has in memory."""
    import h5py

    kind = dataset.id.get_type()
    return dataset.dtype == np.bool_ or kind in (h5py.h5t.STD_U16LE, h5py.h5t.STD_U32LE)


def _check_filters(path: Path, plist: Any) -> None:
    import h5py

    for index in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            shown = name.decode("ascii", errors="replace") or "without a name"
            raise UserError(
                f"{path} is compressed with the HDF5 filter {code} ({shown}), which is not installed here, "
                "so its tokens cannot be read. Rewrite the file where that filter is installed (h5repack -f "
                "NONE), or prepare the set again with data.compression=none"
            )


def _checked_chunks(path: Path, dataset: h5py.Dataset) -> int | None:
    """How many chunks there are, None without any: `UserError` unless all were written.

    HDF5 reads a chunk that was never written as zeros, and zeros are tokens.
    """
    shape = dataset.chunks
    if shape is None:
        return None
    expected = math.prod(-(-n // chunk) for n, chunk in zip(dataset.shape, shape, strict=True))
    found: int = dataset.id.get_num_chunks()
    if found != expected:
        raise damaged(path, f"holds {found} chunks of {dataset.name}, expected {expected}")
    return found


def _chunk_runs(path: Path, dataset: h5py.Dataset, count: int, size: int) -> list[Run] | None:
    """The runs of a chunked dataset; chunks that follow one another in the file are one run."""
    chunk, itemsize = dataset.chunks[0], dataset.dtype.itemsize
    starts, offsets, sizes = _chunk_table(dataset)
    order = np.argsort(starts, kind="stable")
    starts, offsets = starts[order], offsets[order]
    chunk_bytes = chunk * itemsize
    if not np.array_equal(starts, np.arange(len(starts), dtype=np.uint64) * np.uint64(chunk)):
        raise damaged(path, f"has a chunk table that does not list each chunk of {chunk} tokens once")
    if (sizes != chunk_bytes).any():
        raise damaged(path, f"has a chunk of {sizes[sizes != chunk_bytes][0]} bytes, expected {chunk_bytes}")
    if chunk_bytes > size or (offsets > size - chunk_bytes).any():
        raise damaged(path, f"has a chunk that ends at byte {offsets.max() + chunk_bytes} of {size}")
    placed = np.sort(offsets)
    if (placed[1:] - placed[:-1] < chunk_bytes).any():
        raise damaged(path, "has chunks that lie over one another")
    if (offsets % itemsize).any():
        return None
    ends = offsets + np.uint64(chunk_bytes)
    first = [0, *(np.flatnonzero(offsets[1:] != ends[:-1]) + 1).tolist(), len(offsets)]
    return [Run(int(offsets[a]), min(b * chunk, count) - a * chunk) for a, b in pairwise(first)]


def _chunk_table(dataset: h5py.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First element, byte offset and byte size of every chunk, in any order."""
    found: list[Any] = []
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(found.append)
    else:  # HDF5 before 1.12.3
        found += map(dataset.id.get_chunk_info, range(dataset.id.get_num_chunks()))
    columns = ((info[0][0] for info in found), (info[2] for info in found), (info[3] for info in found))
    starts, offsets, sizes = (np.fromiter(column, np.uint64, len(found)) for column in columns)
    return starts, offsets, sizes
