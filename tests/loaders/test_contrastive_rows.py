"""Contrastive rows: pairs stay pairs in every batch, rank and storage, whatever the widths of both sides."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.config_groups import ContrastiveRowsConfig
from harness.errors import UserError
from harness.loaders import ContrastivePaddedDataset, make_loader
from harness.loaders.permutation import Permutation, epoch_key
from harness.storage import PairStore, open_split
from tests.helpers_sets import random_rows, write_rows
from tests.loaders.loader_contract import batches, check_sampled_loader

STORAGES: dict[str, dict[str, Any]] = {
    "npy": {"format": "npy"},
    "hdf5": {"format": "hdf5"},
    "gzip": {"format": "hdf5", "compression": "gzip"},
}


def _store(directory: Path, pos: int = 5, neg: int = 5, storage: str = "npy", **overrides: Any) -> PairStore:
    """14 pairs of these widths; the sides are cut into shards at different rows."""
    splits = {
        "train.pos": [random_rows(14, pos, seed=1)],
        "train.neg": [random_rows(6, neg, seed=2), random_rows(8, neg, seed=3)],
    }
    store = open_split(write_rows(directory, splits, storage=STORAGES[storage], **overrides), "train")
    assert isinstance(store, PairStore)
    return store


@pytest.mark.parametrize(("storage", "neg"), [("npy", 5), ("npy", 4), ("hdf5", 5), ("gzip", 5)])
def test_the_contract_of_a_loader_holds(tmp_path: Path, storage: str, neg: int) -> None:
    store = _store(tmp_path, neg=neg, storage=storage)
    check_sampled_loader(partial(ContrastivePaddedDataset, store, 4, 4), parts=2)


@pytest.mark.parametrize(("pos", "neg", "seq_len"), [(5, 5, 4), (5, 3, 4), (2, 5, 4), (5, 5, 2), (5, 2, 3)])
def test_a_batch_is_the_pos_rows_and_then_the_neg_rows_of_the_same_pairs(
    tmp_path: Path, pos: int, neg: int, seq_len: int
) -> None:
    store = _store(tmp_path, pos, neg, tokenizer={"boundary_token_id": 7})
    loader = ContrastivePaddedDataset(store, 3, seq_len, seed=9)
    order = Permutation(14, epoch_key(9, 0, "mixed", "contrastive_rows")).take(0, 12).reshape(4, 3)
    found = list(batches(loader))
    assert len(found) == 4
    for batch, ids in zip(found, order, strict=True):
        assert batch.inputs.shape == batch.targets.shape == (6, seq_len)
        for side, first in ((store.pos, 0), (store.neg, 3)):
            rows, mask = side.read_rows(ids)
            short = seq_len + 1 - side.row_width
            wide = np.pad(rows, ((0, 0), (0, max(0, short))), constant_values=7).astype(np.int64)
            counts = np.pad(mask, ((0, 0), (0, max(0, short))))
            inputs, targets = wide[:, :seq_len].copy(), wide[:, 1 : seq_len + 1]
            assert np.array_equal(
                batch.targets[first:][:3], np.where(counts[:, 1 : seq_len + 1], targets, -100)
            )
            if short > 0:
                inputs[:, side.row_width - 1] = 7  # the last stored column is a target only
            assert np.array_equal(batch.inputs[first:][:3], inputs)


def test_reads_are_judged_by_the_tokens_of_both_rows(tmp_path: Path) -> None:
    loader = ContrastivePaddedDataset(_store(tmp_path), batch_size=4, seq_len=4)
    assert loader.batch_tokens == loader.next_batch().inputs.numel()
    assert 4 * loader.probe_at(0) == loader.batch_tokens


def test_padding_without_a_boundary_token_is_a_valid_id(tmp_path: Path) -> None:
    store = _store(tmp_path, 5, 2, tokenizer={"boundary_token_id": None})
    batch = ContrastivePaddedDataset(store, 3, 4).next_batch()
    assert (batch.inputs[3:, 1:] == 0).all()
    assert (batch.targets[3:, 1:] == -100).all()


def test_every_storage_gives_the_same_batches(tmp_path: Path) -> None:
    found = []
    for storage in STORAGES:
        config = ContrastiveRowsConfig(seq_len=4, batch_size=2, seed=3)
        with make_loader(config, _store(tmp_path / storage, neg=4, storage=storage)) as loader:
            hashes = []
            for epoch in (0, 1):
                loader.start_epoch(epoch)
                hashes += [(b.inputs.numpy().tobytes(), b.targets.numpy().tobytes()) for b in batches(loader)]
        found.append(hashes)
    assert len(found[0]) == 14
    assert found[0] == found[1] == found[2]


def test_ranks_share_pairs_and_not_rows(tmp_path: Path) -> None:
    store = _store(tmp_path)
    config = ContrastiveRowsConfig(seq_len=4, batch_size=4)
    whole = ContrastivePaddedDataset(store, 4, 4)
    with make_loader(config, store, rank=1, world_size=2) as loader:
        for ours, theirs in zip(batches(loader), batches(whole), strict=True):
            assert torch.equal(ours.inputs, theirs.inputs[[2, 3, 6, 7]])
            assert torch.equal(ours.targets, theirs.targets[[2, 3, 6, 7]])


def test_what_wider_rows_lose_and_the_end_drops_is_counted_on_both_sides(tmp_path: Path) -> None:
    store = _store(tmp_path, 5, 4)
    loader = ContrastivePaddedDataset(store, 4, 2)
    masks = [side.read_rows(range(14))[1] for side in (store.pos, store.neg)]
    assert loader.lost_tokens == loader.skipped_tokens == sum(mask[:, 3:].sum() for mask in masks) > 0
    assert loader.dropped_tokens == 2 * 2 * 2
    assert loader.state_dict()["row_width"] == 5


def test_rows_narrow_on_both_sides_and_too_few_pairs_are_refused(tmp_path: Path) -> None:
    store = _store(tmp_path, 4, 3)
    with pytest.raises(
        UserError, match=r"needs rows of 5 columns.*has rows of 4\..*contrastive_rows loader.seq_len=4"
    ):
        ContrastivePaddedDataset(store, 2, 4)
    with pytest.raises(UserError, match=r"loader.batch_size=15 needs 15 pairs, but train has 14"):
        ContrastivePaddedDataset(store, 15, 3)


def test_an_id_beyond_the_vocabulary_names_the_side(tmp_path: Path) -> None:
    store = _store(tmp_path, tokenizer={"vocab_size": 50, "boundary_token_id": 0})
    with pytest.raises(
        UserError, match=r"train_pos_00000\.npy, row \d+ \(row \d+ of train\.pos\), holds token id"
    ):
        ContrastivePaddedDataset(store, 14, 4).next_batch()
