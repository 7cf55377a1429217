"""The ways of reading tokens that scripts/bench_peers.py compares, a small module for each library.

A module has readers, classes derived from `Reader`, and where its files are its own a function
`write(tokens, folder)`. It imports its library at the top, and only the process that measures it imports it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

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


def endless(batches: Iterable[Item]) -> Iterator[Item]:
    """Epoch after epoch of what can be iterated anew."""
    return itertools.chain.from_iterable(itertools.repeat(batches))


def shifted(windows: torch.Tensor) -> Pair:
    """Inputs and targets as views of windows of 1025 tokens, made int64 at once."""
    windows = windows.long()
    return windows[:, :-1], windows[:, 1:]
