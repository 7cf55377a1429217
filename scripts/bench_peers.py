"""What the loader benchmark compares with: RAM, and three usual ways of reading tokens in training scripts.

Every way is a context manager that gives a function for the next batch, int64 inputs and targets. The peers
read windows that lie in one shard, which costs them nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from harness.storage.manifest import load_manifest

NextBatch = Callable[[], Any]
Way = Callable[[], AbstractContextManager[NextBatch]]
Pair = tuple[torch.Tensor, torch.Tensor]


def ram_copy(tokens: np.ndarray, batch_size: int, seq_len: int) -> Way:
    """The sequential floor: batch after batch of an array, copied into one int64 array."""
    size = batch_size * seq_len
    out = np.empty(size, np.int64)
    starts = range(0, len(tokens) - size + 1, size)

    @contextmanager
    def way() -> Iterator[NextBatch]:
        order = _endless(starts)

        def next_batch() -> None:
            start = next(order)
            np.copyto(out, tokens[start : start + size])

        yield next_batch

    return way


def ram_gather(tokens: np.ndarray, batch_size: int, seq_len: int) -> Way:
    """The random floor: windows of an array, gathered at once, copied into one int64 array."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)
    out = np.empty((batch_size, seq_len + 1), np.int64)
    starts = np.random.default_rng(1).integers(0, len(windows), (1000, batch_size))

    @contextmanager
    def way() -> Iterator[NextBatch]:
        order = _endless(starts)
        yield lambda: np.copyto(out, windows[next(order)])

    return way


def _endless(items: Any) -> Iterator[Any]:
    while True:
        yield from items


def h5py_slices(directory: Path, batch_size: int, seq_len: int, *, shuffle: bool) -> Way:
    """`dataset[a:b]` of files that stay open: one slice a batch, or one a window at random places."""

    @contextmanager
    def way() -> Iterator[NextBatch]:
        import h5py

        rng = np.random.default_rng(2)
        paths = [directory / shard.file for shard in load_manifest(directory).splits["train"].shards]
        files = [h5py.File(path, "r") for path in paths]
        sets = [file["tokens"] for file in files]
        size = batch_size * seq_len
        in_order = _endless([(s, at) for s in sets for at in range(0, len(s) - size, size)])

        def sequential() -> Pair:
            dataset, at = next(in_order)
            tokens = torch.from_numpy(dataset[at : at + size + 1].astype(np.int64))
            return tokens[:-1].view(batch_size, seq_len), tokens[1:].view(batch_size, seq_len)

        def window() -> np.ndarray:
            dataset = sets[rng.integers(len(sets))]
            at = rng.integers(len(dataset) - seq_len)
            return dataset[at : at + seq_len + 1]

        def random() -> Pair:
            tokens = torch.from_numpy(np.stack([window() for _ in range(batch_size)]).astype(np.int64))
            return tokens[:, :-1], tokens[:, 1:]

        yield random if shuffle else sequential
        for file in files:
            file.close()

    return way


class MemmapWindows(Dataset[Pair]):
    """The windows of a set of npy shards, one at a time, as most training scripts have them."""

    def __init__(self, directory: Path, seq_len: int) -> None:
        self.seq_len = seq_len
        manifest = load_manifest(directory)
        shards = [directory / shard.file for shard in manifest.splits["train"].shards]
        self.shards = [np.load(path, mmap_mode="r") for path in shards]
        self.firsts = [0, *accumulate((len(shard) - 1) // seq_len for shard in self.shards)]

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, index: int) -> Pair:
        shard = bisect_right(self.firsts, index) - 1
        start = (index - self.firsts[shard]) * self.seq_len
        window = self.shards[shard][start : start + self.seq_len + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def torch_dataloader(directory: Path, batch_size: int, seq_len: int, *, shuffle: bool, workers: int) -> Way:
    """`torch.utils.data.DataLoader` over memory-mapped shards."""

    @contextmanager
    def way() -> Iterator[NextBatch]:
        loader = DataLoader(
            MemmapWindows(directory, seq_len),
            batch_size,
            shuffle=shuffle,
            num_workers=workers,
            drop_last=True,
        )
        batches = _endless(loader)
        yield lambda: next(batches)
        batches.close()  # type: ignore[attr-defined]

    return way


def nanogpt(file: Path, batch_size: int, seq_len: int) -> Way:
    """nanoGPT's way: a new memory map for each batch, random starts, one tensor a row, stacked.

    https://github.com/karpathy/nanoGPT, `get_batch` in train.py; one file of plain uint16 tokens.
    """

    def get_batch() -> Pair:
        data = np.memmap(file, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - seq_len, (batch_size,))
        rows = [data[start : start + seq_len] for start in starts]
        shifted = [data[start + 1 : start + 1 + seq_len] for start in starts]
        return _stack(rows), _stack(shifted)

    @contextmanager
    def way() -> Iterator[NextBatch]:
        yield get_batch

    return way


def _stack(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(row.astype(np.int64)) for row in rows])
