"""Sliding windows: which there are, each once an epoch, in which order, and the contract of every loader."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config_groups import SlidingWindowConfig
from harness.errors import UserError
from harness.loaders import SlidingWindowLoader, make_loader
from harness.storage import TokenStore, open_store
from tests.helpers_sets import write_set
from tests.loaders.loader_contract import (
    batches,
    check_bad_states_are_refused,
    check_processes_agree,
    check_sampled_loader,
)

SHARDS = [4, 0, 1, 1, 0, 0, 3, 1, 30, 0]  # tokens; windows cross one, two, three of them, empty ones too


def _store(directory: Path, shards: list[int] | None = None, **manifest: Any) -> TokenStore:
    """A stream 0, 1, 2, ... cut into shards, so that a window's first token is its start."""
    streams, done = [], 0
    for tokens in shards or [7, 53]:
        streams.append(list(range(done, done + tokens)))
        done += tokens
    return open_store(write_set(directory, {"train": streams}, **manifest), "train")


def _starts(loader: SlidingWindowLoader) -> list[int]:
    """The windows' starts in the order of what is left of the epoch."""
    return [start for batch in batches(loader) for start in batch.inputs[:, 0].tolist()]


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"sampling": "ordered"}, {"sampling": "uniform"}, {"mask_boundary": "target"}],
    ids=str,
)
def test_the_contract_of_a_loader_holds(tmp_path: Path, options: dict[str, Any]) -> None:
    check_sampled_loader(partial(SlidingWindowLoader, _store(tmp_path), 4, 3, **options))


def test_forked_spawned_and_simultaneous_processes_read_the_same(tmp_path: Path) -> None:
    store = _store(tmp_path)
    check_processes_agree(
        [partial(SlidingWindowLoader, store, 4, 3, sampling=name) for name in ("permutation", "uniform")]
    )


def test_the_number_of_windows_is_that_of_counting_them() -> None:
    for tokens in range(201):
        for seq_len in range(1, 21):
            for stride in range(1, 26):
                counted = sum(start + seq_len + 1 <= tokens for start in range(0, tokens, stride))
                assert SlidingWindowLoader.count_windows(tokens, seq_len, stride) == counted


@pytest.mark.parametrize("sampling", ["permutation", "ordered"])
def test_windows_cross_shards_also_empty_ones_and_those_of_one_token(tmp_path: Path, sampling: str) -> None:
    store = _store(tmp_path, SHARDS)
    for seq_len in (1, 2, 5, 12, 39):
        for stride in (1, 3, seq_len, seq_len + 2):
            loader = SlidingWindowLoader(store, 1, seq_len, stride=stride, sampling=sampling)
            starts = []
            for batch in batches(loader):
                start = int(batch.inputs[0, 0])
                assert batch.inputs.tolist() == [list(range(start, start + seq_len))]
                assert batch.targets.tolist() == [list(range(start + 1, start + seq_len + 1))]
                starts.append(start)
            expected = [start for start in range(0, 40, stride) if start + seq_len < 40]
            assert (sorted(starts) if sampling == "permutation" else starts) == expected


@pytest.mark.parametrize("windows", [1, 2, 3, 1000, 65537])
def test_an_epoch_visits_each_window_exactly_once(tmp_path: Path, windows: int) -> None:
    wide: dict[str, Any] = {
        "format_version": 3,
        "storage": {"dtype": "uint32"},
        "tokenizer": {"vocab_size": 70_000},
    }
    store = _store(tmp_path, [windows // 2, windows + 1 - windows // 2], **wide)
    loader = SlidingWindowLoader(store, 1, 1, seed=3)
    assert loader.batches_per_epoch == windows
    orders = []
    for epoch in range(2 if windows <= 1000 else 1):
        loader.start_epoch(epoch)
        orders.append(_starts(loader))
        assert sorted(orders[-1]) == list(range(windows))
    if windows == 1000:
        assert orders[0] != orders[1]
        assert orders[0] != sorted(orders[0])


def test_seed_and_epoch_mix_unless_they_are_to_be_added(tmp_path: Path) -> None:
    store = _store(tmp_path)

    def order(seed: int, epoch: int, epoch_seed: str, sampling: str) -> list[int]:
        loader = SlidingWindowLoader(
            store, 2, 3, stride=None, seed=seed, epoch_seed=epoch_seed, sampling=sampling
        )
        loader.start_epoch(epoch)
        return _starts(loader)

    for sampling in ("permutation", "uniform"):
        mixed = {tuple(order(seed, epoch, "mixed", sampling)) for seed in range(3) for epoch in range(3)}
        assert len(mixed) == 9
        assert order(0, 1, "additive", sampling) == order(1, 0, "additive", sampling)
        assert order(0, 1, "additive", sampling) != order(0, 0, "additive", sampling)
    assert order(0, 1, "mixed", "ordered") == order(7, 0, "additive", "ordered")


def test_the_order_does_not_depend_on_the_digest_or_the_cut_into_shards(tmp_path: Path) -> None:
    one = _store(tmp_path / "one", [60])
    other = _store(tmp_path / "other", [20, 0, 40], preparation={"corpus": "another"})
    assert one.metadata_sha256 != other.metadata_sha256
    for sampling in ("permutation", "uniform"):
        assert _starts(SlidingWindowLoader(one, 4, 3, sampling=sampling)) == _starts(
            SlidingWindowLoader(other, 4, 3, sampling=sampling)
        )


def test_the_order_of_windows_is_frozen(tmp_path: Path) -> None:
    """If this fails, checkpoints no longer continue: raise the format_version of sampled loaders."""
    store = _store(tmp_path)
    loader = SlidingWindowLoader(store, 4, 3, seed=1)
    loader.start_epoch(2)
    assert _starts(loader)[:8] == [9, 33, 45, 36, 42, 54, 18, 30]
    uniform = SlidingWindowLoader(store, 4, 3, sampling="uniform", seed=1)
    assert _starts(uniform)[:8] == [8, 24, 9, 55, 51, 23, 45, 17]
    assert loader.state_dict() == {
        "format_version": 1,
        "strategy": "sliding_window",
        "epoch": 2,
        "position": 16,
        "seed": 1,
        "epoch_seed": "mixed",
        "batch_size": 4,
        "seq_len": 3,
        "split": "train",
        "metadata_sha256": store.metadata_sha256,
        "stride": 3,
        "sampling": "permutation",
    }


def test_uniform_draws_any_start_with_replacement_for_as_many_tokens_as_there_are(tmp_path: Path) -> None:
    store = _store(tmp_path, [11, 50])
    loader = SlidingWindowLoader(store, 2, 3, sampling="uniform")
    assert (loader.batches_per_epoch, loader.dropped_tokens, loader.skipped_tokens) == (10, 0, 0)
    seen: Counter[int] = Counter()
    for epoch in range(40):
        loader.start_epoch(epoch)
        starts = _starts(loader)
        assert len(starts) == 20
        seen.update(starts)
    assert sorted(seen) == list(range(61 - 3))
    assert any(count > 1 for count in Counter(starts).values())


@pytest.mark.parametrize(("seq_len", "stride"), [(3, 3), (3, 5), (3, 7), (5, 11), (4, 2), (4, 1)])
def test_every_target_is_read_dropped_or_skipped_and_counted(
    tmp_path: Path, seq_len: int, stride: int
) -> None:
    store = _store(tmp_path, [59])
    loader = SlidingWindowLoader(store, 4, seq_len, stride=stride)
    windows = [range(start + 1, start + seq_len + 1) for start in range(0, 59 - seq_len, stride)]
    in_windows = {target for window in windows for target in window}
    tail = 58 - max(in_windows)
    assert loader.dropped_tokens == len(windows) % 4 * seq_len + tail
    assert loader.skipped_tokens == 58 - tail - len(in_windows)
    if stride >= seq_len:
        read = loader.batches_per_epoch * 4 * seq_len
        assert read + loader.dropped_tokens + loader.skipped_tokens == 58
    assert [len(list(batches(loader))), loader.position] == [len(windows) // 4, len(windows) // 4 * 4]


def test_a_smaller_stride_gives_more_windows_of_the_same_tokens(tmp_path: Path) -> None:
    store = _store(tmp_path, [33])
    counts = [SlidingWindowLoader(store, 1, 8, stride=stride).batches_per_epoch for stride in (8, 4, 1)]
    assert counts == [4, 7, 25]


def test_a_changed_setting_is_named_with_both_values(tmp_path: Path) -> None:
    store = _store(tmp_path)
    saved = SlidingWindowLoader(store, 4, 3, stride=2, seed=1).state_dict()
    loader = SlidingWindowLoader(store, 4, 3, sampling="uniform", epoch_seed="additive")
    with pytest.raises(UserError) as caught:
        loader.load_state_dict(saved)
    for part in [
        "loader stride: checkpoint 2, config 1 (the same position would be another place",
        "loader sampling: checkpoint permutation, config uniform",
        "loader seed: checkpoint 1, config 0",
        "loader epoch_seed: checkpoint mixed, config additive",
        "set loader.sampling as it was",
    ]:
        assert part in str(caught.value)


def test_an_id_outside_of_the_vocabulary_is_named_and_nothing_is_skipped(tmp_path: Path) -> None:
    store = _store(tmp_path, [20, 30], tokenizer={"vocab_size": 41})
    loader = SlidingWindowLoader(store, 4, 4, sampling="ordered")
    for _ in range(2):
        loader.next_batch()
    for _ in range(2):
        with pytest.raises(UserError, match=r"train_00001\.npy holds token id 41 at position 41 of train"):
            loader.next_batch()
        assert loader.position == 8
    check_bad_states_are_refused(partial(SlidingWindowLoader, store, 4, 4, sampling="ordered"))


def test_inputs_and_targets_are_one_token_apart(tmp_path: Path) -> None:
    for sampling in ("permutation", "ordered", "uniform"):
        for batch in batches(SlidingWindowLoader(_store(tmp_path), 4, 5, sampling=sampling)):
            assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
            assert torch.equal(batch.inputs + 1, batch.targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 60}, r"loader\.seq_len=60 needs 61 tokens, but train has 60 \(.*seq_len<=59"),
        ({"batch_size": 20}, r"loader\.batch_size=20 needs 20 windows, but train has 19 .*batch_size<=19 or"),
        ({"batch_size": 20, "world_size": 2}, r"has 19 .*loader\.batch_size<=18 or"),
        ({"batch_size": 20, "sampling": "uniform"}, r"batch_size=20 with loader\.seq_len=3 needs 61 tokens"),
        ({"sampling": "uniform", "stride": 3}, r"stride=3 means nothing with loader\.sampling=uniform"),
        ({"sampling": "random"}, r"loader\.sampling='random' must be one of permutation, ordered, uniform"),
        ({"stride": 0}, r"loader\.stride=0 must be an integer of at least 1"),
        ({"stride": True}, r"loader\.stride=True must be"),
        ({"seq_len": 0}, "seq_len=0 must be"),
        ({"batch_size": 2.0}, r"batch_size=2\.0 must be"),
        ({"batch_size": 3, "world_size": 2}, "cannot be shared by 2"),
        ({"seed": -1}, r"loader\.seed=-1 must be"),
        ({"seed": True}, r"loader\.seed=True must be"),
        ({"epoch_seed": "sum"}, r"loader\.epoch_seed='sum' must be one of mixed, additive"),
        ({"mask_boundary": "before"}, r"loader\.mask_boundary='before' must be one of none, target, after"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_when_the_loader_is_built(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        SlidingWindowLoader(_store(tmp_path), **({"batch_size": 4, "seq_len": 3} | options))


def test_make_loader_follows_the_configuration(tmp_path: Path) -> None:
    store = _store(tmp_path)
    config = SlidingWindowConfig(
        seq_len=3, batch_size=4, seed=5, prefetch=1, stride=8, epoch_seed="additive", mask_boundary="target"
    )
    with make_loader(config, store, rank=1, world_size=2) as loader:
        state = loader.state_dict()
        assert [state[key] for key in ("stride", "sampling", "seed", "epoch_seed")] == [
            8, "permutation", 5, "additive",
        ]  # fmt: skip
        assert (loader.skipped_tokens, loader.dropped_tokens) == (5 * 7, 0)
        rows = [batch.inputs.tolist() for batch in batches(loader)]
    alone = SlidingWindowLoader(store, 4, 3, stride=8, seed=5, epoch_seed="additive")
    assert rows == [batch.inputs[2:].tolist() for batch in batches(alone)]
