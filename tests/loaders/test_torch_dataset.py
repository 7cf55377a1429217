"""Windows as PyTorch's Dataset and DataLoader: one order, seeded, resumable, with and without workers."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from harness.errors import UserError
from harness.loaders import SlidingWindowDataset, SlidingWindowLoader, make_dataloader
from harness.storage import TokenStore, open_store
from tests.helpers_sets import write_set
from tests.loaders.loader_contract import batches

IDS = list(range(100, 160))


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return open_store(write_set(tmp_path, {"train": [IDS[:7], [], IDS[7:]]}), "train")


def _rows(loader: DataLoader[Any]) -> list[list[list[int]]]:
    for inputs, targets in loader:
        assert torch.equal(inputs + 1, targets)
    return [inputs.tolist() for inputs, _ in loader]


def _starts(loader: DataLoader[Any]) -> list[int]:
    return [start for inputs, _ in loader for start in inputs[:, 0].tolist()]


class _OnlyTokens:
    """The least a store can be."""

    total_tokens = len(IDS)

    def read_tokens(self, start: int, count: int) -> Any:
        return np.array(IDS[start : start + count], np.uint16)


@pytest.mark.parametrize("kind", ["store", "list", "array", "tensor", "reader"])
def test_a_window_is_an_input_and_the_same_one_token_later(store: TokenStore, kind: str) -> None:
    sources: dict[str, Any] = {
        "store": store,
        "list": IDS,
        "array": np.array(IDS, np.int32),
        "tensor": torch.tensor(IDS),
        "reader": _OnlyTokens(),
    }
    dataset = SlidingWindowDataset(sources[kind], 8, stride=5)
    assert len(dataset) == SlidingWindowDataset.count_windows(60, 8, 5) == 11
    for index in (0, 1, 10):
        inputs, targets = dataset[index]
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.tolist() == IDS[index * 5 : index * 5 + 8]
        assert targets.tolist() == IDS[index * 5 + 1 : index * 5 + 9]
    assert dataset[-1][0].tolist() == dataset[10][0].tolist()
    assert dataset[np.int64(2)][0].tolist() == IDS[10:18]  # type: ignore[index]
    for outside in (11, -12):
        with pytest.raises(IndexError, match=f"window {outside} was asked for, but there are 11"):
            dataset[outside]
    with pytest.raises(TypeError):
        dataset[slice(2)]  # type: ignore[index]


def test_a_window_is_its_own_and_changes_neither_corpus_nor_target() -> None:
    ids = np.array(IDS, np.int64)
    dataset = SlidingWindowDataset(ids, 4)
    inputs, targets = dataset[3]
    inputs[:] = 0
    assert targets.tolist() == IDS[13:17]
    assert ids.tolist() == IDS
    assert dataset[3][0].tolist() == IDS[12:16]


def test_counts_of_windows() -> None:
    assert [len(SlidingWindowDataset(list(range(33)), 8, stride)) for stride in (None, 8, 4, 1)] == [
        4,
        4,
        7,
        25,
    ]
    assert [len(SlidingWindowDataset(list(range(size)), 8)) for size in (1, 8, 9, 16, 17)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_order_is_that_of_the_harness_with_and_without_workers(
    store: TokenStore, shuffle: bool, epoch: int
) -> None:
    sampling = "permutation" if shuffle else "ordered"
    ours = SlidingWindowLoader(store, 4, 5, stride=3, sampling=sampling, seed=7)
    ours.start_epoch(epoch)
    expected = [(batch.inputs.tolist(), batch.targets.tolist()) for batch in batches(ours)]
    dataset = SlidingWindowDataset(store, 5, stride=3)
    for workers in (0, 2):
        if workers and (epoch or not shuffle):
            continue
        loader = make_dataloader(dataset, 4, seed=7, epoch=epoch, shuffle=shuffle, num_workers=workers)
        assert len(loader) == len(expected)
        for _ in range(2):  # each iteration is the same epoch
            assert [(x.tolist(), y.tolist()) for x, y in loader] == expected


def test_an_epoch_continues_after_any_batch(store: TokenStore) -> None:
    dataset = SlidingWindowDataset(store, 5, stride=3)
    whole = _rows(make_dataloader(dataset, 4, seed=1, epoch=2))
    for step in range(len(whole) + 1):
        rest = make_dataloader(dataset, 4, seed=1, epoch=2, position=4 * step)
        assert len(rest) == len(whole) - step
        assert _rows(rest) == whole[step:]


def test_epochs_and_seeds_differ_and_one_loader_can_go_on_to_the_next_epoch(store: TokenStore) -> None:
    dataset = SlidingWindowDataset(store, 3, stride=1)
    orders = {
        (seed, epoch): _starts(make_dataloader(dataset, 8, seed=seed, epoch=epoch))
        for seed in range(2)
        for epoch in range(2)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    loader: Any = make_dataloader(dataset, 8, seed=1, position=16)
    loader.batch_sampler.start_epoch(1)
    assert _starts(loader) == orders[1, 1]
    added = [
        _starts(make_dataloader(dataset, 8, seed=seed, epoch=1 - seed, epoch_seed="additive"))
        for seed in range(2)
    ]
    assert added[0] == added[1]


def test_the_tail_is_dropped_or_kept_as_asked() -> None:
    dataset = SlidingWindowDataset(IDS, 5)
    assert [len(rows) for rows in _rows(make_dataloader(dataset, 4))] == [4, 4]
    kept = make_dataloader(dataset, 4, drop_last=False)
    assert [len(rows) for rows in _rows(kept)] == [4, 4, 3]
    assert len(kept) == 3
    assert sorted(_starts(kept)) == list(range(100, 155, 5))
    assert _rows(make_dataloader(dataset, 20, drop_last=False, position=8)) == _rows(kept)[2:]


def test_pytorchs_global_random_state_is_left_alone(store: TokenStore) -> None:
    dataset = SlidingWindowDataset(store, 5)
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(make_dataloader(dataset, 4, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_too_few_windows_are_an_error_never_an_empty_epoch(shuffle: bool, drop_last: bool) -> None:
    with pytest.raises(UserError, match=r"batch_size=4 needs .* windows, but the dataset has 0.* 5 tokens"):
        make_dataloader(SlidingWindowDataset(IDS[:5], 5), 4, shuffle=shuffle, drop_last=drop_last)
    dataset = SlidingWindowDataset(IDS, 20)
    assert len(dataset) == 2
    if drop_last:
        with pytest.raises(UserError, match=r"batch_size=3 needs 3 windows, but the dataset has 2"):
            make_dataloader(dataset, 3, shuffle=shuffle)
    else:
        assert [len(rows) for rows in _rows(make_dataloader(dataset, 3, drop_last=False))] == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        ({"batch_size": True}, "batch_size=True must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"epoch": -1}, "epoch=-1 must be"),
        ({"epoch": 1.0}, r"epoch=1\.0 must be"),
        ({"position": -4}, "position=-4 must be"),
        ({"position": 12}, "position=12 lies beyond the end of the epoch: the dataset has 11 windows"),
        ({"epoch_seed": "sum"}, "epoch_seed='sum' must be one of mixed, additive"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_dataloader(SlidingWindowDataset(IDS, 5), **({"batch_size": 4} | options))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one integer"),
        ([1, 2.5], "not float64"),
        ([True, False], "not bool"),
        (["a", "b"], "must be one row"),
        ([[1, 2], [3, 4]], r"of shape \(2, 2\)"),
        ([[1], [2, 3]], "must be one row of integers"),
        ([1, 2**70], "not object"),
        ([3, -1], "-1 is among them"),
        (np.zeros(0, np.int64), "at least one integer"),
        (torch.zeros(4), "not float32"),
        (np.zeros((2, 3), np.uint16), r"of shape \(2, 3\)"),
    ],
    ids=str,
)
def test_ids_that_cannot_be_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SlidingWindowDataset(ids, 1)


@pytest.mark.parametrize("sizes", [{"seq_len": 0}, {"seq_len": True}, {"seq_len": 2, "stride": 0}], ids=str)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be an integer of at least 1"):
        SlidingWindowDataset(IDS, **sizes)


def test_a_list_costs_its_smallest_dtype_and_an_array_nothing() -> None:
    ids = [3, 50_000] * 500_000
    array = np.array(ids, np.int64)
    for corpus, most in ((ids, 6 * len(ids)), (array, 50_000)):
        tracemalloc.start()
        try:
            dataset = SlidingWindowDataset(corpus, 64)
            assert tracemalloc.get_traced_memory()[1] < most
        finally:
            tracemalloc.stop()
        assert dataset[7][1][-1] == ids[7 * 64 + 64]
    assert SlidingWindowDataset([5] * 70_000 + [2**40], 1)[69_999][1].tolist() == [2**40]


def test_an_id_outside_of_the_vocabulary_is_refused_with_workers_too(tmp_path: Path) -> None:
    write_set(tmp_path, {"train": [IDS]}, tokenizer={"vocab_size": 150})
    dataset = SlidingWindowDataset(open_store(tmp_path, "train"), 5)
    for workers in (0, 1):
        with pytest.raises(ValueError, match="token id 150 at position 50"):
            list(make_dataloader(dataset, 2, shuffle=False, num_workers=workers))


def test_the_loaders_can_be_imported_without_pytorch() -> None:
    code = "import sys, harness.loaders; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
