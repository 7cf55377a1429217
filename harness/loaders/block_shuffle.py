"""Rows shuffled inside large windows of the stream, which are kept in memory while they are read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.loaders.batch import Origin, check_sizes
from harness.loaders.permutation import Ids, Permutation, epoch_key
from harness.loaders.sampled import SampledLoader
from harness.loaders.sequential import too_small
from harness.loaders.sliding_window import count_windows
from harness.storage import TokenStore, read_ranges

WINDOW_TOKENS = 1 << 27

# 4 MiB of uint16: read at once, this much hides the wait of slow storage.
BLOCK_TOKENS = 1 << 21

_Array = np.ndarray[Any, Any]


class BlockShuffleLoader(SampledLoader):
    """Rows of `seq_len + 1` tokens from `i * seq_len`, none of which overlap, each once an epoch.

    The stream is cut into windows of `window_tokens // seq_len` rows, so of at most `window_tokens` tokens,
    which are read in file order in every epoch; inside of each, (seed, epoch, window) decides the order of
    its rows. A row reads tokens of its own window and, where it is the window's last, one more: its last
    target. The last window may be smaller. One window is in memory, in the stored dtype and never more than
    the split needs, and filled in blocks of `BLOCK_TOKENS` when a row of theirs is read: storage is read in
    large pieces, each token once an epoch, and a resume reads only what it touches. Windows and rows cross
    shards and documents. `direct` reads the rows themselves and keeps no window: for a batch here and there.
    `UserError` where a row does not fit in a window; else as `SampledLoader`.
    """

    strategy = "block_shuffle"

    def __init__(
        self,
        store: TokenStore,
        batch_size: int,
        seq_len: int,
        *,
        window_tokens: int = WINDOW_TOKENS,
        direct: bool = False,
        **options: Any,
    ) -> None:
        check_sizes(batch_size, seq_len)
        if type(window_tokens) is not int or window_tokens < seq_len:
            raise UserError(
                f"loader.window_tokens={window_tokens!r} must be an integer of at least loader.seq_len="
                f"{seq_len}: rows are shuffled inside of a window, so one must fit. The default is "
                f"loader.window_tokens={WINDOW_TOKENS}"
            )
        if store.total_tokens < seq_len + 1:
            raise too_small(store, 1, seq_len)
        rows = count_windows(store.total_tokens, seq_len, seq_len)
        self.window_tokens = window_tokens
        self._tokens = store
        self.window_rows = min(window_tokens // seq_len, rows)
        self._window = None if direct else _Window(store, self.window_rows * seq_len + 1)
        super().__init__(store, rows, batch_size, seq_len, **options)

    @property
    def dropped_tokens(self) -> int:
        """Targets of the rows that do not fill a batch, and those after the last row."""
        return super().dropped_tokens + self._tokens.total_tokens - 1 - self.samples * self.seq_len

    def order(self, start: int, count: int) -> Ids:
        """As of `SampledLoader`, window by window."""
        parts = []
        end = start + count
        while start < end:
            window, place = divmod(start, self.window_rows)
            rows = min(self.window_rows, self.samples - (start - place))
            purpose = f"{self.strategy},{window}"
            order = Permutation(rows, epoch_key(self.seed, self._epoch, self.epoch_seed, purpose))
            parts.append(start - place + order.take(place, min(rows - place, end - start)))
            start += len(parts[-1])
        return np.concatenate(parts)

    def _read(self, ids: Ids) -> tuple[Any, Any]:
        if self._window is None:
            return self._tokens.get_windows(ids * self.seq_len, self.seq_len)
        windows = ids // self.window_rows
        changes = np.flatnonzero(np.diff(windows)) + 1
        parts = []
        for first, last in pairwise([0, *changes.tolist(), len(ids)]):
            start = int(windows[first]) * self.window_rows * self.seq_len
            starts = ids[first:last] * self.seq_len - start
            parts.append(self._window.read(start, starts, self.seq_len + 1))
        return self._tokens.split_windows(np.concatenate(parts), ids * self.seq_len)

    def _origins(self, ids: list[int]) -> list[Origin]:
        starts = ((number, number * self.seq_len) for number in ids)
        return [
            Origin("row", number, start, self._tokens.locate(start, self.seq_len + 1))
            for number, start in starts
        ]

    def _extra_state(self) -> dict[str, Any]:
        return {"window_tokens": self.window_tokens}


class _Window:
    """Up to `tokens` consecutive tokens of a store in memory, each block read when it is first needed."""

    def __init__(self, store: TokenStore, tokens: int) -> None:
        self._store = store
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

    def read(self, start: int, starts: Ids, length: int) -> _Array:
        """Rows of `length` tokens at `starts`, counted from the window's own `start`: owned `(n, length)`."""
        if start != self._start:
            self._loaded[:] = False
            self._start = start
        self._fill(starts, length)
        step = self._buffer.itemsize
        shape = (self._size - length + 1, length)
        rows: _Array = np.ndarray(shape, self._buffer.dtype, self._buffer, 0, (step, step))
        return rows[starts]

    def __reduce__(self) -> tuple[type[_Window], tuple[TokenStore, int]]:
        return _Window, (self._store, self._size)

    def _fill(self, starts: Ids, length: int) -> None:
        """Read the blocks of these rows that are not loaded yet; a row may lie in several."""
        touched = np.zeros_like(self._loaded)
        first = starts // BLOCK_TOKENS
        last = (starts + length - 1) // BLOCK_TOKENS
        for distance in range(int((last - first).max()) + 1):
            touched[np.minimum(first + distance, last)] = True
        missing = np.flatnonzero(touched & ~self._loaded)
        if not missing.size:
            return
        stream = _Part(self._store, self._start, min(self._size, self._store.total_tokens - self._start))
        begins = (missing * BLOCK_TOKENS).tolist()
        blocks = [slice(begin, min(begin + BLOCK_TOKENS, len(stream))) for begin in begins]
        read_ranges(stream, self._buffer[: len(stream)], blocks)
        self._loaded[missing] = True


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
