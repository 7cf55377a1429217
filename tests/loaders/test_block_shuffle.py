"""Rows shuffled inside windows: which there are, what is read and kept, and the contract of every loader."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import tempfile
import threading
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config_groups import BlockShuffleConfig
from harness.errors import UserError
from harness.loaders import BlockShuffleLoader, make_loader, stream_window
from harness.storage import TokenStore, open_store
from harness.storage.manifest import write_manifest
from tests.helpers_sets import write_set
from tests.loaders.loader_contract import batches, check_processes_agree, check_sampled_loader

WIDE: dict[str, Any] = {"format_version": 3, "tokenizer": {"vocab_size": 70_000}}


def _store(directory: Path | str, shards: list[int] | None = None, **storage: Any) -> TokenStore:
    """A stream 0, 1, 2, ... cut into shards, so that a row's first token is its start."""
    streams, done = [], 0
    for tokens in shards or [7, 0, 1, 53]:
        streams.append(list(range(done, done + tokens)))
        done += tokens
    storage = {"dtype": "uint32", **storage}
    return open_store(write_set(directory, {"train": streams}, storage=storage, **WIDE), "train")


def _starts(loader: BlockShuffleLoader) -> list[int]:
    """The rows' starts in the order of what is left of the epoch."""
    return [start for batch in batches(loader) for start in batch.inputs[:, 0].tolist()]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_window, "BLOCK_TOKENS", 5)


@pytest.mark.parametrize("window_tokens", [3, 13, 24, 1000])
@pytest.mark.usefixtures("small_blocks")
def test_the_contract_of_a_loader_holds(tmp_path: Path, window_tokens: int) -> None:
    check_sampled_loader(partial(BlockShuffleLoader, _store(tmp_path), 4, 3, window_tokens=window_tokens))


@pytest.mark.usefixtures("small_blocks")
def test_forked_spawned_and_simultaneous_processes_read_the_same(tmp_path: Path) -> None:
    check_processes_agree([partial(BlockShuffleLoader, _store(tmp_path), 4, 3, window_tokens=13)])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seq_len=st.integers(1, 9),
    window_tokens=st.integers(1, 60),
    block=st.integers(1, 20),
    epoch=st.integers(0, 2),
)
def test_each_row_once_an_epoch_window_after_window(
    tokens: list[int], seq_len: int, window_tokens: int, block: int, epoch: int
) -> None:
    """Against the definition: whole windows in file order, inside of each all rows, and nothing else."""
    total = sum(tokens)
    window_tokens = max(window_tokens, seq_len)
    rows = [start for start in range(0, total, seq_len) if start + seq_len < total]
    if not rows:
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_window, "BLOCK_TOKENS", block)
        loader = BlockShuffleLoader(_store(folder, tokens), 1, seq_len, window_tokens=window_tokens)
        assert loader.batches_per_epoch == loader.samples == len(rows)
        assert loader.dropped_tokens == total - 1 - len(rows) * seq_len
        loader.start_epoch(epoch)
        found = []
        for batch in batches(loader):
            start = int(batch.inputs[0, 0])
            assert batch.inputs.tolist() == [list(range(start, start + seq_len))]
            assert batch.targets.tolist() == [list(range(start + 1, start + seq_len + 1))]
            found.append(start)
    step = window_tokens // seq_len
    for first in range(0, len(rows), step):
        assert sorted(found[first : first + step]) == rows[first : first + step]


def test_epochs_seeds_and_windows_have_orders_of_their_own(tmp_path: Path) -> None:
    store = _store(tmp_path, [257])

    def order(seed: int, epoch: int, epoch_seed: str = "mixed") -> list[int]:
        loader = BlockShuffleLoader(store, 1, 2, window_tokens=64, seed=seed, epoch_seed=epoch_seed)
        loader.start_epoch(epoch)
        return _starts(loader)

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 1, "additive") == order(1, 0, "additive") != order(0, 0, "additive")
    windows = np.array(order(0, 0)).reshape(4, 32) - 64 * np.arange(4)[:, None]
    assert len({tuple(window) for window in windows.tolist()}) == 4


def test_the_order_of_rows_is_frozen(tmp_path: Path) -> None:
    """If this fails, checkpoints no longer continue: raise the format_version of sampled loaders."""
    store = _store(tmp_path)
    loader = BlockShuffleLoader(store, 4, 3, window_tokens=25, seed=1)
    loader.start_epoch(2)
    assert _starts(loader) == [3, 21, 0, 12, 6, 15, 9, 18, 45, 36, 27, 24, 33, 42, 30, 39, 57, 48, 51, 54]
    assert loader.state_dict() == {
        "format_version": 1,
        "strategy": "block_shuffle",
        "epoch": 2,
        "position": 20,
        "seed": 1,
        "epoch_seed": "mixed",
        "batch_size": 4,
        "seq_len": 3,
        "split": "train",
        "metadata_sha256": store.metadata_sha256,
        "window_tokens": 25,
    }


class _Recorded:
    """What a store reads, in the order of the starts."""

    def __init__(self, store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[int, int]] = []
        inner = store.read_into

        def read_into(start: int, out: np.ndarray[Any, Any]) -> None:
            self.read.append((start, len(out)))
            inner(start, out)

        monkeypatch.setattr(store, "read_into", read_into)

    def take(self) -> list[tuple[int, int]]:
        taken, self.read = sorted(self.read), []
        return taken


def test_only_blocks_that_are_touched_are_read_and_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_window, "BLOCK_TOKENS", 10)
    store = _store(tmp_path, [161])
    recorded = _Recorded(store, monkeypatch)
    loader = BlockShuffleLoader(store, 2, 4, window_tokens=81)  # 20 rows a window; 2 windows and no rest
    done: set[int] = set()
    for step in range(10):
        batch = loader.next_batch()
        needed = {position // 10 for start in batch.inputs[:, 0].tolist() for position in (start, start + 4)}
        expected = [(10 * block, min(10, 81 - 10 * block)) for block in sorted(needed - done)]
        assert recorded.take() == expected, step
        done |= needed
    assert done == set(range(9))
    rest = list(batches(loader))
    assert recorded.take() == [(80 + 10 * block, 10 if block < 8 else 1) for block in range(9)]
    resumed = BlockShuffleLoader(store, 2, 4, window_tokens=81)
    resumed.load_state_dict(rest[-2].cursor)
    last = resumed.next_batch()
    assert last.inputs.tolist() == rest[-1].inputs.tolist()
    assert len(recorded.take()) <= 4


def test_an_interrupted_read_writes_nothing_into_the_next_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_window, "FIRST_SECONDS", -1.0)  # every storage is slow
    monkeypatch.setattr(stream_window, "_READ_TOKENS", 4)  # several readers
    store = _store(tmp_path, [21])
    begun, inner = threading.Event(), store.read_into

    def read_into(start: int, out: np.ndarray[Any, Any]) -> None:
        if not begun.is_set():
            begun.set()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the first window's read goes on
        inner(start, out)

    monkeypatch.setattr(store, "read_into", read_into)
    loader = BlockShuffleLoader(store, 2, 5, window_tokens=10)
    with pytest.raises(KeyboardInterrupt):
        loader.next_batch()
    loader.load_state_dict(loader.state_dict() | {"position": 2})
    first = loader.next_batch().inputs.tolist()
    time.sleep(0.15)
    loader.load_state_dict(loader.state_dict() | {"position": 2})
    assert sorted(first) == sorted(loader.next_batch().inputs.tolist())
    assert sorted(row[0] for row in first) == [10, 15]


def test_a_set_of_one_window_is_read_once_for_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path, [61])
    recorded = _Recorded(store, monkeypatch)
    loader = BlockShuffleLoader(store, 4, 3)
    for epoch in range(3):
        loader.start_epoch(epoch)
        list(batches(loader))
    assert recorded.take() == [(0, 61)]


def test_memory_is_that_of_the_split_where_it_is_smaller_than_a_window(tmp_path: Path) -> None:
    store = _store(tmp_path, [70_000])
    tracemalloc.start()
    try:
        loader = BlockShuffleLoader(store, 4, 3)
        loader.next_batch()
        assert 280_000 <= tracemalloc.get_traced_memory()[0] < 400_000
    finally:
        tracemalloc.stop()
    assert len(pickle.dumps(loader)) < 50_000, "the window does not travel"
    assert _starts(pickle.loads(pickle.dumps(loader))) == _starts(loader)


def test_a_window_that_memory_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    tokens = 1 << 28
    raw = json.loads((write_set(tmp_path, {"train": [[1, 2, 3]]}) / "metadata.json").read_text())
    raw["splits"]["train"] |= {
        "total_tokens": tokens,
        "shards": [{"file": "train_00000.npy", "tokens": tokens}],
    }
    with open(tmp_path / "train_00000.npy", "wb") as file:
        header = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 2 * tokens)
    write_manifest(tmp_path, raw)
    store = open_store(tmp_path, "train")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 27), limits[1]))
    try:
        BlockShuffleLoader(store, 4, 3)
        with pytest.raises(
            UserError, match=r"268435456 tokens needs 536870912 bytes .* loader.window_tokens"
        ):
            BlockShuffleLoader(store, 4, 3, window_tokens=tokens)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
@pytest.mark.usefixtures("small_blocks")
def test_hdf5_sets_give_the_batches_of_npy_sets(tmp_path: Path, compression: str) -> None:
    hdf5 = _store(tmp_path / "hdf5", format="hdf5", chunk_tokens=8, compression=compression)
    stores = [_store(tmp_path / "npy"), hdf5]
    epochs = [_starts(BlockShuffleLoader(store, 4, 3, window_tokens=13)) for store in stores]
    assert epochs[0] == epochs[1]


def test_a_token_that_is_no_id_is_refused_by_shard_and_position(tmp_path: Path) -> None:
    folder = write_set(tmp_path, {"train": [[1, 2, 3], [4, 100, 5, 6]]}, tokenizer={"vocab_size": 100})
    loader = BlockShuffleLoader(open_store(folder, "train"), 3, 2, window_tokens=4)
    for _ in range(2):
        with pytest.raises(UserError, match=r"train_00001.npy holds token id 100 at position 4 of train"):
            loader.next_batch()
        assert loader.position == 0


def test_a_shard_cut_short_is_an_error_that_moves_nothing(tmp_path: Path) -> None:
    folder = write_set(tmp_path, {"train": [list(range(30)), list(range(31))]})
    loader = BlockShuffleLoader(open_store(folder, "train", mmap=False), 20, 3)
    path = folder / "train_00001.npy"
    path.write_bytes(path.read_bytes()[:-2])
    for _ in range(2):
        with pytest.raises(UserError, match=r"train_00001.npy is not the file that was checked"):
            loader.next_batch()
        assert loader.position == 0


@pytest.mark.parametrize("window_tokens", [2, 0, -1, 3.0, True, None])
def test_a_window_that_holds_no_row_is_refused(tmp_path: Path, window_tokens: Any) -> None:
    with pytest.raises(
        UserError, match=r"window_tokens=.* at least loader.seq_len=3.*default is .*134217728"
    ):
        BlockShuffleLoader(_store(tmp_path), 4, 3, window_tokens=window_tokens)


def test_a_split_too_small_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loader.seq_len=61 needs 62 tokens, but train has 61"):
        BlockShuffleLoader(_store(tmp_path), 1, 61)
    with pytest.raises(UserError, match=r"loader.batch_size=21 needs 21 rows, but train has 20"):
        BlockShuffleLoader(_store(tmp_path), 21, 3)


def test_the_configuration_makes_it(tmp_path: Path) -> None:
    config = BlockShuffleConfig(
        seq_len=3, batch_size=4, seed=5, epoch_seed="additive", window_tokens=13, mask_boundary="target"
    )
    folder = write_set(tmp_path, {"train": [list(range(61))]}, tokenizer={"boundary_token_id": 7})
    with make_loader(config, open_store(folder, "train")) as loader:
        state = loader.state_dict()
        names = ("strategy", "seed", "epoch_seed", "window_tokens", "seq_len", "batch_size")
        assert [state[name] for name in names] == ["block_shuffle", 5, "additive", 13, 3, 4]
        targets = [target for batch in batches(loader) for target in batch.targets.flatten().tolist()]
        assert sorted(targets) == [-100, *(token for token in range(1, 61) if token != 7)]
