"""An HDF5 set gives the same tokens as its arrays: any shards, chunks, compression, process and thread."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.prepare.hdf5_writer import write_hdf5_shard
from harness.storage import MmapTokenStore, ShardedTokenDataset, TokenStore, chunk_cache, open_store
from harness.storage.chunk_cache import Decoded
from harness.storage.manifest import write_manifest
from tests.helpers_sets import write_set

COMPRESSIONS = ("none", "gzip", "lzf")


def _set(directory: Path, shards: list[list[int]], **storage: Any) -> Path:
    return write_set(directory, {"train": shards}, storage={"format": "hdf5", **storage})


def _random_shards(seed: int, sizes: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 257, size).tolist() for size in sizes]


def _stream(shards: list[list[int]]) -> np.ndarray:
    return np.concatenate([np.array(shard, np.uint16) for shard in shards])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 700, 5000]), min_size=1, max_size=5),
    chunk=st.sampled_from([1, 2, 7, 64, 1000, 65_536]),
    compression=st.sampled_from(COMPRESSIONS),
    mmap=st.booleans(),
    data=st.data(),
)
def test_any_range_of_any_set_is_that_of_the_concatenated_arrays(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    chunk: int,
    compression: str,
    mmap: bool,
    data: st.DataObject,
) -> None:
    shards = _random_shards(0, sizes)
    folder = _set(tmp_path_factory.mktemp("set"), shards, chunk_tokens=chunk, compression=compression)
    stream, total = _stream(shards), sum(sizes)
    store = MmapTokenStore(folder, "train", mmap=mmap)
    assert store.total_tokens == total
    for _ in range(5):
        start = data.draw(st.integers(0, total))
        stop = data.draw(st.integers(start, total))
        found = store.get_slice(start, stop)
        assert found.dtype == np.dtype("<u2")
        assert found.flags.owndata
        assert np.array_equal(found, stream[start:stop])
    length = data.draw(st.integers(0, min(total, 300)))
    starts = data.draw(st.lists(st.integers(0, total - length), max_size=20))
    expected = np.array([stream[start : start + length] for start in starts]).reshape(len(starts), length)
    assert np.array_equal(store.read_windows(starts, length), expected)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_uint32_tokens_are_read_back(tmp_path: Path, compression: str) -> None:
    shards = [[0, 70_000, 65_536], [199_999]]
    write_set(
        tmp_path,
        {"train": shards},
        format_version=3,
        storage={"format": "hdf5", "dtype": "uint32", "compression": compression},
        tokenizer={"vocab_size": 200_000},
    )
    assert MmapTokenStore(tmp_path, "train").get_slice(0, 4).tolist() == [0, 70_000, 65_536, 199_999]


def test_a_store_has_the_same_face_and_content_as_the_npy_one(tmp_path: Path) -> None:
    shards = _random_shards(1, [300, 0, 1, 500])
    npy = ShardedTokenDataset(write_set(tmp_path / "npy", {"train": shards}), "train")
    hdf5 = open_store(_set(tmp_path / "hdf5", shards, compression="gzip"), "train")
    assert isinstance(hdf5, MmapTokenStore)
    assert hdf5.offsets == npy.offsets == [0, 300, 300, 301, 801]
    assert [path.name for path in hdf5.paths] == [path.with_suffix(".h5").name for path in npy.paths]
    assert (hdf5.split, hdf5.total_tokens, hdf5.vocab_size) == (npy.split, npy.total_tokens, npy.vocab_size)
    assert hdf5.content_sha256 == npy.content_sha256
    assert hdf5.metadata_sha256 != npy.metadata_sha256
    for ours, theirs in zip(hdf5.get_batch(250, 4, 50), npy.get_batch(250, 4, 50), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 3), (3, 2), (0, 6), (6, 6), (5, 7), (True, 3), (0.0, 3), (None, 3)]
)
def test_a_slice_that_is_not_inside_the_stream_is_a_value_error(
    tmp_path: Path, start: Any, stop: Any
) -> None:
    store = MmapTokenStore(_set(tmp_path, [[1, 2, 3], [4, 5]]), "train")
    with pytest.raises(ValueError, match=f"{start}|{stop}"):
        store.get_slice(start, stop)
    two: Any = np.int64(2)
    assert store.get_slice(two, 5).tolist() == [3, 4, 5]
    assert store.get_slice(5, 5).tolist() == []


def test_unfiltered_shards_are_one_mapped_run_each_and_never_read_by_h5py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = _random_shards(2, [200_000, 70_000])
    store = MmapTokenStore(_set(tmp_path, shards), "train")
    assert [extent.tokens for extent in store._extents] == [200_000, 70_000]
    assert [extent.offset % 4096 for extent in store._extents] == [0, 0]
    monkeypatch.setattr(h5py, "File", None)
    assert store.get_slice(199_999, 200_002).tolist() == [*shards[0][-1:], *shards[1][:2]]


def test_plain_and_compressed_shards_may_be_mixed(tmp_path: Path) -> None:
    shards = _random_shards(8, [3000, 2000, 1000])
    _set(tmp_path, shards, compression="lzf")
    (tmp_path / "train_00001.h5").unlink()
    write_hdf5_shard(tmp_path / "train_00001.h5", np.array(shards[1], np.uint16), chunk_tokens=77)
    store = MmapTokenStore(tmp_path, "train")
    assert np.array_equal(store.get_slice(2500, 5500), _stream(shards)[2500:5500])
    assert np.array_equal(store.read_windows([4990, 10], 900)[0], _stream(shards)[4990:5890])


def test_only_the_shards_that_the_manifest_names_are_read(tmp_path: Path) -> None:
    _set(tmp_path, [[1, 2], [3]])
    (tmp_path / "train_00002.h5").write_bytes(b"an unfinished one")
    (tmp_path / "notes.txt").write_text("hello")
    assert MmapTokenStore(tmp_path, "train").get_slice(0, 3).tolist() == [1, 2, 3]


def _digest(store: TokenStore) -> bytes:
    return b"".join(store.read_windows([i * 97 % 9000 for i in range(200)], 1000).tobytes() for _ in "ab")


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_used_store_goes_on_in_a_child_and_in_the_parent(
    tmp_path: Path, compression: str, start_method: str
) -> None:
    shards = _random_shards(3, [4000, 6000])
    store = MmapTokenStore(_set(tmp_path, shards, chunk_tokens=512, compression=compression), "train")
    expected = _digest(store)
    with multiprocessing.get_context(start_method).Pool(2) as pool:
        results = [pool.apply_async(_digest, (store,)) for _ in range(2)]
        assert _digest(store) == expected
        assert [result.get(60) for result in results] == [expected, expected]


@pytest.mark.parametrize("compression", ["gzip", "lzf"])
def test_a_child_forked_while_another_thread_decodes_reads_at_once(tmp_path: Path, compression: str) -> None:
    shards = _random_shards(4, [50_000, 50_000])
    store = MmapTokenStore(_set(tmp_path, shards, compression=compression), "train")
    expected = store.get_slice(0, 100_000).tobytes()
    stop = threading.Event()

    def decode() -> None:
        while not stop.is_set():
            store.close()
            store.get_slice(0, 100_000)

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(5):
            with context.Pool(1) as pool:
                assert pool.apply_async(store.get_slice, (0, 100_000)).get(30).tobytes() == expected
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_threads_share_one_store(tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cache, "MAX_DESCRIPTORS", 2)
    shards = _random_shards(5, [3000] * 6)
    stream = _stream(shards)
    store = MmapTokenStore(_set(tmp_path, shards, chunk_tokens=128, compression=compression), "train")
    wrong: list[int] = []

    def read(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, 18_000 - 500, 300).tolist():
            if not np.array_equal(store.get_slice(start, start + 500), stream[start : start + 500]):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_decoded_chunks_and_open_files_stay_within_their_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_cache, "MAX_DESCRIPTORS", 3)
    monkeypatch.setattr(chunk_cache, "CACHE_BYTES", 10_000)
    shards = _random_shards(6, [4000] * 10)
    store = MmapTokenStore(_set(tmp_path, shards, chunk_tokens=1024, compression="gzip"), "train")
    reader = store.reader()
    assert isinstance(reader, Decoded)
    blocks = reader._blocks
    for start in range(0, 40_000 - 500, 431):
        store.get_slice(start, start + 500)
        kept = [block.nbytes for block in blocks._blocks.values()]
        assert sum(kept) == blocks._kept <= 10_000
        assert len(blocks._open) <= 3
    assert max(kept) == 2048


def test_a_store_is_pickled_without_what_it_has_open(tmp_path: Path) -> None:
    store = MmapTokenStore(_set(tmp_path, [[1, 2, 3]], compression="gzip"), "train")
    store.get_slice(0, 3)
    assert pickle.loads(pickle.dumps(store)).get_slice(1, 3).tolist() == [2, 3]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_hints_change_nothing(tmp_path: Path, compression: str) -> None:
    shards = _random_shards(7, [3000, 0, 2000])
    store = MmapTokenStore(_set(tmp_path, shards, chunk_tokens=100, compression=compression), "train")
    store.prefetch([4500, 0, 2990, 10], 500)
    assert store.get_slice(0, 5000).tolist() == _stream(shards).tolist()
    store.prefetch([4500, 0, 2990, 10], 500)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_thousand_shards_open_and_read_with_256_descriptors(tmp_path: Path, compression: str) -> None:
    _set(tmp_path, [[], [1], [2, 2], [3, 3, 3]], chunk_tokens=4, compression=compression)
    raw = json.loads((tmp_path / "shards.json").read_text())
    raw["splits"]["train"] = {"total_tokens": 1500, "shards": raw["splits"]["train"]["shards"] * 250}
    for index, shard in enumerate(raw["splits"]["train"]["shards"]):
        raw["splits"]["train"]["shards"][index] = shard | {"file": f"train_{index:05d}.h5"}
        if index >= 4:
            shutil.copy(tmp_path / shard["file"], tmp_path / f"train_{index:05d}.h5")
    write_manifest(tmp_path, raw)
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "from harness.storage import MmapTokenStore;"
        f"store = MmapTokenStore({str(tmp_path)!r}, 'train'); n = store.total_tokens;"
        "store.prefetch([0, 700], 500);"
        "print(store.get_slice(0, n).tolist() == store.read_windows(range(n), 1)[:, 0].tolist(), n)"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 256
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.stdout.strip(), result.stderr) == ("True 1500", "")


def test_an_id_beyond_the_vocabulary_is_named_with_its_shard_and_position(tmp_path: Path) -> None:
    for compression in ("none", "gzip"):
        folder = _set(tmp_path / compression, [[1, 2, 3, 4], [5, 300, 6]], compression=compression)
        with pytest.raises(UserError, match=r"train_00001\.h5 holds token id 300 at position 5"):
            MmapTokenStore(folder, "train").get_batch(0, 1, 6)
