"""One flat stream over many files: same tokens whatever the reader, the process or the number of shards."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.storage import ShardedTokenDataset, TokenStore, open_store
from harness.storage.io import Descriptor, descriptors_kept, read_exactly
from tests.helpers_sets import write_set

EXAMPLE = {"train": [[10, 11, 12, 13], [14, 15, 16]], "val": [[1, 2]]}


@pytest.fixture(params=[True, False], ids=["mmap", "positional"])
def mmap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_worked_example(tmp_path: Path, mmap: bool) -> None:
    dataset = ShardedTokenDataset(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    assert dataset.offsets == [0, 4, 7]
    assert dataset.total_tokens == 7
    assert dataset.paths == [tmp_path / "train_00000.npy", tmp_path / "train_00001.npy"]
    assert (dataset.split, dataset.vocab_size) == ("train", 257)
    tokens = dataset.read_tokens(3, 3)
    assert (tokens.tolist(), tokens.dtype) == ([13, 14, 15], np.dtype("uint16"))
    assert dataset.read_tokens(4, 1).tolist() == [14]
    assert dataset.read_tokens(7, 0).shape == (0,)
    inputs, targets = dataset.get_batch(0, 2, 2)
    assert inputs.tolist() == [[10, 11], [12, 13]]
    assert targets.tolist() == [[11, 12], [13, 14]]
    assert inputs.dtype == targets.dtype == torch.int64
    inputs, targets = dataset.get_sequence(2, 3)
    assert (inputs.tolist(), targets.tolist()) == ([12, 13, 14], [13, 14, 15])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_read_equals_the_concatenated_shards(data: st.DataObject) -> None:
    shards = data.draw(st.lists(st.lists(st.integers(0, 256), max_size=9), min_size=1, max_size=6))
    stream = np.concatenate([np.array(shard, np.uint16) for shard in shards])
    total = len(stream)
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - start))
    length = data.draw(st.integers(0, total))
    starts = data.draw(st.lists(st.integers(0, total - length), max_size=6))
    expected = np.array([stream[s : s + length] for s in starts], np.uint16).reshape(len(starts), length)
    with tempfile.TemporaryDirectory() as folder:
        write_set(folder, {"train": shards})
        for mapped in (True, False):
            store = open_store(folder, "train", mmap=mapped)
            store.prefetch(starts, length)
            np.testing.assert_array_equal(store.read_tokens(start, count), stream[start : start + count])
            windows = store.read_windows(starts, length)
            assert (windows.dtype, windows.flags.writeable) == (np.dtype("uint16"), True)
            np.testing.assert_array_equal(windows, expected)


def test_windows_across_one_two_and_three_shards(tmp_path: Path, mmap: bool) -> None:
    write_set(tmp_path, {"train": [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]})
    store = open_store(tmp_path, "train", mmap=mmap)
    windows = store.read_windows(np.array([0, 2, 3, 6, 0]), 4)
    assert windows.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [3, 4, 5, 6], [6, 7, 8, 9], [0, 1, 2, 3]]


def test_windows_cross_empty_and_one_token_shards(tmp_path: Path, mmap: bool) -> None:
    write_set(tmp_path, {"train": [[], [0, 1], [], [2], [], [], [3, 4], []]})
    store = open_store(tmp_path, "train", mmap=mmap)
    for _ in range(2):
        assert store.read_windows([0, 1, 2], 3).tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert store.get_batch(0, 2, 2)[1].tolist() == [[1, 2], [3, 4]]
    store.prefetch([0, 1, 2], 3)


def test_long_reads_are_exact_across_pieces_and_shards(tmp_path: Path, mmap: bool) -> None:
    stream = np.random.default_rng(0).integers(0, 257, 300_000, dtype=np.uint16)
    write_set(tmp_path, {"train": [part.tolist() for part in np.split(stream, [70_000, 70_001])]})
    store = open_store(tmp_path, "train", mmap=mmap)
    np.testing.assert_array_equal(store.read_tokens(5, 299_000), stream[5:299_005])
    inputs, targets = store.get_batch(3, 4, 60_000)
    np.testing.assert_array_equal(inputs.numpy().ravel(), stream[3:240_003])
    np.testing.assert_array_equal(targets.numpy().ravel(), stream[4:240_004])


def test_uint32_sets_are_read_through_the_same_code(tmp_path: Path, mmap: bool) -> None:
    tokens = [[70_000, 1, 2], [3, 99_999]]
    large = {"format_version": 3, "storage": {"dtype": "uint32"}, "tokenizer": {"vocab_size": 100_000}}
    store = open_store(write_set(tmp_path, {"train": tokens}, **large), "train", mmap=mmap)
    assert store.read_tokens(0, 5).dtype == np.dtype("uint32")
    assert store.get_sequence(0, 4)[1].tolist() == [1, 2, 3, 99_999]


def test_what_is_read_is_owned(tmp_path: Path, mmap: bool) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    tokens = store.read_tokens(0, 4)
    windows = store.read_windows([0], 4)
    inputs, _ = store.get_batch(0, 1, 2)
    tokens[:] = 0
    windows[:] = 0
    inputs[:] = 0
    store.close()
    assert store.read_tokens(0, 4).tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("start", "count"), [(-1, 2), (0, -1), (0, 8), (8, 0), (True, 1), (0, 1.0), ("0", 1)]
)
def test_reads_outside_of_the_stream_are_value_errors(tmp_path: Path, start: Any, count: Any) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train")
    with pytest.raises(ValueError, match=r"must be an integer|has 7 tokens"):
        store.read_tokens(start, count)


@pytest.mark.parametrize("starts", [[-1], [4], [0.5], [[0, 1]], [True], 3])
def test_windows_outside_of_the_stream_are_value_errors(tmp_path: Path, starts: Any) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train")
    with pytest.raises(ValueError, match=r"one row of integers|has 7 tokens"):
        store.read_windows(starts, 4)
    with pytest.raises(ValueError, match=r"one row of integers|has 7 tokens"):
        store.prefetch(starts, 4)


def test_a_batch_outside_of_the_stream_names_the_file_and_both_ends(tmp_path: Path) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train")
    with pytest.raises(UserError, match=r"\[3, 8\).*train has 7 tokens .*metadata.json"):
        store.get_batch(3, 2, 2)
    with pytest.raises(UserError, match="batch_size=0 must be an integer of at least 1"):
        store.get_batch(0, 0, 2)


def test_id_outside_of_the_vocabulary_is_refused_by_shard_position_and_id(tmp_path: Path, mmap: bool) -> None:
    write_set(tmp_path, {"train": [[1, 2, 3], [4, 100, 5]]}, tokenizer={"vocab_size": 100})
    store = open_store(tmp_path, "train", mmap=mmap)
    assert store.get_batch(0, 1, 3)[1].tolist() == [[2, 3, 4]]
    with pytest.raises(UserError) as caught:
        store.get_batch(1, 2, 2)
    for part in [str(tmp_path / "train_00001.npy"), "id 100", "position 4", "token 1 of", "100 ids"]:
        assert part in str(caught.value)
    assert store.read_tokens(4, 1).tolist() == [100]


def test_the_largest_uint16_vocabulary_takes_every_id(tmp_path: Path) -> None:
    write_set(tmp_path, {"train": [[0, 65_535, 1]]}, tokenizer={"vocab_size": 65_536})
    assert open_store(tmp_path, "train").get_sequence(0, 2)[1].tolist() == [65_535, 1]


def test_file_cut_after_opening_is_an_error_and_never_short_data(tmp_path: Path) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=False)
    assert store.read_tokens(0, 7).tolist() == [10, 11, 12, 13, 14, 15, 16]
    path = tmp_path / "train_00001.npy"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(
        UserError, match=r"train_00001.npy is 132 bytes long, but its tokens reach to byte 134"
    ):
        store.read_tokens(0, 7)
    assert store.read_tokens(0, 6).tolist() == [10, 11, 12, 13, 14, 15]


def test_a_read_that_the_storage_fails_names_file_and_bytes_and_the_way_on() -> None:
    """A real input/output error: the file is this process's memory, and nothing is mapped at 4096."""
    path = Path("/proc/self/mem")
    with pytest.raises(UserError) as caught:
        read_exactly(path, Descriptor(path), np.empty(8, np.uint16), 4096)
    message = str(caught.value)
    assert message.startswith("/proc/self/mem cannot be read at bytes 4096 to 4112: Input/output error.")
    assert "resume= goes on with the same batches" in message


def _rewrite(path: Path) -> None:
    other = path.with_name("other.npy")
    np.save(other, np.full((path.stat().st_size - 128) // 2, 99, "<u2"))
    other.replace(path)


def _write_into(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-2] + b"\x01\x00")
    os.utime(path, ns=(1, 1))


def _make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (lambda path: os.truncate(path, 130), "size 134 then, 130 now"),
    "removed": (Path.unlink, "cannot be read: No such file"),
    "replaced by one of equal size": (_rewrite, r"inode \d+ then, \d+ now"),
    "written to": (_write_into, r"mtime_ns \d+ then, 1 now"),
    "replaced by a FIFO": (_make_fifo, "a FIFO, not a regular file"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_file_changed_before_its_first_read_is_an_error(tmp_path: Path, mmap: bool, name: str) -> None:
    change, expected = CHANGES[name]
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    copied = pickle.loads(pickle.dumps(store))
    change(tmp_path / "train_00001.npy")
    for reader in (store, copied):
        with pytest.raises(UserError, match=rf"train_00001.npy .*{expected}"):
            reader.read_tokens(4, 3)
        with pytest.raises(UserError, match=rf"train_00001.npy .*{expected}"):
            reader.prefetch([4], 3)
        assert reader.read_tokens(0, 4).tolist() == [10, 11, 12, 13]


def test_a_changed_file_is_an_error_in_forked_and_spawned_children(tmp_path: Path, mmap: bool) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    _rewrite(tmp_path / "train_00001.npy")
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply_async(store.read_tokens, (0, 4)).get(timeout=60).tolist() == [10, 11, 12, 13]
            with pytest.raises(UserError, match="is not the file that was checked"):
                pool.apply_async(store.read_tokens, (4, 3)).get(timeout=60)


def test_a_file_reopened_after_its_descriptor_was_evicted_must_be_the_same(tmp_path: Path) -> None:
    shards = [[i] for i in range(descriptors_kept() + 1)]
    store = open_store(write_set(tmp_path, {"train": shards}), "train", mmap=False)
    assert store.read_tokens(0, len(shards)).tolist() == list(range(len(shards)))
    _rewrite(tmp_path / "train_00000.npy")
    assert store.read_tokens(1, len(shards) - 1).tolist() == list(range(1, len(shards)))
    with pytest.raises(UserError, match=r"train_00000.npy is not the file that was checked"):
        store.read_tokens(0, 1)


def test_a_set_moved_or_copied_before_it_is_opened_is_the_same_set(tmp_path: Path, mmap: bool) -> None:
    write_set(tmp_path / "a", EXAMPLE)
    digest = open_store(tmp_path / "a", "train").metadata_sha256
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        store = open_store(tmp_path / name, "train", mmap=mmap)
        assert (store.metadata_sha256, store.read_tokens(3, 3).tolist()) == (digest, [13, 14, 15])


def test_an_empty_split_opens_and_has_no_tokens(tmp_path: Path) -> None:
    store = open_store(write_set(tmp_path, {"train": [[1]]}), "val")
    assert (store.offsets, store.total_tokens) == ([0], 0)
    assert store.read_tokens(0, 0).shape == (0,)
    assert store.read_windows([], 5).shape == (0, 5)


def test_files_are_opened_once(tmp_path: Path, mmap: bool) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    store.read_tokens(0, 7)
    for path in store.paths:
        path.unlink()
    assert store.read_tokens(0, 7).tolist() == [10, 11, 12, 13, 14, 15, 16]
    store.close()
    with pytest.raises(UserError, match="cannot be read"):
        store.read_tokens(0, 7)


def test_store_works_in_a_forked_child_after_use(tmp_path: Path, mmap: bool) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    store.read_tokens(0, 7)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        windows = store.read_windows([0, 3], 4).tolist()
        store.close()
        theirs.send(windows)

    process = context.Process(target=child)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == [[10, 11, 12, 13], [13, 14, 15, 16]]
    process.join(60)
    assert process.exitcode == 0
    assert store.read_tokens(3, 3).tolist() == [13, 14, 15]


def test_store_works_in_a_spawned_child_after_use(tmp_path: Path, mmap: bool) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    store.read_tokens(0, 7)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tokens = pool.apply_async(store.read_tokens, (3, 3)).get(timeout=60)
    assert tokens.tolist() == [13, 14, 15]


def test_pickled_store_carries_its_identity(tmp_path: Path) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train")
    store.read_tokens(0, 1)
    copied: TokenStore = pickle.loads(pickle.dumps(store))
    assert copied.metadata_sha256 == store.metadata_sha256
    assert copied.content_sha256 == store.content_sha256 is not None
    assert copied.read_tokens(0, 7).tolist() == store.read_tokens(0, 7).tolist()


def test_threads_read_the_same_tokens(tmp_path: Path, mmap: bool) -> None:
    shards = np.arange(4000).reshape(40, 100) % 257
    store = open_store(write_set(tmp_path, {"train": shards.tolist()}), "train", mmap=mmap)
    stream = shards.ravel()

    def read(seed: int) -> bool:
        starts = np.random.default_rng(seed).integers(0, 3750, 20)
        windows = store.read_windows(starts, 250)
        batches = [store.get_batch(start, 5, 10)[1].numpy().ravel() for start in starts.tolist()]
        return np.array_equal(windows, stream[starts[:, None] + np.arange(250)]) and np.array_equal(
            batches, stream[starts[:, None] + np.arange(1, 51)]
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(40)))


_MANY_SHARDS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from harness.storage import open_store
stores = [open_store(sys.argv[1], split, mmap=sys.argv[2] == "True") for split in ("train", "val")]
for store in stores:
    for sweep in range(2):
        store.prefetch(range(0, 880, 7), 20)
        assert store.read_tokens(0, 900).tolist() == [i % 257 for i in range(900)]
print(len(os.listdir("/dev/fd")))
"""


def test_300_shards_are_read_with_64_descriptors(tmp_path: Path, mmap: bool) -> None:
    shards = (np.arange(900).reshape(300, 3) % 257).tolist()
    write_set(tmp_path, {"train": shards, "val": shards})
    command = [sys.executable, "-c", _MANY_SHARDS, str(tmp_path), str(mmap)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 45


def test_mappings_keep_no_descriptor(tmp_path: Path) -> None:
    store = open_store(write_set(tmp_path, {"train": [[i] for i in range(100)]}), "train")
    before = len(os.listdir("/dev/fd"))
    store.read_tokens(0, 100)
    assert len(os.listdir("/dev/fd")) == before


def test_a_file_system_that_takes_no_hints_is_read_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    store = ShardedTokenDataset(write_set(tmp_path, {"train": [[1, 2, 3]]}), "train")
    store.prefetch([0], 2)
    assert store.read_tokens(0, 2).tolist() == [1, 2]


def test_prefetch_asks_the_system_for_exactly_the_bytes_of_the_windows(
    tmp_path: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(write_set(tmp_path, EXAMPLE), "train", mmap=mmap)
    asked: list[tuple[str, int, int]] = []
    advise = os.posix_fadvise

    def spy(fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, size))
        advise(fd, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", spy)
    store.prefetch([3, 0], 3)
    first, second = "train_00000.npy", "train_00001.npy"
    assert asked == [(first, 128, 6), (first, 134, 2), (second, 128, 4)]
