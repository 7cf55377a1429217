"""An `.npy` file that grows, and can go on growing after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.prepare.seal import HEADER_BYTES, npy_header

_BLOCK = 1 << 20


class GrowingArray:
    """Appends items of one shape to the array in `path`; its header is written when it is closed.

    The file is one that nothing reads before that, and is made by the first `append`.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], item: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.item = path, dtype, item
        self.length = 0
        self._digest = hashlib.sha256()
        self._file: IO[bytes] | None = None

    def append(self, values: np.ndarray) -> None:
        """Append `values` `(n, *item)` of the array's dtype."""
        if self._file is None:
            self._file = open(self.path, "xb")  # noqa: SIM115
            self._file.write(bytes(HEADER_BYTES))
        data = np.ascontiguousarray(values).data
        self._file.write(data)
        self._digest.update(data)
        self.length += len(values)

    def sync(self) -> None:
        """Make everything appended so far durable."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self, *, durable: bool) -> str:
        """Write the header and return the SHA-256 of the items' bytes; `durable` if the file is to stay."""
        assert self._file is not None
        self._file.seek(0)
        self._file.write(npy_header(self.dtype, (self.length, *self.item)))
        if durable:
            self.sync()
        self._file.close()
        self._file = None
        return self._digest.hexdigest()

    def holds(self, length: int) -> bool:
        """Whether the file on disk is long enough for `length` items."""
        return self.path.is_file() and self.path.stat().st_size >= self._size(length)

    def restore(self, length: int) -> None:
        """Go on after `length` items; what was appended behind them is cut off."""
        self.length = length
        self._file = open(self.path, "r+b")  # noqa: SIM115
        self._file.truncate(self._size(length))
        self._file.seek(HEADER_BYTES)
        while block := self._file.read(_BLOCK):
            self._digest.update(block)

    def abandon(self) -> None:
        """Close the file as it is; what was synced stays."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def _size(self, length: int) -> int:
        return HEADER_BYTES + length * math.prod(self.item) * self.dtype.itemsize
