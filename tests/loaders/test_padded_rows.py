"""Padded rows: exactly the rows of the set in a seeded order, and the contract of every loader."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.loaders import PaddedDataset
from harness.storage import RowStore, open_split
from tests.helpers_sets import random_rows, write_rows
from tests.loaders.loader_contract import check_sampled_loader


def test_the_contract_of_a_loader_holds(tmp_path: Path) -> None:
    shards = [random_rows(5, 4, seed=0), random_rows(9, 4, seed=1)]
    store = open_split(write_rows(tmp_path, {"train": shards}), "train")
    assert isinstance(store, RowStore)
    check_sampled_loader(partial(PaddedDataset, store, 4, 3))
