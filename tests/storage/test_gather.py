"""Many windows at once: the same tokens as one by one, whatever extents and files they lie in."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.storage import TokenStore, open_store
from harness.storage.extents import Extent
from harness.storage.io import FileIdentity, identity_of
from harness.storage.manifest import load_manifest
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


def chunked(directory: Path, dtype: str, sizes: list[int], seed: int) -> tuple[TokenStore, TokenStore, Any]:
    """A mapped and a positional store over two files in which extents lie in any order with gaps, one of
    them at an odd byte, and the stream they make."""
    rng = np.random.default_rng(seed)
    stream = rng.integers(0, 65_000, sum(sizes)).astype(dtype)
    version = {"uint16": 2, "uint32": 3}[dtype]
    write_set(
        directory,
        {"train": [stream.tolist()]},
        format_version=version,
        storage={"dtype": dtype},
        tokenizer={"vocab_size": {2: 65_536, 3: 70_000}[version]},
    )
    manifest = load_manifest(directory)
    half = len(sizes) // 2
    parts = np.split(stream, np.cumsum(sizes)[:-1])
    extents = [
        *_scattered(directory / "a", parts[:half], rng),
        *_scattered(directory / "b", parts[half:], rng),
        Extent(directory / "nothing", 0, 0, FileIdentity(0, 0, 0, 0)),
    ]
    mapped, positional = (TokenStore(manifest, "train", extents, mmap=mmap) for mmap in (True, False))
    return mapped, positional, stream


def _scattered(path: Path, parts: list[Any], rng: np.random.Generator) -> list[Extent]:
    data = bytearray(b"\xff" * 5)
    offsets = {}
    for index in rng.permutation(len(parts)).tolist():
        size = parts[index].itemsize
        odd = int(rng.integers(0, 8) == 0)
        data += b"\xff" * (-len(data) % size + odd)
        offsets[index] = len(data)
        data += parts[index].tobytes()
    path.write_bytes(data)
    file = identity_of(path.stat())
    return [Extent(path, offsets[i], len(part), file) for i, part in enumerate(parts)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_windows_of_scattered_extents_equal_those_of_the_stream(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=2, max_size=9).filter(any))
    dtype = data.draw(st.sampled_from(["uint16", "uint32"]))
    total = sum(sizes)
    length = data.draw(st.integers(0, total))
    batches = data.draw(st.lists(st.lists(st.integers(0, total - length), max_size=8), max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        *stores, stream = chunked(Path(folder), dtype, sizes, data.draw(st.integers(0, 99)))
        for store in stores:
            for starts in batches:
                windows = store.read_windows(starts, length)
                assert (windows.dtype, windows.flags.owndata) == (np.dtype(dtype), True)
                assert windows.tolist() == [stream[s : s + length].tolist() for s in starts]
                if length > 1:
                    inputs, targets = store.get_windows(np.array(starts, np.int64), length - 1)
                    assert inputs.tolist() == windows[:, :-1].tolist()
                    assert targets.tolist() == windows[:, 1:].tolist()
            store.close()
