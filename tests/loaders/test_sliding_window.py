"""Sliding windows: which there are, in which order, and the contract of every loader."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.loaders.sliding_window import SlidingWindowLoader
from harness.storage import TokenStore, open_store
from tests.helpers_sets import write_set
from tests.loaders.loader_contract import check_sampled_loader


def _store(directory: Path, tokens: int = 60) -> TokenStore:
    stream = list(range(tokens))
    return open_store(write_set(directory, {"train": [stream[:7], stream[7:]]}), "train")


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"sampling": "ordered"}, {"sampling": "uniform"}, {"epoch_seed": "additive"}],
    ids=str,
)
def test_the_contract_of_a_loader_holds(tmp_path: Path, options: dict[str, Any]) -> None:
    check_sampled_loader(partial(SlidingWindowLoader, _store(tmp_path), 4, 3, **options))
