"""Where a batch's rows come from, and how many batches are left, by arithmetic: for every loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.errors import UserError
from harness.loaders import build_loader
from harness.loaders.batch import IGNORE, Origin
from harness.storage import RowStore, Store, TokenStore, open_split
from tests.helpers_sets import random_rows, write_rows, write_set

SIZES: dict[str, Any] = {"seq_len": 8, "batch_size": 3}
CONFIGS = {
    "sequential": LoaderConfig(**SIZES),
    "permutation": SlidingWindowConfig(stride=5, **SIZES),
    "ordered": SlidingWindowConfig(sampling="ordered", **SIZES),
    "uniform": SlidingWindowConfig(sampling="uniform", **SIZES),
    "block_shuffle": BlockShuffleConfig(window_tokens=30, **SIZES),
    "padded_rows": PaddedRowsConfig(**SIZES),
    "contrastive_rows": ContrastiveRowsConfig(**SIZES),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("sets")
    tokens = np.random.default_rng(1).integers(0, 257, 200).tolist()
    # An empty shard, shards shorter than a row, and shards of several rows.
    shards = [tokens[:70], [], tokens[70:73], tokens[73:76], tokens[76:200]]
    write_set(folder / "stream", {"train": shards, "val": [tokens[:20]]})
    write_rows(folder / "rows", {"train": [random_rows(n, 9, seed=n) for n in (4, 7)]})
    sides = {
        f"train.{side}": [random_rows(n, 9, seed=n + k) for n in (4, 7)]
        for k, side in ((0, "pos"), (5, "neg"))
    }
    write_rows(folder / "pairs", sides)
    return {name: open_split(folder / name, "train") for name in ("stream", "rows", "pairs")}


def _store(stores: dict[str, Store], name: str) -> Store:
    return stores[{"padded_rows": "rows", "contrastive_rows": "pairs"}.get(name, "stream")]


def _row(origin: Origin) -> np.ndarray[Any, Any]:
    """What lies on disk where a row is said to come from."""
    parts = [np.load(piece.path)[piece.first : piece.first + piece.length] for piece in origin.pieces]
    return np.concatenate(parts).reshape(-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_is_what_lies_where_it_is_said_to_come_from(name: str, stores: dict[str, Store]) -> None:
    store = _store(stores, name)
    loader = build_loader(CONFIGS[name], store)
    for epoch in range(2):
        loader.start_epoch(epoch)
        while loader.batches_from(position := loader.position):
            batch = loader.next_batch()
            origins = loader.origins(position)
            assert len(origins) == len(batch.inputs)
            for origin, inputs, targets in zip(origins, batch.inputs, batch.targets, strict=True):
                found = _row(origin)
                assert inputs.tolist() == found[:-1].tolist()
                counted = targets != IGNORE
                assert targets[counted].tolist() == found[1:][counted.numpy()].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_have_the_origins_of_their_own_rows(name: str, stores: dict[str, Store]) -> None:
    store, config = _store(stores, name), CONFIGS[name]
    position = 24 if name == "sequential" else 3
    whole = build_loader(config, store).origins(position)
    for rank in range(3):
        part = build_loader(config, store, rank=rank, world_size=3).origins(position)
        assert part == whole[rank::3]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_batches_left_are_those_that_come(name: str, stores: dict[str, Store]) -> None:
    loader = build_loader(CONFIGS[name], _store(stores, name))
    assert loader.batches_from(0) == loader.batches_per_epoch
    for start in range(12):  # also where no batch of an epoch begins
        loader.load_state_dict(loader.state_dict() | {"position": start})
        expected, position = loader.batches_from(start), start
        for _ in range(expected):
            assert loader.next_batch().cursor["position"] == position + loader.advance
            position += loader.advance
        with pytest.raises(StopIteration):
            loader.next_batch()
    assert loader.batches_from(10**9) == 0


def test_rows_read_directly_are_those_of_the_windows(stores: dict[str, Store]) -> None:
    windows, direct = (
        build_loader(CONFIGS["block_shuffle"], stores["stream"], direct=d) for d in (False, True)
    )
    for _ in range(windows.batches_per_epoch):
        one, other = windows.next_batch(), direct.next_batch()
        assert one.inputs.equal(other.inputs)
        assert one.targets.equal(other.targets)
        assert one.cursor == other.cursor


def test_pieces_cover_a_range_and_nothing_else(stores: dict[str, Store]) -> None:
    store = stores["stream"]
    assert isinstance(store, TokenStore)
    for start in range(60, 90):
        for count in range(20):
            pieces = store.locate(start, count)
            assert sum(piece.length for piece in pieces) == count
            assert all(piece.length for piece in pieces)
    for start, count in ((0, 201), (201, 0), (-1, 2)):
        with pytest.raises(UserError):
            store.locate(start, count)
    rows = stores["rows"]
    assert isinstance(rows, RowStore)
    assert [rows.locate(row)[1:] for row in (0, 3, 4, 10)] == [(0, 1), (3, 1), (0, 1), (6, 1)]
    with pytest.raises(UserError, match="row 11 was asked for"):
        rows.locate(11)
