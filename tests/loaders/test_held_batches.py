"""A batch that was handed out is never changed, whatever part of it is still held, and by whom."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.auditing.data_chain import DataChain, batch_digest, link
from harness.loaders import Batch, Prefetcher, SlidingWindowLoader, TokenDataLoader
from harness.storage import TokenStore, open_store
from tests.helpers_sets import write_set

# What a user may keep of a batch, while everything else of it is let go of.
PARTS: list[Callable[[Batch], Any]] = [
    lambda batch: batch.inputs[1, 2:],
    lambda batch: batch.targets.T,
    lambda batch: batch.inputs.numpy(),
    lambda batch: batch.targets.detach().numpy()[::2, 1:],
    lambda batch: batch.inputs.numpy().data,
    lambda batch: batch.targets.unfold(1, 2, 1),
    lambda batch: torch.from_dlpack(batch.inputs),
    lambda batch: batch.inputs.untyped_storage(),
    lambda batch: [row.view(-1) for row in batch.targets],
]


def _bytes(part: Any) -> bytes:
    if isinstance(part, list):
        return b"".join(map(_bytes, part))
    if isinstance(part, torch.UntypedStorage):
        part = torch.empty(0, dtype=torch.uint8).set_(part)
    return part.numpy().tobytes() if isinstance(part, torch.Tensor) else bytes(part)


def _epochs(loader: Prefetcher, epochs: range) -> Iterator[Batch]:
    for epoch in epochs:
        loader.start_epoch(epoch)
        for _ in range(loader.batches_per_epoch):
            yield loader.next_batch()


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    tokens = np.random.default_rng(0).integers(0, 257, 5000).reshape(2, -1).tolist()
    return open_store(write_set(tmp_path, {"train": tokens}), "train")


@pytest.mark.parametrize("strategy", [TokenDataLoader, SlidingWindowLoader])
@pytest.mark.parametrize("depth", [0, 3])
def test_what_is_held_stays_as_it_was_handed_out(
    store: TokenStore, strategy: Callable[..., Any], depth: int
) -> None:
    held: list[tuple[Any, bytes]] = []

    def changed() -> int:
        return sum(_bytes(part) != then for part, then in held)

    with Prefetcher(strategy(store, 4, 32), depth) as loader:
        for number, batch in enumerate(_epochs(loader, range(4))):
            part = PARTS[number % len(PARTS)](batch)
            held.append((part, _bytes(part)))
            del batch
        child = os.fork()
        for _ in _epochs(loader, range(4, 6)):  # on both sides
            pass
        if not child:
            os._exit(changed())
    assert changed() == 0
    assert os.waitpid(child, 0)[1] == 0


def test_a_chain_that_hashes_late_hashes_what_was_handed_out(store: TokenStore) -> None:
    expected = bytes(32)
    for batch in _epochs(Prefetcher(SlidingWindowLoader(store, 4, 32), 0), range(5)):
        expected = link(expected, batch_digest(batch))
    with Prefetcher(SlidingWindowLoader(store, 4, 32), 3) as loader, DataChain(bytes(32).hex()) as chain:
        for batch in _epochs(loader, range(5)):
            chain.add(batch)
        assert chain.value() == expected.hex()
