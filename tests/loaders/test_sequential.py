"""The sequential loader: file order, a cursor of six keys, no wrap, one order for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config_groups import LoaderConfig
from harness.errors import UserError
from harness.loaders import TokenDataLoader, make_loader
from harness.storage import TokenStore, open_store
from tests.helpers_sets import write_set


def _store(directory: Path, tokens: int = 50, split: str = "train") -> TokenStore:
    cut = tokens // 3
    stream = list(range(tokens))
    return open_store(write_set(directory, {split: [stream[:cut], stream[cut:]]}), split)


def _drain(loader: Any) -> list[Any]:
    batches = []
    while True:
        try:
            batches.append(loader.next_batch())
        except StopIteration:
            return batches


def test_worked_example_of_two_rows_of_two(tmp_path: Path) -> None:
    store = open_store(write_set(tmp_path, {"train": [[10, 11, 12, 13], [14, 15, 16]]}), "train")
    loader = TokenDataLoader(store, 2, 2)
    x, y, cursor = loader.next_batch()
    assert x.tolist() == [[10, 11], [12, 13]]
    assert y.tolist() == [[11, 12], [13, 14]]
    assert x.dtype == y.dtype == torch.int64
    assert cursor == {
        "format_version": 1,
        "position": 4,
        "batch_size": 2,
        "seq_len": 2,
        "split": "train",
        "metadata_sha256": store.metadata_sha256,
    }
    assert cursor == loader.state_dict()
    for _ in range(2):
        with pytest.raises(StopIteration):
            loader.next_batch()
        assert loader.position == 4


def test_end_of_epoch_is_raised_before_anything_is_read(tmp_path: Path) -> None:
    store = _store(tmp_path)
    loader = TokenDataLoader(store, 3, 8)
    _drain(loader)
    store.close()
    for path in store.paths:
        path.unlink()
    with pytest.raises(StopIteration):
        loader.next_batch()
    with pytest.raises(UserError, match="cannot be read"):
        TokenDataLoader(store, 3, 8).next_batch()


@pytest.mark.parametrize(("tokens", "batches", "dropped"), [(9, 1, 0), (16, 1, 7), (17, 2, 0), (50, 6, 1)])
def test_an_epoch_has_whole_batches_and_counts_what_it_drops(
    tmp_path: Path, tokens: int, batches: int, dropped: int
) -> None:
    loader = TokenDataLoader(_store(tmp_path, tokens), 2, 4)
    assert (loader.batches_per_epoch, loader.dropped_tokens) == (batches, dropped)
    drained = _drain(loader)
    assert len(drained) == batches
    assert torch.cat([batch.inputs for batch in drained]).ravel().tolist() == list(range(8 * batches))
    assert torch.cat([batch.targets for batch in drained]).ravel().tolist() == list(range(1, 8 * batches + 1))


def test_reset_and_start_epoch_go_back_to_the_same_first_batch(tmp_path: Path) -> None:
    loader = TokenDataLoader(_store(tmp_path), 2, 4)
    first = loader.next_batch()
    loader.next_batch()
    for again in (loader.reset, lambda: loader.start_epoch(3)):
        again()
        assert loader.position == 0
        batch = loader.next_batch()
        assert torch.equal(batch.inputs, first.inputs)
        assert batch.cursor == first.cursor
    with pytest.raises(UserError, match="epoch=-1"):
        loader.start_epoch(-1)


def test_a_batch_handed_out_is_never_changed(tmp_path: Path) -> None:
    loader = TokenDataLoader(_store(tmp_path), 2, 4)
    batches = _drain(loader)
    copies = [(batch.inputs.clone(), batch.targets.clone(), dict(batch.cursor)) for batch in batches]
    loader.reset()
    _drain(loader)
    for batch, (inputs, targets, cursor) in zip(batches, copies, strict=True):
        assert torch.equal(batch.inputs, inputs)
        assert torch.equal(batch.targets, targets)
        assert batch.cursor == cursor


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_read_the_global_batch(tmp_path: Path, world_size: int) -> None:
    store = _store(tmp_path)
    whole = _drain(TokenDataLoader(store, 4, 3))
    ranks = [_drain(TokenDataLoader(store, 4, 3, rank=r, world_size=world_size)) for r in range(world_size)]
    assert all(len(batches) == len(whole) for batches in ranks)
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([batches[step].inputs for batches in ranks]), batch.inputs)
        assert torch.equal(torch.cat([batches[step].targets for batches in ranks]), batch.targets)
        assert all(batches[step].cursor == batch.cursor for batches in ranks)


def test_resume_continues_with_the_next_batch_on_another_number_of_ranks(tmp_path: Path) -> None:
    store = _store(tmp_path)
    straight = _drain(TokenDataLoader(store, 4, 3))
    saved = json.loads(json.dumps(straight[1].cursor))
    halves = []
    for rank in range(2):
        loader = TokenDataLoader(store, 4, 3, rank=rank, world_size=2)
        assert loader.validate_state_dict(saved) == 24
        assert loader.position == 0
        loader.load_state_dict(saved)
        assert loader.position == 24
        halves.append(loader.next_batch().inputs)
    assert torch.equal(torch.cat(halves), straight[2].inputs)


def test_a_cursor_at_the_very_end_gives_the_end_of_the_epoch(tmp_path: Path) -> None:
    loader = TokenDataLoader(_store(tmp_path), 2, 4)
    loader.load_state_dict(loader.state_dict() | {"position": 50})
    with pytest.raises(StopIteration):
        loader.next_batch()


BAD_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "format_version": ({"format_version": 2}, "Incompatible loader format_version: checkpoint 2, config 1"),
    "batch_size": ({"batch_size": 64}, "Incompatible loader batch_size: checkpoint 64, config 2"),
    "seq_len": ({"seq_len": 128}, "Incompatible loader seq_len: checkpoint 128, config 4"),
    "split": ({"split": "val"}, "Incompatible loader split: checkpoint val, config train"),
    "digest": ({"metadata_sha256": "ab"}, "Incompatible loader metadata_sha256: checkpoint ab, config "),
    "batch_size true": ({"batch_size": True}, "Incompatible loader batch_size: checkpoint True, config 2"),
    "version true": (
        {"format_version": True},
        "Incompatible loader format_version: checkpoint True, config 1",
    ),
    "version float": (
        {"format_version": 1.0},
        "Incompatible loader format_version: checkpoint 1.0, config 1",
    ),
    "split null": (
        {"split": None},
        "Incompatible loader split: checkpoint None, config 'train': it must be a string",
    ),
    "position true": (
        {"position": True},
        "Incompatible loader position: checkpoint True: it must be an integer",
    ),
    "position float": (
        {"position": 8.0},
        "Incompatible loader position: checkpoint 8.0: it must be an integer",
    ),
    "position text": ({"position": "8"}, "Incompatible loader position: checkpoint '8'"),
    "position negative": ({"position": -1}, "Incompatible loader position: checkpoint -1.* between 0 and 50"),
    "position beyond": ({"position": 51}, "Incompatible loader position: checkpoint 51.* between 0 and 50"),
    "unknown key": (
        {"epoch": 1},
        "Incompatible loader state: unknown epoch; expected exactly format_version",
    ),
    "strategy": (
        {"strategy": "sliding_window"},
        "Incompatible loader strategy: checkpoint sliding_window, config sequential.*loader=sliding_window",
    ),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_by_field_and_both_values(tmp_path: Path, name: str) -> None:
    change, message = BAD_STATES[name]
    loader = TokenDataLoader(_store(tmp_path), 2, 4)
    loader.next_batch()
    for call in (loader.validate_state_dict, loader.load_state_dict):
        with pytest.raises(UserError, match=message):
            call(loader.state_dict() | change)
    assert loader.position == 8


@pytest.mark.parametrize(
    "key", ["format_version", "position", "batch_size", "seq_len", "split", "metadata_sha256"]
)
def test_a_state_without_a_key_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    loader = TokenDataLoader(_store(tmp_path), 2, 4)
    state = loader.state_dict()
    del state[key]
    with pytest.raises(UserError, match=f"Incompatible loader state: missing {key}; expected exactly"):
        loader.load_state_dict(state)


def test_every_difference_is_named_at_once_and_no_mapping_is_refused(tmp_path: Path) -> None:
    loader = TokenDataLoader(_store(tmp_path), 2, 4)
    with pytest.raises(
        UserError, match=r"batch_size: checkpoint 3, config 2[\s\S]*seq_len: checkpoint 5, config 4"
    ):
        loader.load_state_dict(loader.state_dict() | {"batch_size": 3, "seq_len": 5})
    broken: Any = [1]
    with pytest.raises(UserError, match="Incompatible loader state"):
        loader.load_state_dict(broken)


def test_a_split_too_small_for_one_batch_is_refused_with_the_numbers(tmp_path: Path) -> None:
    store = _store(tmp_path, 203, "val")
    with pytest.raises(UserError) as caught:
        TokenDataLoader(store, 1, 512)
    for part in ["loader.seq_len=512", "513 tokens", "val has 203", str(tmp_path), "seq_len<=202"]:
        assert part in str(caught.value)
    with pytest.raises(
        UserError, match=r"batch_size=16 .*seq_len=100 needs 1601 tokens.*loader.batch_size<=2 "
    ):
        TokenDataLoader(store, 16, 100)
    assert TokenDataLoader(store, 2, 101).batches_per_epoch == 1
    with pytest.raises(UserError, match=r"train has 0 \(.*Prepare more text"):
        TokenDataLoader(open_store(tmp_path, "train"), 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"batch_size": True}, "batch_size=True must be"),
        ({"seq_len": 4.0}, "seq_len=4.0 must be"),
        ({"rank": 2, "world_size": 2}, "rank=2 must be an integer from 0 to 1"),
        ({"rank": -1}, "rank=-1 must be"),
        ({"world_size": 0}, "world_size=0 must be"),
        ({"batch_size": 6, "world_size": 4}, r"loader.batch_size=6 .* 4 processes.*loader.batch_size=8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TokenDataLoader(_store(tmp_path), **({"batch_size": 2, "seq_len": 4} | arguments))


def test_make_loader_follows_the_configuration(tmp_path: Path) -> None:
    store = _store(tmp_path)
    whole = _drain(TokenDataLoader(store, 4, 3))
    for prefetch in (0, 2):
        config = LoaderConfig(batch_size=4, seq_len=3, prefetch=prefetch)
        with make_loader(config, store, rank=1, world_size=2) as loader:
            assert (loader.batches_per_epoch, loader.dropped_tokens) == (4, 1)
            batches = _drain(loader)
        assert [batch.inputs.tolist() for batch in batches] == [batch.inputs[2:].tolist() for batch in whole]
