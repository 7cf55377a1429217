"""Padded rows: the rows of the set in a seeded order, padding never a target, the same from every storage."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.config_groups import LoaderConfig, PaddedRowsConfig, SlidingWindowConfig
from harness.errors import UserError
from harness.loaders import PaddedDataset, make_loader
from harness.loaders.permutation import Permutation, epoch_key
from harness.storage import RowStore, open_split
from tests.helpers_sets import RowShard, random_rows, write_rows, write_set
from tests.loaders.loader_contract import batches, check_sampled_loader

STORAGES: dict[str, dict[str, Any]] = {
    "npy": {"format": "npy"},
    "hdf5": {"format": "hdf5"},
    "gzip": {"format": "hdf5", "compression": "gzip"},
}
SHARDS = [random_rows(5, 5, seed=0), random_rows(9, 5, seed=1)]
ROWS, MASK = (np.concatenate([shard[side] for shard in SHARDS]) for side in (0, 1))


def _store(
    directory: Path, storage: str = "npy", shards: list[RowShard] = SHARDS, **overrides: Any
) -> RowStore:
    folder = write_rows(directory, {"train": shards}, storage=STORAGES[storage], **overrides)
    return RowStore(folder, "train")


@pytest.mark.parametrize("storage", STORAGES)
def test_the_contract_of_a_loader_holds(tmp_path: Path, storage: str) -> None:
    check_sampled_loader(partial(PaddedDataset, _store(tmp_path, storage), 4, 4))


@pytest.mark.parametrize("seq_len", [4, 2, 1])
@pytest.mark.parametrize("epoch_seed", ["mixed", "additive"])
def test_batches_are_the_rows_in_the_seeded_order(tmp_path: Path, seq_len: int, epoch_seed: str) -> None:
    loader = PaddedDataset(_store(tmp_path), 3, seq_len, seed=7, epoch_seed=epoch_seed)
    for epoch in (0, 1):
        loader.start_epoch(epoch)
        order = Permutation(14, epoch_key(7, epoch, epoch_seed, "padded_rows")).take(0, 12)
        found = list(batches(loader))
        rows, mask = ROWS[order].astype(np.int64), MASK[order]
        targets = np.where(mask[:, 1 : seq_len + 1], rows[:, 1 : seq_len + 1], -100)
        assert np.array_equal(torch.cat([batch.inputs for batch in found]), rows[:, :seq_len])
        assert np.array_equal(torch.cat([batch.targets for batch in found]), targets)


def test_an_epoch_has_every_row_once_and_two_epochs_differ(tmp_path: Path) -> None:
    rows = np.arange(40, dtype="<u2").reshape(20, 2)
    loader = PaddedDataset(_store(tmp_path, shards=[(rows, np.ones((20, 2), np.bool_))]), 2, 1)
    orders = []
    for epoch in range(2):
        loader.start_epoch(epoch)
        orders.append(torch.cat([batch.inputs for batch in batches(loader)]).ravel().tolist())
    assert Counter(orders[0]) == Counter(orders[1]) == Counter(rows[:, 0].tolist())
    assert orders[0] != orders[1]


def test_every_storage_gives_the_same_batches(tmp_path: Path) -> None:
    found = []
    for storage in STORAGES:
        with make_loader(
            PaddedRowsConfig(seq_len=4, batch_size=2), _store(tmp_path / storage, storage)
        ) as loader:
            hashes = []
            for epoch in (0, 1):
                loader.start_epoch(epoch)
                hashes += [(b.inputs.numpy().tobytes(), b.targets.numpy().tobytes()) for b in batches(loader)]
        found.append(hashes)
    assert len(found[0]) == 14
    assert found[0] == found[1] == found[2]


def _child(loader: PaddedDataset, queue: Any) -> None:
    queue.put([(batch.inputs.tolist(), batch.targets.tolist()) for batch in batches(loader)])


@pytest.mark.parametrize(("storage", "method"), [("npy", "fork"), ("gzip", "fork"), ("npy", "spawn")])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_started_loader_goes_on_the_same_in_another_process(
    tmp_path: Path, storage: str, method: str
) -> None:
    loader = PaddedDataset(_store(tmp_path, storage), 3, 4)
    loader.next_batch()
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_child, args=(loader, queue))
    child.start()
    ours = [(batch.inputs.tolist(), batch.targets.tolist()) for batch in batches(loader)]
    assert queue.get(timeout=60) == ours
    child.join(60)
    assert len(ours) == 3


def test_wider_rows_lose_what_is_counted(tmp_path: Path) -> None:
    store = _store(tmp_path)
    assert PaddedDataset(store, 2, 4).lost_tokens == 0
    for seq_len in (1, 2, 3):
        loader = PaddedDataset(store, 2, seq_len)
        assert loader.lost_tokens == loader.skipped_tokens == MASK[:, seq_len + 1 :].sum()
        targets = torch.cat([batch.targets for batch in batches(loader)])
        assert loader.dropped_tokens == 0
        assert int((targets != -100).sum()) + loader.lost_tokens == MASK[:, 1:].sum()


def test_narrower_rows_are_refused_with_both_numbers_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        PaddedDataset(_store(tmp_path, "hdf5"), 2, 5)
    for part in [
        "loader.seq_len=5 needs rows of 6 columns",
        f"{tmp_path / 'shards.json'} has rows of 5",
        "loader.seq_len<=4",
        "prepare_data.py data=hdf5 corpus=test tokenizer=byte loader=padded_rows loader.seq_len=5",
    ]:
        assert part in str(caught.value)


def test_too_few_rows_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"loader.batch_size=15 needs 15 rows, but train has 14 .*batch_size<=14"
    ):
        PaddedDataset(_store(tmp_path), 15, 4)
    with pytest.raises(UserError, match=r"needs 1 rows, but val has 0 "):
        PaddedDataset(RowStore(tmp_path, "val"), 1, 4)


def test_rows_of_padding_and_batches_without_a_target_pass_through(tmp_path: Path) -> None:
    rows, mask = random_rows(8, 5, seed=4)
    mask[:] = False
    loader = PaddedDataset(_store(tmp_path, shards=[(rows, mask)]), 4, 4)
    found = list(batches(loader))
    assert len(found) == 2
    assert all((batch.targets == -100).all() for batch in found)
    order = Permutation(8, epoch_key(0, 0, "mixed", "padded_rows")).take(0, 8)
    assert np.array_equal(torch.cat([batch.inputs for batch in found]), rows[order][:, :4])


def test_an_id_beyond_the_vocabulary_is_refused_by_shard_row_and_id(tmp_path: Path) -> None:
    rows, mask = random_rows(4, 5, seed=2)
    rows[3, 0] = 257
    loader = PaddedDataset(_store(tmp_path, shards=[SHARDS[0], (rows, mask)]), 9, 4)
    before = loader.state_dict()
    with pytest.raises(UserError, match=r"train_00001\.npy, row 3 \(row 8 of train\), holds token id 257"):
        loader.next_batch()
    assert loader.state_dict() == before


@pytest.mark.parametrize("mode", ["target", "after"])
def test_boundaries_are_masked_beside_the_padding(tmp_path: Path, mode: str) -> None:
    rows = np.array([[0, 5, 0, 6, 7]], "<u2")
    mask = np.array([[False, True, True, True, False]])
    store = _store(tmp_path, shards=[(rows, mask)])
    expected = {"target": [5, -100, 6, -100], "after": [-100, 0, -100, -100]}
    batch = PaddedDataset(store, 1, 4, mask_boundary=mode).next_batch()
    assert batch.inputs.tolist() == [[0, 5, 0, 6]]
    assert batch.targets.tolist() == [expected[mode]]


def test_the_width_of_the_rows_is_part_of_the_state(tmp_path: Path) -> None:
    loader = PaddedDataset(_store(tmp_path), 2, 3)
    state = loader.state_dict()
    assert state["row_width"] == 5
    assert set(state) == {
        "format_version", "strategy", "epoch", "position", "seed", "epoch_seed", "batch_size", "seq_len",
        "split", "metadata_sha256", "row_width",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"Incompatible loader row_width: checkpoint 6, config 5"):
        loader.load_state_dict(state | {"row_width": 6})


def test_make_loader_follows_the_configuration_and_the_rank(tmp_path: Path) -> None:
    store = _store(tmp_path)
    config = PaddedRowsConfig(batch_size=4, seq_len=3, seed=5, epoch_seed="additive", mask_boundary="target")
    whole = PaddedDataset(store, 4, 3, seed=5, epoch_seed="additive", mask_boundary="target")
    with make_loader(config, store, rank=1, world_size=2) as loader:
        for ours, theirs in zip(batches(loader), batches(whole), strict=True):
            assert torch.equal(ours.inputs, theirs.inputs[2:])
            assert torch.equal(ours.targets, theirs.targets[2:])
            assert ours.cursor == theirs.cursor


def test_a_loader_on_a_set_of_another_layout_is_refused_with_both_and_the_command(tmp_path: Path) -> None:
    rows = open_split(write_rows(tmp_path / "rows", {"train": SHARDS}), "train")
    stream = open_split(write_set(tmp_path / "stream", {"train": [[1, 2, 3]]}), "train")
    sides = {"train.pos": SHARDS, "train.neg": SHARDS}
    pairs = open_split(write_rows(tmp_path / "pairs", sides), "train")
    for config, store, found in (
        (LoaderConfig(), rows, "padded rows (storage.layout=rows)"),
        (SlidingWindowConfig(), pairs, "pairs of padded rows (storage.layout=contrastive)"),
        (PaddedRowsConfig(seq_len=9), stream, "a stream of tokens (storage.layout=stream)"),
        (
            PaddedRowsConfig(seq_len=9, row_width=10),
            pairs,
            "pairs of padded rows (storage.layout=contrastive)",
        ),
    ):
        with pytest.raises(UserError) as caught:
            make_loader(config, store)
        for part in [
            f"loader={config.name} reads ",
            f"{store.manifest.path} holds {found}",
            f"python scripts/prepare_data.py data=npy corpus=test tokenizer=byte loader={config.name}",
        ]:
            assert part in str(caught.value)
        assert str(caught.value).endswith("loader.row_width=10 loader.seq_len=9") == isinstance(
            config, PaddedRowsConfig
        )
