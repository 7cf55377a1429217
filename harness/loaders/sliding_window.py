"""Windows of a token stream every `stride` tokens, in a seeded order, in file order, or drawn at random."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.errors import UserError
from harness.loaders.batch import Origin, check_sizes
from harness.loaders.hinting import HintingLoader, Pair
from harness.loaders.permutation import Ids, uniform_draws
from harness.loaders.sequential import too_small
from harness.storage import TokenStore
from harness.storage.reading import Reading, begin_windows
from harness.storage.windows import WindowPlan

SAMPLINGS = ("permutation", "ordered", "uniform")


def count_windows(tokens: int, seq_len: int, stride: int) -> int:
    """Windows of `seq_len + 1` tokens at every `stride` that lie inside of a stream of `tokens`."""
    return 0 if tokens < seq_len + 1 else 1 + (tokens - seq_len - 1) // stride


def check_stride(stride: int | None, seq_len: int) -> int:
    """The stride, `seq_len` for None; `UserError` for anything but an integer of at least 1."""
    if stride is None:
        return seq_len
    if type(stride) is not int or stride < 1:
        raise UserError(f"loader.stride={stride!r} must be an integer of at least 1, or null for seq_len")
    return stride


class SlidingWindowLoader(HintingLoader):
    """Windows of `seq_len + 1` tokens from `i * stride`; `stride` None is `seq_len`, so none overlap.

    `sampling`: `permutation` reads each window once an epoch in a seeded order, `ordered` in file order in
    every epoch; `uniform` draws any start with replacement, for `N // (B*T)` batches, and takes no stride.
    Windows cross shards and documents; `windows` is the number of them. Else as `SampledLoader`.
    """

    strategy = "sliding_window"
    sample_words = "windows"

    def __init__(
        self,
        store: TokenStore,
        batch_size: int,
        seq_len: int,
        *,
        stride: int | None = None,
        sampling: str = "permutation",
        **options: Any,
    ) -> None:
        if sampling not in SAMPLINGS:
            raise UserError(f"loader.sampling={sampling!r} must be one of {', '.join(SAMPLINGS)}")
        if sampling == "uniform" and stride is not None:
            raise UserError(
                f"loader.stride={stride} means nothing with loader.sampling=uniform, which draws any start. "
                "Use loader.stride=null, or loader.sampling=permutation"
            )
        check_sizes(batch_size, seq_len)
        self.stride = 1 if sampling == "uniform" else check_stride(stride, seq_len)
        self.sampling = sampling
        self._tokens = store
        self._planned: tuple[Ids, WindowPlan] | None = None
        self._at_positions = store.positional()
        self.windows = count_windows(store.total_tokens, seq_len, self.stride)
        needed = batch_size if sampling == "uniform" else 1
        if store.total_tokens < needed * seq_len + 1:
            raise too_small(store, needed, seq_len)
        samples = self.windows
        if sampling == "uniform":
            samples = store.total_tokens // (batch_size * seq_len) * batch_size
        super().__init__(store, samples, batch_size, seq_len, **options)

    count_windows = staticmethod(count_windows)

    @property
    def dropped_tokens(self) -> int:
        """Targets of the windows that do not fill a batch, and those after the last window."""
        if self.sampling == "uniform":
            return 0
        end = (self.windows - 1) * self.stride + self.seq_len
        return super().dropped_tokens + self._tokens.total_tokens - 1 - end

    @property
    def skipped_tokens(self) -> int:
        """Targets between windows, where `stride` is larger than `seq_len`."""
        return max(0, self.stride - self.seq_len) * (self.windows - 1)

    def order(self, start: int, count: int) -> Ids:
        """As of `SampledLoader`; with `uniform` these are draws, which may repeat."""
        if self.sampling == "permutation":
            return super().order(start, count)
        if self.sampling == "ordered":
            return np.arange(start, start + count)
        return uniform_draws(self.windows, self._key(), start, count)

    def read_at(self, place: int) -> Pair:
        """As in `lookahead.Source`; the windows of a block of the order are located all at once."""
        self._ids(place)
        first, block = self._blocks[False]
        if self._planned is None or self._planned[0] is not block:
            self._planned = block, self._tokens.plan(block * self.stride, self.seq_len)
        number = place + self._shift - first
        return self._planned[1].get(number, number + self._rows)

    def _read_samples(self, ids: Ids) -> Pair:
        return self._tokens.get_windows(ids * self.stride, self.seq_len)

    def _origins(self, ids: list[int]) -> list[Origin]:
        starts = ((number, number * self.stride) for number in ids)
        return [
            Origin("window", number, start, self._tokens.locate(start, self.seq_len + 1))
            for number, start in starts
        ]

    def _begin(self, ids: Ids, readers: bool) -> Reading[Pair]:
        starts = ids * self.stride
        reading = begin_windows(self._at_positions, starts, self.seq_len + 1, readers=readers)
        return reading.then(lambda windows: self._tokens.split_windows(windows, starts))

    def _extra_state(self) -> dict[str, Any]:
        return {"stride": self.stride, "sampling": self.sampling}
