"""A window of a stream in memory, filled block by block: all at once ahead where storage is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.loaders.permutation import Ids
from harness.loaders.slow_storage import FIRST_SECONDS
from harness.storage import TokenStore, forks, read_ranges
from harness.storage.pool import Run, start_all

WINDOW_TOKENS = 1 << 27

# 4 MiB of uint16: read at once, this much hides the wait of slow storage.
BLOCK_TOKENS = 1 << 21

# What one reader reads of a block, and what the system is told of at once: Linux reads no more than its
# read-ahead for one hint, which is 128 KiB by default.
_READ_TOKENS, _HINT_TOKENS = 1 << 17, 1 << 15
_PROBE_TOKENS = 1 << 10

_Array = np.ndarray[Any, Any]


class StreamWindow:
    """Up to `tokens` consecutive tokens of a store in memory, each block read when it is first needed.

    `slow`: a small read before a block waited for the storage. From then on the blocks of a window that are
    needed later are begun by the pool's readers together with its first, and read at positions.
    """

    def __init__(self, store: TokenStore, tokens: int) -> None:
        self.slow = False
        self._store = store
        self._at_positions = store.positional()
        self._size = tokens
        try:
            self._buffer: _Array = np.empty(tokens, store.dtype)  # takes no memory until it is written to
        except MemoryError as error:
            raise UserError(
                f"a window of {tokens} tokens needs {tokens * store.dtype.itemsize} bytes of memory, which "
                "the system does not give. Use a smaller loader.window_tokens; the default is "
                f"{WINDOW_TOKENS}"
            ) from error
        self._start = 0
        self._loaded: _Array = np.zeros(-(-tokens // BLOCK_TOKENS), np.bool_)
        self._begun: dict[int, Run] = {}
        self._all_begun = False
        self._pid = forks.pid

    def read(self, start: int, starts: Ids, length: int, ahead: Callable[[], Ids]) -> _Array:
        """Rows of `length` tokens at `starts`, counted from the window's own `start`: owned `(n, length)`.

        `ahead` gives where the window's later rows begin, in their order.
        """
        if self._pid != forks.pid:  # the parent's reads are nobody's
            self._begun, self._all_begun, self._pid = {}, False, forks.pid
        if start != self._start:
            self._turn_to(start)
        missing = self._missing(starts, length)
        if missing:
            self.slow = self.slow or self._is_slow(missing[0])
            if self.slow:
                self._finish(missing, ahead)
            else:
                read_ranges(
                    self._part(), self._buffer[: self._end()], [self._span(block) for block in missing]
                )
            self._loaded[missing] = True
        step = self._buffer.itemsize
        shape = (self._size - length + 1, length)
        rows: _Array = np.ndarray(shape, self._buffer.dtype, self._buffer, 0, (step, step))
        return rows[starts]

    def hint(self, start: int, stop: int) -> None:
        """Tell the system of the tokens `[start, stop)` of the stream."""
        for at in range(start, stop, _HINT_TOKENS):
            self._at_positions.prefetch([at], min(_HINT_TOKENS, stop - at))

    def __reduce__(self) -> tuple[type[StreamWindow], tuple[TokenStore, int]]:
        return StreamWindow, (self._store, self._size)

    def _turn_to(self, start: int) -> None:
        """Another window: nothing of it is loaded, and nobody writes to the buffer any more."""
        for run in self._begun.values():
            run.stop()
        self._begun, self._all_begun = {}, False
        self._loaded[:] = False
        self._start = start

    def _missing(self, starts: Ids, length: int) -> list[int]:
        """The blocks of these rows that are not loaded yet; a row may lie in several."""
        touched = np.zeros_like(self._loaded)
        first = starts // BLOCK_TOKENS
        last = (starts + length - 1) // BLOCK_TOKENS
        for distance in range(int((last - first).max()) + 1):
            touched[np.minimum(first + distance, last)] = True
        return np.flatnonzero(touched & ~self._loaded).tolist()

    def _is_slow(self, block: int) -> bool:
        """Whether a small read of a block waits for the storage."""
        span = self._span(block)
        begun = time.perf_counter()
        self._at_positions.read_tokens(self._start + span.start, min(_PROBE_TOKENS, span.stop - span.start))
        return time.perf_counter() - begun > FIRST_SECONDS

    def _finish(self, blocks: list[int], ahead: Callable[[], Ids]) -> None:
        """Have these blocks in the buffer; once a window, those that come later are begun, too."""
        later = blocks if self._all_begun else [*blocks, *_in_order(ahead() // BLOCK_TOKENS)]
        for block in later:
            if block not in self._begun and not self._loaded[block]:
                self._begun[block] = self._begin(block)
        self._all_begun = True
        for block in blocks:
            run = self._begun.pop(block)
            try:
                run.finish()
            finally:
                run.stop()  # what an interrupt left must not write into another window

    def _begin(self, block: int) -> Run:
        span = self._span(block)
        pieces = (
            (at, min(at + _READ_TOKENS, span.stop)) for at in range(span.start, span.stop, _READ_TOKENS)
        )
        read = self._at_positions.read_into
        return start_all([partial(read, self._start + at, self._buffer[at:stop]) for at, stop in pieces])

    def _span(self, block: int) -> slice:
        return slice(block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, self._end()))

    def _end(self) -> int:
        """Tokens of this window: the last one may be smaller."""
        return min(self._size, self._store.total_tokens - self._start)

    def _part(self) -> _Part:
        return _Part(self._store, self._start, self._end())


def _in_order(blocks: Ids) -> list[int]:
    """Each block once, in the order in which they come first."""
    unique, places = np.unique(blocks, return_index=True)
    return unique[np.argsort(places)].tolist()


class _Part:
    """`size` tokens of a store from `start` on, as a source of `read_ranges`."""

    def __init__(self, store: TokenStore, start: int, size: int) -> None:
        self.dtype = store.dtype
        self._store = store
        self._start = start
        self._size = size

    def __len__(self) -> int:
        return self._size

    def read_into(self, start: int, out: _Array) -> None:
        """Fill `out` with the tokens from the part's `start` on."""
        self._store.read_into(self._start + start, out)
