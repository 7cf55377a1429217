"""The ways of reading tokens that scripts/bench_peers.py compares, a small module for each library.

A module has readers, classes derived from `Reader`, and where its files are its own a function
`write(tokens, folder)`. It imports its library at the top, and only the process that measures it imports it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

BATCH_SIZE, SEQ_LEN = 32, 1024
BATCH_TOKENS = BATCH_SIZE * SEQ_LEN
SEED = 1
TOKENS_FILE = "train.bin"  # the tokens as plain uint16

Pair = tuple[torch.Tensor, torch.Tensor]
Item = TypeVar("Item")


class Reader:
    """Batches of int64 inputs and targets (32, 1024) without end: epoch after epoch, in order or shuffled.

    A reader is made with the folder of its files, `shuffle`, and options of its own.
    """

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        raise NotImplementedError

    def next_batch(self) -> Pair:
        raise NotImplementedError

    def state(self) -> bytes | None:
        """What a checkpoint has to hold to go on behind the last batch; None where nothing would help."""
        return None

    def state_after(self, batches: int) -> bytes | None:
        """The same behind so many batches of an epoch, where it can be told without reading them."""
        return None

    def seek(self, state: bytes) -> None:
        """Go on behind the batch after which `state` was taken, here or in another process."""
        raise NotImplementedError

    def close(self) -> None:
        """End what runs beside it."""


class Pieces:
    """Where the batches of an epoch lie if none crosses the border of two pieces of the tokens."""

    def __init__(self, lengths: Iterable[int]) -> None:
        batches = ((length - 1) // BATCH_TOKENS for length in lengths)
        self._firsts = [0, *itertools.accumulate(batches)]

    def __getitem__(self, batch: int) -> tuple[int, int]:
        """The piece, and the batch's first token in it; one epoch follows another."""
        batch %= self._firsts[-1]
        piece = bisect_right(self._firsts, batch) - 1
        return piece, (batch - self._firsts[piece]) * BATCH_TOKENS


def endless(batches: Iterable[Item]) -> Iterator[Item]:
    """Epoch after epoch of what can be iterated anew."""
    return itertools.chain.from_iterable(itertools.repeat(batches))


def in_a_row(tokens: np.ndarray) -> Pair:
    """Inputs and targets as views of a batch's tokens and the one behind them, cast to int64 at once."""
    cast = torch.from_numpy(tokens.astype(np.int64))
    return cast[:-1].view(BATCH_SIZE, SEQ_LEN), cast[1:].view(BATCH_SIZE, SEQ_LEN)


def shifted(windows: torch.Tensor) -> Pair:
    """Inputs and targets as views of windows of 1025 tokens, made int64 at once."""
    windows = windows.long()
    return windows[:, :-1], windows[:, 1:]
