"""Rows shuffled inside large windows of the stream, which are kept in memory while they are read."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.loaders.batch import Origin, check_sizes
from harness.loaders.permutation import Ids, Permutation, epoch_key
from harness.loaders.sampled import SampledLoader
from harness.loaders.sequential import too_small
from harness.loaders.sliding_window import count_windows
from harness.loaders.stream_window import WINDOW_TOKENS, StreamWindow
from harness.storage import TokenStore

# Batches before a window's end during which slow storage is told of the next one: 5 s of steps of 20 ms.
_HINTED_STEPS = 256


class BlockShuffleLoader(SampledLoader):
    """Rows of `seq_len + 1` tokens from `i * seq_len`, none of which overlap, each once an epoch.

    The stream is cut into windows of `window_tokens // seq_len` rows, so of at most `window_tokens` tokens,
    which are read in file order in every epoch; inside of each, (seed, epoch, window) decides the order of
    its rows. A row reads tokens of its own window and, where it is the window's last, one more: its last
    target. The last window may be smaller. One window is in memory, in the stored dtype and never more than
    the split needs, and filled in blocks of `BLOCK_TOKENS` when a row of theirs is read: storage is read in
    large pieces, each token once an epoch, and a resume reads only what it touches. Where storage is slow,
    what is left of a window is read beside its first batches, and the system is told of the next window
    before this one ends. Windows and rows cross shards and documents. `direct` reads the rows themselves and
    keeps no window: for a batch here and there.
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
        self._window = None if direct else StreamWindow(store, self.window_rows * seq_len + 1)
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
            ahead = partial(self._rest_of, int(windows[first]))
            parts.append(self._window.read(start, starts, self.seq_len + 1, ahead))
        if self._window.slow:
            self._hint_next_window()
        return self._tokens.split_windows(np.concatenate(parts), ids * self.seq_len)

    def _rest_of(self, window: int) -> Ids:
        """Where the rows of a window that are still to be read begin in it, in their order."""
        first = window * self.window_rows
        place = max(self._position, first)
        return (self.order(place, min(first + self.window_rows, self.samples) - place) - first) * self.seq_len

    def _hint_next_window(self) -> None:
        """Tell the system of the next window's tokens, part by part, beside the last batches of this one.

        It has them in its page cache then, which is not this loader's memory.
        """
        assert self._window is not None
        end = (self._position // self.window_rows + 1) * self.window_rows
        rows = min(self.window_rows, self.samples - end)
        steps = min(_HINTED_STEPS, -(-self.window_rows // self.batch_size))
        step = steps - -(-(end - self._position) // self.batch_size)  # the last batch's is steps - 1
        if step < 0 or rows <= 0:
            return
        begin, stop = end * self.seq_len, (end + rows) * self.seq_len + 1
        part = -(-(stop - begin) // steps)
        self._window.hint(begin + step * part, min(begin + (step + 1) * part, stop))

    def _origins(self, ids: list[int]) -> list[Origin]:
        starts = ((number, number * self.seq_len) for number in ids)
        return [
            Origin("row", number, start, self._tokens.locate(start, self.seq_len + 1))
            for number, start in starts
        ]

    def _extra_state(self) -> dict[str, Any]:
        return {"window_tokens": self.window_tokens}
