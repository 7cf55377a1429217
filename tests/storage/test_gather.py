"""Many windows at once: the same tokens as one by one, whatever extents and files they lie in."""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.storage import TokenStore, open_store
from harness.storage.addresses import HUGE_PAGE, places_for
from harness.storage.extents import Extent
from harness.storage.io import FileIdentity, identity_of
from harness.storage.manifest import load_manifest, write_manifest
from harness.storage.mapped import Mapped
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
                assert (windows.dtype, windows.flags.writeable) == (np.dtype(dtype), True)
                assert windows.tolist() == [stream[s : s + length].tolist() for s in starts]
                if length > 1:
                    inputs, targets = store.get_windows(np.array(starts, np.int64), length - 1)
                    assert inputs.tolist() == windows[:, :-1].tolist()
                    assert targets.tolist() == windows[:, 1:].tolist()
            store.close()
            if length > 1:
                check_plan(store, [start for starts in batches for start in starts], length - 1, data)


def check_plan(store: TokenStore, starts: list[int], seq_len: int, data: st.DataObject) -> None:
    """Windows that were planned at once are those of `get_windows`, in whatever batches they are read."""
    plan = pickle.loads(pickle.dumps(store.plan(starts, seq_len)))
    places = st.integers(0, len(starts))
    for first, last in data.draw(st.lists(st.tuples(places, places), max_size=6)):
        if first < last:
            for got, expected in zip(
                plan.get(first, last), store.get_windows(starts[first:last], seq_len), strict=True
            ):
                assert torch.equal(got, expected)


def test_planned_windows_are_checked_at_once_and_their_files_and_ids_when_they_are_read(
    tmp_path: Path, mmap: bool
) -> None:
    write_set(tmp_path, {"train": [[1, 2, 3], [4, 100, 5]]}, tokenizer={"vocab_size": 100})
    store = open_store(tmp_path, "train", mmap=mmap)
    with pytest.raises(UserError, match=r"tokens \[4, 7\) were asked for"):
        store.plan([0, 4], 2)
    plan = store.plan([0, 1, 3, 0, 2], 2)
    for _ in range(2):
        assert plan.get(0, 1)[1].tolist() == [[2, 3]]
        for first, last in ((1, 3), (2, 5)):
            with pytest.raises(UserError, match="id 100 at position 4"):
                plan.get(first, last)
        assert plan.get(0, 2)[1].tolist() == [[2, 3], [3, 4]]
    late = open_store(tmp_path, "train", mmap=mmap).plan([0, 1, 3], 2)
    os.utime(tmp_path / "train_00001.npy", ns=(1, 1))
    assert late.get(0, 1)[1].tolist() == [[2, 3]]
    for _ in range(2):
        with pytest.raises(UserError, match=r"train_00001\.npy is not the file that was checked"):
            late.get(0, 2)
    store.close()
    with pytest.raises(UserError, match=r"train_00001\.npy is not the file that was checked"):
        plan.get(0, 2)


def test_a_plan_is_read_on_either_side_of_a_fork(tmp_path: Path, mmap: bool) -> None:
    plan = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap).plan([4, 1, 0], 2)
    expected = [[15, 16], [12, 13]]
    assert plan.get(0, 2)[1].tolist() == expected
    child = os.fork()
    if not child:
        os._exit(plan.get(0, 2)[1].tolist() != expected or plan.get(2, 3)[0].tolist() != [[10, 11]])
    assert os.waitpid(child, 0)[1] == 0
    assert plan.get(1, 3)[1].tolist() == [[12, 13], [11, 12]]


_MANY_SHARDS = """
import os, resource, sys
import numpy as np
import torch
from harness.storage import open_store
virtual = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resource.setrlimit(resource.RLIMIT_AS, (virtual + 2**28, virtual + 2**28))
store = open_store(sys.argv[1], "train")
starts = np.random.default_rng(0).integers(0, 2990, (40, 32))
for batch in starts:
    inputs, targets = store.get_windows(batch, 10)
    assert torch.equal(inputs, torch.from_numpy((batch[:, None] + np.arange(10)) % 257))
    assert torch.equal(targets, torch.from_numpy((batch[:, None] + np.arange(1, 11)) % 257))
mapped = open("/proc/self/maps").read().count(".npy")
store.close()
print(mapped, open("/proc/self/maps").read().count(".npy"), len(os.listdir("/dev/fd")))
"""


def run(script: str, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_1000_shards_are_mapped_with_few_descriptors_and_addresses_and_let_go(tmp_path: Path) -> None:
    write_set(tmp_path, {"train": (np.arange(3000).reshape(1000, 3) % 257).tolist()})
    mapped, left, descriptors = map(int, run(_MANY_SHARDS, str(tmp_path)).split())
    assert mapped > 600
    assert left == 0
    assert descriptors < 16


_TOO_FEW_ADDRESSES = """
import resource, sys
import torch
from harness.storage import open_store
virtual = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (virtual + 2**28, virtual + 2**28))
store = open_store(sys.argv[1], "train")
for _ in range(2):
    assert store.read_windows([2**29 - 2, 0], 4).tolist() == [[0, 7, 8, 0], [0, 0, 0, 0]]
    assert store.get_batch(2**29 - 1, 1, 2)[1].tolist() == [[8, 0]]
"""


def test_without_address_space_for_the_set_it_is_read_at_positions(tmp_path: Path) -> None:
    half = 2**29
    for index, marked in enumerate([half - 1, 0]):
        path = tmp_path / f"train_{index:05d}.npy"
        header = np.lib.format.header_data_from_array_1_0(np.empty(0, "<u2")) | {"shape": (half,)}
        with open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            begin = file.tell()
            file.truncate(begin + 2 * half)
            file.seek(begin + 2 * marked)
            file.write(bytes([7 + index, 0]))
    entries = [{"file": f"train_{index:05d}.npy", "tokens": half} for index in range(2)]
    raw = json.loads((write_set(tmp_path / "small", {}) / "metadata.json").read_text())
    raw["splits"]["train"] = {"total_tokens": 2 * half, "shards": entries}
    write_manifest(tmp_path, raw)
    printed = run(_TOO_FEW_ADDRESSES, str(tmp_path))
    assert f"{tmp_path} (2150 MB) cannot be mapped (Cannot allocate memory; ulimit -v may" in printed
    assert printed.count("cannot be mapped") == 1


def _misplaced(extents: Sequence[Extent], dtype: np.dtype[Any]) -> Mapped:
    """A reader that wants its first file at an odd address, where no system maps it."""
    reader = Mapped(extents, dtype)
    reader._places[str(extents[0].path)] += 1
    return reader


def test_a_file_that_cannot_be_mapped_is_read_at_positions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = open_store(write_set(tmp_path, EXAMPLE), "train")
    store = TokenStore(usual.manifest, "train", usual._extents, open_reader=_misplaced)
    for _ in range(2):
        assert store.read_windows([4, 2, 0, 1], 3).tolist() == [
            [14, 15, 16], [12, 13, 14], [10, 11, 12], [11, 12, 13],
        ]  # fmt: skip
    (record,) = caplog.records
    assert f"{tmp_path / 'train_00000.npy'} cannot be mapped (Invalid argument): it" in record.getMessage()


def test_a_mapping_lives_as_long_as_its_last_view(tmp_path: Path) -> None:
    extents = open_store(write_set(tmp_path, EXAMPLE), "train")._extents
    reader = Mapped(extents, np.dtype("<u2"))
    views = [reader.slice(0, 1, 3), reader.slice(1, 0, 2)]
    del reader
    gc.collect()
    assert [view.tolist() for view in views] == [[11, 12, 13], [14, 15]]
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del views
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@given(st.lists(st.integers(1, 3 * HUGE_PAGE), min_size=1, max_size=8))
def test_files_have_places_of_their_own_on_pages_and_large_ones_on_huge_pages(sizes: list[int]) -> None:
    places, end = places_for(sizes)
    for place, size, next_place in zip(places, sizes, [*places[1:], end], strict=True):
        assert place % (HUGE_PAGE if size >= HUGE_PAGE else resource.getpagesize()) == 0
        assert place + size <= next_place
