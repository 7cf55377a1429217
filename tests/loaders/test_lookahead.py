"""Hints to slow storage: only when reads wait, only for what is read next, and never another batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.loaders import ContrastivePaddedDataset, PaddedDataset, SlidingWindowLoader, lookahead
from harness.loaders.lookahead import SlowStorage
from harness.storage import PairStore, RowStore, ShardedTokenDataset
from tests.helpers_sets import random_rows, write_rows, write_set
from tests.loaders.loader_contract import batches, check_sampled_loader

FAST, SLOW = 100e-6, 160e-3


class RecordingStore(ShardedTokenDataset):
    """Notes which windows are asked for ahead."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "train")
        self.asked: list[int] = []

    def prefetch(self, starts: Any, length: int) -> None:
        self.asked += starts.tolist()
        super().prefetch(starts, length)


def _store(directory: Path) -> RecordingStore:
    return RecordingStore(write_set(directory, {"train": [list(range(70)), list(range(70, 200))]}))


@pytest.fixture
def every_read_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "_CALL_SECONDS", -1.0)


def _hinted(storage: SlowStorage, seconds: float, reads: int) -> int:
    return sum(storage.wants_hints(seconds, 1000) for _ in range(reads))


def test_reads_from_memory_never_ask_for_hints_however_busy_the_machine() -> None:
    storage = SlowStorage()
    assert _hinted(storage, FAST, 1000) == 0
    for _ in range(50):
        assert _hinted(storage, SLOW, 2) + _hinted(storage, FAST, 1) == 0
    assert not SlowStorage().wants_hints(3 * SLOW, 10**8)  # many tokens may take long


def test_reads_that_wait_ask_for_hints_longer_each_time() -> None:
    storage = SlowStorage()
    for stretch in (64, 128, 256, 512, 1024, 2048, 4096, 4096):
        assert _hinted(storage, SLOW, 3) == 1
        assert _hinted(storage, FAST, stretch) == stretch - 1
    assert _hinted(storage, FAST, 64) == 0  # it is fast by itself again
    assert _hinted(storage, SLOW, 3) == 1
    assert _hinted(storage, FAST, 1000) == 63


@pytest.mark.usefixtures("every_read_is_slow")
@pytest.mark.parametrize("sampling", ["permutation", "ordered", "uniform"])
def test_every_window_is_asked_for_once_before_it_is_read(tmp_path: Path, sampling: str) -> None:
    store = _store(tmp_path)
    loader = SlidingWindowLoader(store, 4, 5, stride=None, sampling=sampling, rank=1, world_size=2)
    read: list[int] = []
    for batch in batches(loader):
        read += batch.inputs[:, 0].tolist()
        if len(read) > 6:  # the first three batches teach that the storage is slow
            assert batch.inputs[:, 0].tolist() == store.asked[len(read) - 8 : len(read) - 6]
        assert len(store.asked) <= len(read) - 6 + 2 * 8 or len(read) < 6
    assert store.asked == read[6:]
    loader.start_epoch(1)
    loader.next_batch()
    assert len(store.asked) > len(read) - 6


@pytest.mark.usefixtures("every_read_is_slow")
@pytest.mark.parametrize("sampling", ["permutation", "uniform"])
def test_hints_change_no_batch_and_no_cursor(tmp_path: Path, sampling: str) -> None:
    store = _store(tmp_path)
    check_sampled_loader(partial(SlidingWindowLoader, store, 4, 5, sampling=sampling))
    assert store.asked


class RecordingRows(RowStore):
    """Notes which rows are asked for ahead."""

    def __init__(self, directory: Path, split: str) -> None:
        super().__init__(directory, split)
        self.asked: list[int] = []

    def prefetch(self, row_ids: Any, width: int) -> None:
        self.asked += row_ids.tolist()
        super().prefetch(row_ids, width)


@pytest.mark.usefixtures("every_read_is_slow")
@pytest.mark.parametrize("storage", [{"format": "npy"}, {"format": "hdf5", "compression": "gzip"}], ids=str)
def test_rows_are_asked_for_before_they_are_read(tmp_path: Path, storage: dict[str, Any]) -> None:
    shards = [random_rows(9, 6, seed=1), random_rows(7, 6, seed=2)]
    store = RecordingRows(write_rows(tmp_path, {"train": shards}, storage=storage), "train")
    make = partial(PaddedDataset, store, 2, 3)
    assert len(list(batches(make()))) == 8
    assert len(store.asked) == len(set(store.asked)) == 16 - 2 * 3
    check_sampled_loader(make, ranks=(1, 2))


@pytest.mark.usefixtures("every_read_is_slow")
def test_pairs_are_asked_for_on_both_sides(tmp_path: Path) -> None:
    sides = {"train.pos": [random_rows(16, 6, seed=1)], "train.neg": [random_rows(16, 3, seed=2)]}
    write_rows(tmp_path, sides)
    pos, neg = (RecordingRows(tmp_path, name) for name in sides)
    assert len(list(batches(ContrastivePaddedDataset(PairStore(pos, neg), 2, 3)))) == 8
    assert len(set(pos.asked)) == 10
    assert pos.asked == neg.asked
