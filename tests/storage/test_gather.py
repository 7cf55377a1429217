"""Many windows at once: the same tokens as one by one, whatever extents and files they lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import UserError
from harness.storage import open_store
from tests.helpers_sets import write_set

EXAMPLE = {"train": [[10, 11, 12, 13], [14, 15, 16]], "val": [[1, 2]]}


@pytest.fixture(params=[True, False], ids=["mmap", "positional"])
def mmap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_inputs_and_targets_of_windows_are_shifted_by_one(tmp_path: Path, mmap: bool) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    inputs, targets = store.get_windows([4, 0, 2, 0], 2)
    assert inputs.tolist() == [[14, 15], [10, 11], [12, 13], [10, 11]]
    assert targets.tolist() == [[15, 16], [11, 12], [13, 14], [11, 12]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert [tuple(part.shape) for part in store.get_windows([], 5)] == [(0, 5), (0, 5)]


def test_windows_with_an_id_outside_of_the_vocabulary_are_refused(tmp_path: Path, mmap: bool) -> None:
    write_set(tmp_path, {"train": [[1, 2, 3], [4, 100, 5]]}, tokenizer={"vocab_size": 100})
    store = open_store(tmp_path, "train", mmap=mmap)
    assert store.get_windows(np.array([1, 0]), 2)[1].tolist() == [[3, 4], [2, 3]]
    with pytest.raises(UserError) as caught:
        store.get_windows(np.array([0, 2]), 2)
    for part in [str(tmp_path / "train_00001.npy"), "id 100", "position 4", "token 1 of", "100 ids"]:
        assert part in str(caught.value)


def test_tokens_are_read_into_an_array_of_the_stored_dtype(tmp_path: Path, mmap: bool) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    out = np.zeros(6, np.uint16)
    store.read_into(2, out[1:5])
    assert out.tolist() == [0, 12, 13, 14, 15, 0]
    store.read_into(7, out[:0])


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.zeros(2, np.int64), "one row of uint16, not into int64"),
        (np.zeros((1, 2), np.uint16), r"of shape \(1, 2\)"),
        (np.zeros(6, np.uint16), r"\[2, 8\).*has 7 tokens"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_and_left_alone(
    tmp_path: Path, out: np.ndarray[Any, Any], words: str
) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train")
    with pytest.raises(UserError, match=words):
        store.read_into(2, out)
    assert not out.any()
