"""Batches begun ahead on slow storage: only what is read next, each once, and never another batch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.loaders import (
    BlockShuffleLoader,
    ContrastivePaddedDataset,
    PaddedDataset,
    SlidingWindowLoader,
    TokenDataLoader,
    stream_window,
)
from harness.loaders.slow_storage import SlowStorage, Way
from harness.storage import PairStore, RowStore, ShardedTokenDataset, TokenStore, open_store
from tests.helpers_sets import random_rows, write_rows, write_set
from tests.loaders.loader_contract import batches, check_sampled_loader

TOKENS = {"train": [list(range(70)), list(range(70, 200))]}


WAYS = pytest.mark.parametrize("way", [Way.HINTS, Way.READERS], ids=lambda way: way.name.lower())


def _always(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is read in this way."""
    monkeypatch.setattr(SlowStorage, "note_first", lambda storage, *_: storage._enter(way))
    monkeypatch.setattr(SlowStorage, "note", lambda *_: None)


class RecordingStore(ShardedTokenDataset):
    """Notes which windows are asked for ahead, and which are read by themselves, as readers do."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "train")
        self.asked: list[int] = []

    def positional(self) -> TokenStore:
        return self

    def prefetch(self, starts: Any, length: int) -> None:
        self.asked += starts.tolist()
        super().prefetch(starts, length)

    def read_into(self, start: int, out: Any) -> None:
        self.asked.append(start)
        super().read_into(start, out)


@WAYS
@pytest.mark.parametrize("sampling", ["permutation", "ordered", "uniform"])
def test_every_window_is_begun_once_and_at_most_eight_batches_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, sampling: str
) -> None:
    _always(way, monkeypatch)
    store = RecordingStore(write_set(tmp_path, TOKENS))
    loader = SlidingWindowLoader(store, 4, 5, stride=None, sampling=sampling, rank=1, world_size=2)
    read: list[int] = []
    for batch in batches(loader):
        read += batch.inputs[:, 0].tolist()
        batches_read = len(read) // 2
        # The first two samples of all are probes; then two more batches for each one that is handed out.
        begun = 2 + 2 * min(1 + 2 * batches_read, batches_read + 8, loader.batches_per_epoch)
        if way is Way.HINTS:
            assert len(store.asked) == begun
    loader.start_epoch(1)  # waits for nothing, and nothing is left
    assert sorted(store.asked) == sorted([*read[:2], *read])
    if way is Way.HINTS:
        assert store.asked == [*read[:2], *read]


def _windows(tmp_path: Path, storage: dict[str, Any]) -> Callable[..., Any]:
    store = open_store(write_set(tmp_path, TOKENS, storage=storage), "train")
    return partial(SlidingWindowLoader, store, 4, 5)


def _rows(tmp_path: Path, storage: dict[str, Any]) -> Callable[..., Any]:
    shards = [random_rows(9, 6, seed=1), random_rows(8, 6, seed=2)]
    return partial(
        PaddedDataset, RowStore(write_rows(tmp_path, {"train": shards}, storage=storage), "train"), 4, 3
    )


def _pairs(tmp_path: Path, storage: dict[str, Any]) -> Callable[..., Any]:
    sides = {"train.pos": [random_rows(17, 6, seed=1)], "train.neg": [random_rows(17, 3, seed=2)]}
    write_rows(tmp_path, sides, storage=storage)
    return partial(ContrastivePaddedDataset, PairStore(*(RowStore(tmp_path, name) for name in sides)), 4, 3)


KINDS = {"windows": _windows, "rows": _rows, "pairs": _pairs}
STORAGES = [{"format": "npy"}, {"format": "hdf5", "compression": "gzip"}]


@WAYS
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_looking_ahead_changes_no_batch_and_no_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, kind: str, storage: dict[str, Any]
) -> None:
    make = KINDS[kind](tmp_path, storage)
    direct = list(batches(make()))
    _always(way, monkeypatch)
    ahead = list(batches(make()))
    assert [batch.cursor for batch in ahead] == [batch.cursor for batch in direct]
    for ours, right in zip(ahead, direct, strict=True):
        assert ours.inputs.equal(right.inputs)
        assert ours.targets.equal(right.targets)
    check_sampled_loader(make, ranks=(1, 2), parts=2 if kind == "pairs" else 1)


@WAYS
def test_what_was_begun_before_a_fork_is_read_anew_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """The parent's reads are nobody's in the child, and must not be waited for; the parent goes on."""
    _always(way, monkeypatch)
    loaders = [KINDS[kind](tmp_path / kind, {"format": "npy"})() for kind in KINDS]
    for loader in loaders:
        loader.next_batch()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        signal.alarm(20)
        theirs.send(_rest(loaders))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    in_child = ours.recv()
    process.join(20)
    assert process.exitcode == 0
    assert in_child == _rest(loaders)
    copies = [pickle.loads(pickle.dumps(loader)) for loader in loaders]
    for copied in copies:
        copied.reset()
        copied.next_batch()
    assert _rest(copies) == in_child


def _rest(loaders: list[Any]) -> list[list[bytes]]:
    return [[batch.inputs.numpy().tobytes() for batch in batches(loader)] for loader in loaders]


@WAYS
@pytest.mark.parametrize("kind", ["windows", "rows"])
def test_a_file_cut_short_is_an_error_at_its_batch_although_the_set_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, kind: str
) -> None:
    """On slow storage nothing is touched through a mapping; batches before the bad one are handed out."""
    _always(way, monkeypatch)
    loader: Any
    if kind == "windows":
        loader = SlidingWindowLoader(open_store(write_set(tmp_path, TOKENS), "train"), 2, 5)
    else:
        shards = [random_rows(20, 6, seed=1), random_rows(20, 6, seed=2)]
        loader = PaddedDataset(RowStore(write_rows(tmp_path, {"train": shards}), "train"), 2, 3)
    whole = [batch.inputs for batch in batches(loader)]
    loader.reset()
    got = [loader.next_batch().inputs]
    victim = tmp_path / "train_00001.npy"
    os.truncate(victim, 150)
    with pytest.raises(UserError, match=rf"{victim} is \d+ bytes long, but its tokens reach to byte \d+"):
        got.extend(batch.inputs for batch in batches(loader))
    assert len(got) < len(whole) - 1
    assert all(ours.equal(right) for ours, right in zip(got, whole, strict=False))
    position = loader.position
    with pytest.raises(UserError, match="was cut short"):
        loader.next_batch()
    assert loader.position == position == 2 * len(got)


@WAYS
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_stream_in_file_order_is_read_ahead_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, storage: dict[str, Any]
) -> None:
    store = open_store(write_set(tmp_path, TOKENS, storage=storage), "train")
    direct = list(batches(TokenDataLoader(store, 4, 3)))
    _always(way, monkeypatch)
    for rank in range(2):
        loader = TokenDataLoader(store, 4, 3, rank=rank, world_size=2)
        assert len(direct) == 16
        for ours, right in zip(batches(loader), direct, strict=True):
            assert ours.cursor == right.cursor
            assert ours.inputs.equal(right.inputs[2 * rank : 2 * rank + 2])
            assert ours.targets.equal(right.targets[2 * rank : 2 * rank + 2])
        loader.load_state_dict(direct[4].cursor)
        assert loader.next_batch().targets.equal(direct[5].targets[2 * rank : 2 * rank + 2])
        loader.reset()
        assert loader.next_batch().inputs.equal(direct[0].inputs[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_windows_of_slow_storage_are_read_as_a_whole_beside_their_first_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: dict[str, Any]
) -> None:
    for name, tokens in (("BLOCK_TOKENS", 7), ("_READ_TOKENS", 3), ("_HINT_TOKENS", 2)):
        monkeypatch.setattr(stream_window, name, tokens)
    monkeypatch.setattr(stream_window.StreamWindow, "_is_slow", lambda *_: True)
    store = open_store(write_set(tmp_path, TOKENS, storage=storage), "train")
    check_sampled_loader(partial(BlockShuffleLoader, store, 4, 5, window_tokens=60), ranks=(1, 2))


def test_a_window_of_slow_storage_that_cannot_be_read_is_an_error_at_its_batch_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_window.StreamWindow, "_is_slow", lambda *_: True)
    loader = BlockShuffleLoader(open_store(write_set(tmp_path, TOKENS), "train"), 4, 5, window_tokens=60)
    whole = [batch.inputs for batch in batches(loader)]
    loader.reset()
    os.truncate(tmp_path / "train_00001.npy", 160)
    got: list[Any] = []
    with pytest.raises(UserError, match=r"train_00001.npy is 160 bytes long, but its tokens reach to byte"):
        got.extend(batch.inputs for batch in batches(loader))
    assert 0 < len(got) < len(whole)
    assert all(ours.equal(right) for ours, right in zip(got, whole, strict=False))
    with pytest.raises(UserError, match="was cut short"):
        loader.next_batch()
    assert loader.position == 4 * len(got)
