"""Writes HDF5 files of tokens and of padded rows: whole under their final name, or not there at all.

The files are plain: one unfiltered, page-aligned run of bytes a dataset wherever no compression was asked
for, no time stamps, and the checksummed object headers that every HDF5 since 1.10 reads. So the same tokens
give the same bytes, readers can map them, and a flipped bit in the structure is noticed on opening.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from harness.errors import UserError
from harness.prepare.hdf5_files import (
    BLOCK,
    GrowingFile,
    NewFile,
    SealedFile,
    block_of_chunks,
    describe,
    filters,
)

CHUNK_TOKENS = 65_536
_ROW_CHUNK = 65_536  # elements of a compressed chunk of rows, about


class HDF5ShardWriter:
    """Writes one shard: a 1-D dataset `tokens`, extended by whole chunks, the last one partly filled.

    The file is built under a temporary name beside `path`, made durable and renamed by `close`. In a `with`
    block that ends in an exception, nothing is left. `dtype` is `uint16` or `uint32` (stored little-endian).
    The attributes on `tokens` are `token_count`, `document_count` and `sha256`, the SHA-256 (hex) of the
    tokens' little-endian bytes, which is also `writer.sha256` after `close`. With `growing=True` another
    process can follow the shard, chunk by chunk, with `harness.storage.open_growing(path)`.

        with HDF5ShardWriter("train_00000.h5") as writer:
            writer.write([5, 6, 7, 0])
            writer.write(np.array([8, 0, 9, 0], np.uint16), documents=2)
    """

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: Any = np.uint16,
        chunk_tokens: int = CHUNK_TOKENS,
        compression: str = "none",
        growing: bool = False,
    ) -> None:
        self.path = Path(path)
        self.dtype = _stored_dtype(dtype)
        self.chunk_tokens = _chunk_tokens(chunk_tokens, self.dtype)
        self.token_count = 0
        self.document_count = 0
        self.sha256: str | None = None
        self._state = "open"
        self._digest = hashlib.sha256()
        self._buffer = np.empty(self.chunk_tokens, self.dtype)
        self._buffered = 0
        make = GrowingFile if growing else SealedFile
        self._shard = make(self.path, self.dtype, self.chunk_tokens, compression)

    def write(self, tokens: np.ndarray | Sequence[int], *, documents: int = 1) -> None:
        """Append the tokens of `documents` whole documents, `(n,)` integers; their boundaries included.

        Raises `UserError`, and writes nothing, where one is no id of the stored dtype.
        """
        if self._state != "open":
            raise UserError(
                f"{self.path} is {self._state}, and is not written to any more: start another shard"
            )
        array = _checked(tokens, self.dtype)
        self.token_count += len(array)
        self.document_count += documents
        try:
            self._append(array)
        except BaseException:
            self.abandon()
            raise

    def close(self) -> None:
        """Write what is buffered and the attributes, and give the file its name; twice does nothing more.

        Raises `UserError` where `path` exists by now.
        """
        if self._state == "open":
            self._finish(self.document_count)

    def abandon(self) -> None:
        """Remove the unfinished file; does nothing to a finished one."""
        if self._state == "open":
            self._state = "abandoned"
            self._shard.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _finish(self, documents: int | None) -> str:
        try:
            self._extend(self._buffer[: self._buffered])
            sha256 = self._digest.hexdigest()
            self._shard.finish(sha256, self.token_count, documents)
        except BaseException:
            self.abandon()
            raise
        self.sha256, self._state = sha256, "complete"
        return sha256

    def _append(self, array: np.ndarray) -> None:
        """Fill the buffer; a full one and whole chunks beyond it go to the file."""
        if self._buffered:
            take = min(len(array), self.chunk_tokens - self._buffered)
            self._keep(array[:take])
            array = array[take:]
            if self._buffered < self.chunk_tokens:
                return
            self._extend(self._buffer)
            self._buffered = 0
        whole = len(array) - len(array) % self.chunk_tokens
        self._extend(array[:whole])
        self._keep(array[whole:])

    def _keep(self, array: np.ndarray) -> None:
        self._buffer[self._buffered : self._buffered + len(array)] = array
        self._buffered += len(array)

    def _extend(self, array: np.ndarray) -> None:
        """Grow the dataset by `array`, which begins at a chunk's start; in parts that bound the memory."""
        step = block_of_chunks(self.chunk_tokens)
        for start in range(0, len(array), step):
            part = np.ascontiguousarray(array[start : start + step], self.dtype)
            self._shard.extend(part)
            self._digest.update(part.data)


def write_hdf5_shard(
    path: Path | str,
    tokens: np.ndarray | Iterable[np.ndarray],
    *,
    documents: int | None = None,
    dtype: Any = None,
    chunk_tokens: int = CHUNK_TOKENS,
    compression: str = "none",
) -> str:
    """Write a whole shard as `HDF5ShardWriter` does and return the SHA-256 of its tokens.

    `tokens` is an array `(n,)`, also a mapping larger than memory, or arrays one after another. `dtype` is
    the array's own, or `uint16` for an iterator, unless it is given. Without `documents` the file does not
    say how many there are.
    """
    if isinstance(tokens, np.ndarray):
        dtype = tokens.dtype if dtype is None else dtype
        tokens = (tokens,)
    writer = HDF5ShardWriter(
        path, dtype=np.uint16 if dtype is None else dtype, chunk_tokens=chunk_tokens, compression=compression
    )
    with writer:
        for part in tokens:
            writer.write(part, documents=0)
        return writer._finish(documents)


def write_hdf5_rows(
    path: Path | str, rows: np.ndarray, mask: np.ndarray, *, compression: str = "none"
) -> tuple[str, str]:
    """Write padded rows: the datasets `rows` `(n, W)` of uint16 or uint32, and `mask` `(n, W)` of bool.

    Contiguous and page-aligned without compression; else in chunks of whole rows, about 65 536 elements each.
    Both may be mappings larger than memory. The attributes are `row_count` and `sha256` on both datasets,
    `token_count` (true mask entries) on `mask`. Returns the SHA-256 (hex) of the rows' little-endian bytes
    and of the mask's.
    """
    dtype = _stored_dtype(rows.dtype)
    if rows.ndim != 2 or mask.shape != rows.shape or mask.dtype != np.bool_:
        raise UserError(
            f"{path}: rows of shape {rows.shape} and a mask of {mask.dtype} {mask.shape} do not fit: both "
            "must be (n, W), the mask of bool, so that every token has its bit"
        )
    new = NewFile(Path(path), aligned=compression == "none")
    try:
        sha256, _ = _copy_rows(new, "rows", rows, dtype, compression)
        mask_sha256, tokens = _copy_rows(new, "mask", mask, mask.dtype, compression)
        new.file["mask"].attrs["token_count"] = tokens
        new.publish()
    except BaseException:
        new.remove()
        raise
    return sha256, mask_sha256


def _copy_rows(
    new: NewFile, name: str, source: np.ndarray, dtype: np.dtype[Any], compression: str
) -> tuple[str, int]:
    """Copy `source` into a new dataset, some rows at a time; its SHA-256 and how many entries are not 0."""
    options = filters(compression, dtype)
    count, width = source.shape
    if options and count and width:
        options["chunks"] = (max(1, min(count, _ROW_CHUNK // width)), width)
    elif options:
        options = {}  # nothing to compress, and a chunk has at least one element
    dataset = new.file.create_dataset(name, source.shape, dtype, **options)
    if not options:
        new.reserve(1, source.size * dtype.itemsize)
    digest, nonzero = hashlib.sha256(), 0
    step = options.get("chunks", (1, width))[0] if count else 1
    step *= max(1, BLOCK // max(1, step * width))
    for start in range(0, count, step):
        part = np.ascontiguousarray(source[start : start + step], dtype)
        if options:
            new.reserve(1 + part.size // _ROW_CHUNK, max(_ROW_CHUNK, width) * dtype.itemsize)
        dataset[start : start + len(part)] = part
        digest.update(part.data)
        nonzero += int(np.count_nonzero(part))
    describe(dataset, digest.hexdigest(), row_count=count)
    return digest.hexdigest(), nonzero


def _stored_dtype(dtype: Any) -> np.dtype[Any]:
    found = np.dtype(dtype)
    if found.kind != "u" or found.itemsize not in (2, 4):
        raise UserError(f"tokens of {found} cannot be stored: a set holds uint16 or uint32")
    return found.newbyteorder("<")


def _chunk_tokens(value: int, dtype: np.dtype[Any]) -> int:
    most = (2**32 - 1) // dtype.itemsize
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UserError(
            f"data.chunk_tokens={value!r} must be an integer from 1 to {most}: HDF5 has no larger chunks of "
            f"{dtype.name}"
        )
    return value


def _checked(tokens: np.ndarray | Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """`tokens` as an array of integers that all fit `dtype`, else `UserError`."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(f"tokens must be one row of integers, not {array.dtype} of shape {array.shape}")
    if array.dtype != dtype and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > np.iinfo(dtype).max:
            raise UserError(
                f"token id {low if low < 0 else high} does not fit {dtype.name} "
                f"(0 to {np.iinfo(dtype).max}): it would be stored as another token. Nothing was written"
            )
    return array
