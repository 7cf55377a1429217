"""Boundary masks: which targets do not count, in every order, with the inputs as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import model
from harness.config_groups import LoaderConfig, SlidingWindowConfig
from harness.errors import UserError
from harness.loaders import SlidingWindowLoader, TokenDataLoader, make_loader
from harness.loaders.batch import IGNORE
from harness.storage import TokenStore, open_store
from tests.helpers_sets import write_set
from tests.loaders.loader_contract import batches

# Documents of one, two and no tokens; 0 ends each. A document's last target is a boundary.
STREAM = [0, 5, 0, 6, 7, 0, 0, 8, 9]

LOADERS: dict[str, Callable[..., Any]] = {
    "sequential": TokenDataLoader,
    "ordered": lambda *args, **options: SlidingWindowLoader(*args, sampling="ordered", **options),
}


def _store(directory: Path, **manifest: Any) -> TokenStore:
    return open_store(write_set(directory, {"train": [STREAM[:4], STREAM[4:]]}, **manifest), "train")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("mode", "targets"),
    [
        ("none", [[5, 0, 6, 7], [0, 0, 8, 9]]),
        ("target", [[5, -100, 6, 7], [-100, -100, 8, 9]]),
        ("after", [[-100, 0, -100, 7], [0, -100, -100, 9]]),
    ],
)
def test_the_mode_says_which_targets_do_not_count(
    tmp_path: Path, loader: str, mode: str, targets: list[list[int]]
) -> None:
    batch = LOADERS[loader](_store(tmp_path), 2, 4, mask_boundary=mode).next_batch()
    assert batch.inputs.tolist() == [[0, 5, 0, 6], [7, 0, 0, 8]]
    assert batch.targets.tolist() == targets
    assert batch.targets.dtype == torch.int64


@pytest.mark.parametrize("sampling", ["permutation", "uniform"])
@pytest.mark.parametrize("mode", ["target", "after"])
def test_masks_change_targets_only_and_neither_order_nor_cursor(
    tmp_path: Path, sampling: str, mode: str
) -> None:
    store = _store(tmp_path)
    plain = SlidingWindowLoader(store, 1, 2, sampling=sampling)
    masked = SlidingWindowLoader(store, 1, 2, sampling=sampling, mask_boundary=mode)
    for a, b in zip(batches(plain), batches(masked), strict=True):
        where = a.targets.eq(0) if mode == "target" else a.inputs.eq(0)
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(b.targets, torch.where(where, -100, a.targets))
        assert a.cursor == b.cursor


def test_the_boundary_is_the_tokenizers_own(tmp_path: Path) -> None:
    store = _store(tmp_path, tokenizer={"boundary_token_id": 7})
    batch = TokenDataLoader(store, 2, 4, mask_boundary="target").next_batch()
    assert batch.targets.tolist() == [[5, 0, 6, -100], [0, 0, 8, 9]]


def test_the_sequential_state_keeps_its_six_keys(tmp_path: Path) -> None:
    state = TokenDataLoader(_store(tmp_path), 2, 4, mask_boundary="after").state_dict()
    assert list(state) == ["format_version", "position", "batch_size", "seq_len", "split", "metadata_sha256"]


@pytest.mark.parametrize("loader", LOADERS)
def test_a_set_that_names_no_boundary_cannot_be_masked(tmp_path: Path, loader: str) -> None:
    store = _store(tmp_path, tokenizer={"boundary_token_id": None})
    assert LOADERS[loader](store, 2, 4).next_batch().targets[0, 1] == 0
    for mode in ("target", "after"):
        with pytest.raises(UserError) as caught:
            LOADERS[loader](store, 2, 4, mask_boundary=mode)
        for part in (f"loader.mask_boundary={mode}", str(tmp_path), "Use loader.mask_boundary=none"):
            assert part in str(caught.value)
    with pytest.raises(UserError, match="mask_boundary='all' must be one of none, target, after"):
        LOADERS[loader](store, 2, 4, mask_boundary="all")


def test_the_configuration_reaches_the_loader(tmp_path: Path) -> None:
    for config in (
        LoaderConfig(batch_size=2, seq_len=4, mask_boundary="target"),
        SlidingWindowConfig(batch_size=2, seq_len=4, sampling="ordered", mask_boundary="target"),
    ):
        with make_loader(config, _store(tmp_path)) as loader:
            assert loader.next_batch().targets.tolist() == [[5, -100, 6, 7], [-100, -100, 8, 9]]


def test_the_model_ignores_what_the_loaders_mark() -> None:
    assert IGNORE == model.IGNORE
