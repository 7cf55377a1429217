"""Contrastive rows: pairs stay pairs, and the contract of every loader."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.loaders import ContrastivePaddedDataset
from harness.storage import PairStore, open_split
from tests.helpers_sets import random_rows, write_rows
from tests.loaders.loader_contract import check_sampled_loader


def test_the_contract_of_a_loader_holds(tmp_path: Path) -> None:
    splits = {"train.pos": [random_rows(14, 4, seed=0)], "train.neg": [random_rows(14, 3, seed=1)]}
    store = open_split(write_rows(tmp_path, splits), "train")
    assert isinstance(store, PairStore)
    check_sampled_loader(partial(ContrastivePaddedDataset, store, 4, 3), parts=2)
