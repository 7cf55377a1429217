"""Sliding windows as PyTorch's own Dataset and DataLoader, in the harness's order and resumable.

For code that is written around a DataLoader. The harness itself trains through `SlidingWindowLoader`, which
gives the same batches without a Python call a sample.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.errors import UserError
from harness.loaders.batch import check_epoch
from harness.loaders.permutation import EPOCH_SEEDS, Permutation, epoch_key
from harness.loaders.sliding_window import SlidingWindowLoader, check_stride, count_windows

_BLOCK = 1 << 16  # ids of a list converted at a time, places of the order computed at a time

Pair = tuple[torch.Tensor, torch.Tensor]
Array = np.ndarray[Any, Any]


class Corpus(Protocol):
    """The least that a store must have; `get_windows` or `read_windows` are used where it has them."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the stream."""

    def read_tokens(self, start: int, count: int) -> Array:
        """The tokens `[start, start+count)`, integers `(count,)`."""


class SlidingWindowDataset(Dataset[Pair]):
    """Windows of `seq_len + 1` tokens at every `stride` (None: `seq_len`) as (input, target) pairs.

    `store` is a `TokenStore`, anything with `total_tokens` and `read_tokens`, or the ids themselves: an
    integer array or tensor is used as it is, a list becomes an array of the smallest dtype that holds it.
    Raises `UserError` for sizes and ids that cannot be; a stream shorter than a window has length 0.
    """

    def __init__(
        self, store: Corpus | Sequence[int] | Array | torch.Tensor, seq_len: int, stride: int | None = None
    ) -> None:
        if type(seq_len) is not int or seq_len < 1:
            raise UserError(f"seq_len={seq_len!r} must be an integer of at least 1")
        self.seq_len = seq_len
        self.stride = check_stride(stride, seq_len)
        self.store: Any = store if hasattr(store, "total_tokens") else _Ids(store)

    count_windows = staticmethod(count_windows)

    def __len__(self) -> int:
        """Windows of the stream."""
        return count_windows(self.store.total_tokens, self.seq_len, self.stride)

    def __getitem__(self, index: int) -> Pair:
        """Window `index` (negative: from the end) as int64 `(seq_len,)` input and target, both owned.

        IndexError outside of the dataset.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Pair]:
        """The pairs of several windows by one read; a DataLoader asks for a batch with it."""
        starts = np.array([self._checked(index) for index in indices], np.int64) * self.stride
        inputs, targets = self._windows(starts)
        return list(zip(inputs.clone().unbind(), targets.clone().unbind(), strict=True))

    def _checked(self, index: int) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"window {number} was asked for, but there are {len(self)}")
        return number % len(self)

    def _windows(self, starts: Array) -> Pair:
        if hasattr(self.store, "get_windows"):
            inputs, targets = self.store.get_windows(starts, self.seq_len)
            return inputs, targets
        rows = [self.store.read_tokens(int(start), self.seq_len + 1) for start in starts]
        windows = torch.from_numpy(np.array(rows).astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


def make_dataloader(
    dataset: SlidingWindowDataset,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    position: int = 0,
    shuffle: bool = True,
    epoch_seed: str = "mixed",
    num_workers: int = 0,
    drop_last: bool = True,
    **options: Any,
) -> DataLoader[Pair]:
    """A DataLoader of `dataset` whose batches are int64 `(batch_size, seq_len)` inputs and targets.

    The order is that of `SlidingWindowLoader` with the same seed and epoch (`shuffle` False: file order),
    for any `num_workers`, and each iteration over the loader is the same one. `position` windows of it are
    left out: after k batches of `batch_size`, `position=k*batch_size` continues the epoch. A new epoch is
    `loader.batch_sampler.start_epoch(epoch)` or a new loader. PyTorch's global random state is not touched.
    `options` go to `DataLoader`. Raises `UserError` where there is not even one batch.
    """
    sampler = WindowBatchSampler(
        len(dataset), batch_size, seed=seed, epoch=epoch, position=position, shuffle=shuffle,
        epoch_seed=epoch_seed, drop_last=drop_last,
    )  # fmt: skip
    if sampler.batches_per_epoch == 0:
        raise UserError(
            f"batch_size={batch_size} needs {batch_size if drop_last else 1} windows, but the dataset has "
            f"{len(dataset)}: windows of {dataset.seq_len + 1} tokens, every {dataset.stride}, of a stream "
            f"of {dataset.store.total_tokens} tokens. An epoch would have no batch. Use a smaller "
            "batch_size, seq_len or stride, or more text"
        )
    # A DataLoader draws the seed of its workers from here, else from PyTorch's global state.
    generator = torch.Generator().manual_seed(epoch_key(seed, epoch, epoch_seed, "workers") >> 1)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, generator=generator, **options)


class WindowBatchSampler(Sampler[list[int]]):
    """Lists of `batch_size` window numbers: one epoch's order from `position` on, as often as iterated."""

    def __init__(
        self,
        windows: int,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        position: int,
        shuffle: bool,
        epoch_seed: str,
        drop_last: bool,
    ) -> None:
        for name, value, low in (("batch_size", batch_size, 1), ("seed", seed, 0), ("position", position, 0)):
            if type(value) is not int or value < low:
                raise UserError(f"{name}={value!r} must be an integer of at least {low}")
        if epoch_seed not in EPOCH_SEEDS:
            raise UserError(f"epoch_seed={epoch_seed!r} must be one of {', '.join(EPOCH_SEEDS)}")
        if position > windows:
            raise UserError(
                f"position={position} lies beyond the end of the epoch: the dataset has {windows} windows. "
                "Use the dataset, seq_len and stride with which the position was saved"
            )
        self.windows = windows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch_seed = epoch_seed
        self.drop_last = drop_last
        self.start_epoch(epoch)
        self.position = position

    @property
    def batches_per_epoch(self) -> int:
        """Batches from position 0 on."""
        return self._batches(self.windows)

    def start_epoch(self, epoch: int) -> None:
        """To position 0 of `epoch`, from the next iteration on."""
        check_epoch(epoch)
        self.epoch = epoch
        self.position = 0

    def __len__(self) -> int:
        return self._batches(self.windows - self.position)

    def __iter__(self) -> Iterator[list[int]]:
        key = epoch_key(self.seed, self.epoch, self.epoch_seed, SlidingWindowLoader.strategy)
        order = Permutation(self.windows, key) if self.shuffle else None
        end = self.position + min(len(self) * self.batch_size, self.windows - self.position)
        block = max(1, _BLOCK // self.batch_size) * self.batch_size
        for start in range(self.position, end, block):
            count = min(block, end - start)
            numbers = (order.take(start, count) if order else np.arange(start, start + count)).tolist()
            for first in range(0, count, self.batch_size):
                yield numbers[first : first + self.batch_size]

    def _batches(self, windows: int) -> int:
        return windows // self.batch_size if self.drop_last else -(-windows // self.batch_size)


class _Ids:
    """Ids in memory as a corpus."""

    def __init__(self, ids: Any) -> None:
        if isinstance(ids, torch.Tensor):
            ids = ids.numpy(force=True)
        self._ids = ids if isinstance(ids, np.ndarray) else _smallest_array(ids)
        if self._ids.ndim != 1 or self._ids.dtype.kind not in "iu" or not len(self._ids):
            raise UserError(
                f"token ids must be one row of at least one integer, not {self._ids.dtype} of shape "
                f"{self._ids.shape}"
            )
        if self._ids.dtype.kind == "i" and self._ids.min() < 0:
            raise UserError(f"token ids count from 0, but {self._ids.min()} is among them")
        self.total_tokens = len(self._ids)

    def read_tokens(self, start: int, count: int) -> Array:
        """The tokens `[start, start+count)` as a view."""
        return self._ids[start : start + count]


def _smallest_array(ids: Sequence[int]) -> Array:
    """A list of ids as an array, by blocks, so that it takes no 8 bytes an id on the way."""
    blocks: list[Array] = [np.empty(0, np.uint8)]
    for start in range(0, len(ids), _BLOCK):
        try:
            block = np.asarray(ids[start : start + _BLOCK])
        except ValueError as error:
            raise UserError(f"token ids must be one row of integers: {error}") from error
        if block.ndim != 1 or block.dtype.kind not in "iu":
            return block  # to be refused
        blocks.append(block if block.min() < 0 else block.astype(np.min_scalar_type(block.max())))
    return np.concatenate(blocks)
