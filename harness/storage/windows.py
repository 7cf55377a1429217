"""Windows of a stream whose places are known ahead: located once, then gathered batch by batch."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from harness.storage.extents import Located, Reader, TokenArray

if TYPE_CHECKING:
    import torch

    from harness.storage.tokens import TokenStore


class WindowPlan:
    """Windows of `seq_len + 1` tokens of a store at `starts`, int64 `(n,)`, as `TokenStore.plan` makes it.

    The same windows and errors as of `TokenStore.get_windows`, at a third of its own cost a batch. A plan is
    for one thread at a time; like a store it may be used, then forked or pickled, and used on either side.
    """

    def __init__(self, store: TokenStore, starts: TokenArray, seq_len: int) -> None:
        self._store = store
        self._starts = starts
        self._seq_len = seq_len
        self._reader: Reader | None = None
        self._located: Located | None = None

    def get(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `(last - first, seq_len)`, of the windows number `[first, last)`."""
        starts = self._starts[first:last]
        located = self._locate()
        if located is None:
            return self._store.get_windows(starts, self._seq_len)
        next_left = bisect_left(located.left, first)
        if next_left == len(located.left) or located.left[next_left] >= last:
            return self._store.split_windows(located.take(first, last), starts)
        pair = self._store.get_windows(starts, self._seq_len)
        if self._store.reader().mapped_files != located.mapped_files:
            self._reader = None  # files were mapped for these: locate the rest anew
        return pair

    def _locate(self) -> Located | None:
        """Where the windows lie in what this process has mapped."""
        reader = self._store.reader()
        if reader is not self._reader:
            self._reader = reader
            self._located = reader.locate(self._starts, self._seq_len + 1)
        return self._located

    def __reduce__(self) -> tuple[type[WindowPlan], tuple[Any, ...]]:
        return WindowPlan, (self._store, self._starts, self._seq_len)
