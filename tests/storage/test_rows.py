"""Rows on disk are the arrays that were written: any storage, shards, order, process, thread; or an error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.storage import (
    MmapTokenStore,
    PairStore,
    RowStore,
    ShardedTokenDataset,
    TokenStore,
    open_split,
    open_store,
    row_files,
)
from harness.storage.manifest import Manifest, write_manifest
from tests.helpers_sets import RowShard, random_rows, write_rows, write_set

STORAGES: dict[str, dict[str, Any]] = {
    "npy": {"format": "npy"},
    "hdf5": {"format": "hdf5"},
    "gzip": {"format": "hdf5", "compression": "gzip"},
    "lzf": {"format": "hdf5", "compression": "lzf"},
}
SHARDS = [random_rows(5, 6, seed=1), random_rows(0, 6, seed=2), random_rows(7, 6, seed=3)]
ROWS, MASK = (np.concatenate([shard[side] for shard in SHARDS]) for side in (0, 1))


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STORAGES[request.param]


def _store(directory: Path, storage: dict[str, Any] | None = None, **options: Any) -> RowStore:
    return RowStore(write_rows(directory, {"train": SHARDS}, storage=storage or {}), "train", **options)


def test_a_store_says_what_it_holds(tmp_path: Path, storage: dict[str, Any]) -> None:
    store = _store(tmp_path, storage)
    assert (store.split, store.row_width, store.vocab_size, store.dtype) == ("train", 6, 257, np.uint16)
    assert (store.total_rows, store.offsets) == (12, [0, 5, 5, 12])
    assert store.total_tokens == MASK.sum()
    extension = "npy" if storage["format"] == "npy" else "h5"
    assert store.paths == [tmp_path / f"train_0000{index}.{extension}" for index in range(3)]
    assert store.metadata_sha256 == store.manifest.metadata_sha256
    empty = RowStore(tmp_path, "val")
    assert (empty.total_rows, empty.offsets, empty.total_tokens) == (0, [0], 0)
    assert empty.read_rows([])[0].shape == (0, 6)


def test_the_content_hash_does_not_depend_on_the_storage(tmp_path: Path) -> None:
    stores = [_store(tmp_path / name, storage) for name, storage in STORAGES.items()]
    assert stores[0].content_sha256 is not None
    assert {store.content_sha256 for store in stores} == {stores[0].content_sha256}
    assert len({store.metadata_sha256 for store in stores}) == len(STORAGES)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 30, 200]), min_size=1, max_size=5).filter(any),
    width=st.sampled_from([2, 3, 65]),
    storage=st.sampled_from(sorted(STORAGES)),
    mmap=st.booleans(),
    data=st.data(),
)
def test_any_rows_of_any_set_are_those_of_the_arrays(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    width: int,
    storage: str,
    mmap: bool,
    data: st.DataObject,
) -> None:
    shards = [random_rows(size, width, seed=index) for index, size in enumerate(sizes)]
    folder = write_rows(tmp_path_factory.mktemp("set"), {"train": shards}, storage=STORAGES[storage])
    store = RowStore(folder, "train", mmap=mmap)
    all_rows, all_mask = (np.concatenate([shard[side] for shard in shards]) for side in (0, 1))
    for kind in (list, np.uint8, np.int64):
        drawn = data.draw(st.lists(st.integers(0, min(sum(sizes), 256) - 1), max_size=20))
        ids: Any = drawn if kind is list else np.array(drawn, kind)
        rows, mask = store.read_rows(ids)
        assert np.array_equal(rows, all_rows[drawn].reshape(-1, width))
        assert np.array_equal(mask, all_mask[drawn].reshape(-1, width))
        assert (rows.dtype, mask.dtype) == (np.uint16, np.bool_)
        columns = data.draw(st.integers(1, width))
        rows, mask = store.get_rows(ids, columns)
        assert np.array_equal(rows, all_rows[drawn].reshape(-1, width)[:, :columns])
        assert np.array_equal(mask, all_mask[drawn].reshape(-1, width)[:, :columns])
        assert (rows.dtype, mask.dtype) == (np.int64, np.bool_)
        assert store.count_tokens(columns) == all_mask[:, columns:].sum()


def test_rows_are_owned_and_writable_and_the_files_stay_as_they_are(
    tmp_path: Path, storage: dict[str, Any]
) -> None:
    store = _store(tmp_path, storage)
    for _ in range(2):
        rows, mask = store.read_rows([3, 3])
        assert np.array_equal(rows, ROWS[[3, 3]])
        assert np.array_equal(mask, MASK[[3, 3]])
        rows[0], mask[0] = 9, ~mask[0]


def test_rows_begun_now_and_asked_for_later_are_those_of_the_arrays(
    tmp_path: Path, storage: dict[str, Any]
) -> None:
    for mmap in (True, False):
        store = _store(tmp_path / str(mmap), storage, mmap=mmap)
        for readers in (False, True):
            ids = [11, 0, 11, 4]
            begun = [store.begin_rows(part, 4, readers=readers) for part in (ids, [7], ids)]
            begun[1].drop()
            for reading in (begun[2], begun[0]):
                rows, mask = reading.result()
                assert np.array_equal(rows, ROWS[ids][:, :4])
                assert np.array_equal(mask, MASK[ids][:, :4])
                assert (rows.dtype, mask.dtype) == (np.int64, np.bool_)
        with pytest.raises(UserError, match="row 12 was asked for"):
            store.begin_rows([12], 4, readers=True)


def test_both_ways_of_reading_rows_share_their_descriptors(tmp_path: Path) -> None:
    store = _store(tmp_path, mmap=False)
    store.read_rows([0, 11])
    store.begin_rows([0, 11], 6, readers=True).result()
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    files = [link.readlink() for link in links if link.is_symlink() and tmp_path in link.readlink().parents]
    assert len(files) == len(set(files)) == 4


def test_uint32_ids_are_read_back(tmp_path: Path, storage: dict[str, Any]) -> None:
    rows = np.array([[0, 70_000], [199_999, 65_536]], "<u4")
    folder = write_rows(
        tmp_path,
        {"train": [(rows, np.ones((2, 2), np.bool_))]},
        format_version=3,
        storage=storage | {"dtype": "uint32"},
        tokenizer={"vocab_size": 200_000},
    )
    assert RowStore(folder, "train").read_rows([1, 0])[0].tolist() == [[199_999, 65_536], [0, 70_000]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([12], "row 12 was asked for, but train has 12 rows"),
        ([3, -1, 2], "row -1 was asked for"),
        (np.array([2**63], np.uint64), "row 9223372036854775808 was asked for"),
        ([1.0], "one row of integers, not float64"),
        ([True], "one row of integers, not bool"),
        ([[1]], r"one row of integers, not int64 of shape \(1, 1\)"),
        (3, r"one row of integers, not int64 of shape \(\)"),
    ],
    ids=str,
)
def test_ids_that_are_no_rows_are_refused(tmp_path: Path, ids: Any, message: str) -> None:
    store = _store(tmp_path)
    for read in (store.read_rows, lambda ids: store.get_rows(ids, 2)):
        with pytest.raises(UserError, match=message):
            read(ids)


@pytest.mark.parametrize("column", [0, 4])
def test_a_mask_byte_that_is_neither_0_nor_1_is_refused_by_file_and_row(
    tmp_path: Path, storage: dict[str, Any], column: int
) -> None:
    mask = np.zeros((3, 6), np.uint8)
    mask[1, column] = 2
    bad = (random_rows(3, 6, seed=0)[0], mask.view(np.bool_))
    store = RowStore(write_rows(tmp_path, {"train": [SHARDS[0], bad]}, storage=storage), "train")
    file = "train_00001.mask.npy" if storage["format"] == "npy" else "train_00001.h5"
    store.read_rows([0, 5, 7])
    with pytest.raises(UserError, match=rf"{file}, row 1 \(row 6 of train\), .*byte 2 in column {column}"):
        store.read_rows([0, 6])
    if column == 4:
        assert store.get_rows([6], 4)[1].sum() == 0


def test_an_id_beyond_the_vocabulary_is_refused_by_file_row_and_column(
    tmp_path: Path, storage: dict[str, Any]
) -> None:
    rows, mask = random_rows(4, 6, seed=0)
    rows[2, 5], mask[2, 5] = 300, False
    store = RowStore(write_rows(tmp_path, {"train": [SHARDS[0], (rows, mask)]}, storage=storage), "train")
    assert store.read_rows([7])[0][0, 5] == 300
    assert store.get_rows([7], 5)[0].max() < 257
    with pytest.raises(
        UserError, match=r"train_00001\.\w+, row 2 \(row 7 of train\), holds token id 300 in colu"
    ):
        store.get_rows([0, 7], 6)


def _save(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# name -> (file, what happens to it, what the message says)
NPY_DAMAGES: dict[str, tuple[str, Callable[[Path], Any], list[str]]] = {
    "rows missing": ("train_00002.npy", Path.unlink, ["No such file"]),
    "mask missing": ("train_00002.mask.npy", Path.unlink, ["No such file"]),
    "mask a folder": (
        "train_00002.mask.npy",
        _become_a_folder,
        ["it is a folder, not a regular file"],
    ),
    "rows cut": ("train_00002.npy", _cut, ["211 bytes", "212"]),
    "rows longer": ("train_00002.npy", _append, ["213 bytes", "212"]),
    "mask cut": ("train_00002.mask.npy", _cut, ["169 bytes", "170"]),
    "wider": ("train_00002.npy", _save(np.zeros((7, 8), "<u2")), ["7 rows of 8", "7 rows of 6"]),
    "narrower": ("train_00002.npy", _save(np.zeros((7, 5), "<u2")), ["7 rows of 5", "7 rows of 6"]),
    "fewer": ("train_00002.npy", _save(np.zeros((6, 6), "<u2")), ["6 rows of 6", "7 rows of 6"]),
    "transposed": (
        "train_00002.npy",
        _save(np.asfortranarray(np.zeros((7, 6), "<u2"))),
        ["column by column", "row by row"],
    ),
    "flat": ("train_00002.npy", _save(np.zeros(42, "<u2")), ["shape (42,)", "7 rows of 6"]),
    "deep": ("train_00002.npy", _save(np.zeros((7, 6, 1), "<u2")), ["shape (7, 6, 1)", "7 rows of 6"]),
    "uint32": ("train_00002.npy", _save(np.zeros((7, 6), "<u4")), ["holds <u4", "uint16 (<u2)"]),
    "big-endian": ("train_00002.npy", _save(np.zeros((7, 6), ">u2")), ["big-endian >u2", "<u2"]),
    "mask wider": ("train_00002.mask.npy", _save(np.zeros((7, 7), "?")), ["7 rows of 7", "7 rows of 6"]),
    "mask uint8": ("train_00002.mask.npy", _save(np.zeros((7, 6), "u1")), ["holds |u1", "bool (|b1)"]),
    "no npy": ("train_00002.npy", lambda path: path.write_bytes(b"x" * 212), ["b'xxxxxx'", "NUMPY"]),
}


@pytest.mark.parametrize("name", NPY_DAMAGES)
def test_a_damaged_npy_file_is_refused_when_the_split_is_opened(tmp_path: Path, name: str) -> None:
    file, damage, expected = NPY_DAMAGES[name]
    write_rows(tmp_path, {"train": SHARDS, "val": [random_rows(2, 6, seed=9)]})
    damage(tmp_path / file)
    with pytest.raises(UserError) as caught:
        RowStore(tmp_path, "train")
    for part in [str(tmp_path / file), "prepare.overwrite=true", *expected]:
        assert part in str(caught.value)
    assert RowStore(tmp_path, "val").total_rows == 2


def _hdf5(change: Callable[[h5py.File], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)

    return damage


def _put(name: str, array: np.ndarray) -> Callable[[Path], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = array

    return _hdf5(change)


HDF5_DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (Path.unlink, ["No such file"]),
    "mask missing": (_hdf5(lambda file: file.__delitem__("mask")), ["no dataset 'mask'", "there is: rows"]),
    "mask wider": (_put("mask", np.zeros((7, 7), "?")), ["(7, 7)", "(7, 6)"]),
    "fewer rows": (_put("rows", np.zeros((6, 6), "<u2")), ["(6, 6)", "(7, 6)"]),
    "swapped": (
        _hdf5(lambda file: file.move("mask", "x") or file.move("rows", "mask") or file.move("x", "rows")),
        ["holds |b1", "<u2"],
    ),
    "cut": (_cut, ["no whole HDF5 file"]),
    "another file's": (
        _hdf5(lambda file: file["mask"].attrs.__setitem__("sha256", np.bytes_("0" * 64))),
        ["sha256='000"],
    ),
}


@pytest.mark.parametrize("name", HDF5_DAMAGES)
def test_a_damaged_hdf5_file_is_refused_when_the_split_is_opened(tmp_path: Path, name: str) -> None:
    damage, expected = HDF5_DAMAGES[name]
    write_rows(tmp_path, {"train": SHARDS}, storage=STORAGES["hdf5"])
    path = tmp_path / "train_00002.h5"
    damage(path)
    with pytest.raises(UserError) as caught:
        RowStore(tmp_path, "train")
    for part in [str(path), "prepare.overwrite=true", *expected]:
        assert part in str(caught.value)


def test_files_of_another_shape_in_each_others_place_are_refused(tmp_path: Path) -> None:
    sides = {"train.pos": [random_rows(4, 6, seed=0)], "train.neg": [random_rows(4, 5, seed=1)]}
    write_rows(tmp_path, sides)
    names = ("train_pos_00000", "train_neg_00000", "x")
    for kind in ("npy", "mask.npy"):
        for name, other in ((names[0], names[2]), (names[1], names[0]), (names[2], names[1])):
            (tmp_path / f"{name}.{kind}").rename(tmp_path / f"{other}.{kind}")
    with pytest.raises(UserError, match=r"train_pos_00000\.npy holds 4 rows of 5, but .* says 4 rows of 6"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize("file", ["train_00000.npy", "train_00002.mask.npy"])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_replaced_after_the_opening_is_never_read(tmp_path: Path, file: str, mmap: bool) -> None:
    store = _store(tmp_path, mmap=mmap)
    shutil.copy(tmp_path / file, tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / file)
    with pytest.raises(UserError, match=rf"{file} is not the file that was checked.*inode"):
        store.read_rows([0, 11])


def test_a_set_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("set", "other"):
        write_rows(tmp_path / name, {"train": SHARDS})

    def swapped(manifest: Manifest, split: str) -> list[row_files.RowShard]:
        (tmp_path / "set").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "set")
        return row_files.row_shards(manifest, split)

    monkeypatch.setattr("harness.storage.rows.row_shards", swapped)
    with pytest.raises(UserError, match=r"metadata.json was replaced while the set was being opened"):
        RowStore(tmp_path / "set", "train")


def _sum(store: RowStore) -> int:
    rows, mask = store.read_rows(range(store.total_rows))
    return int(rows.sum()) + int(mask.sum())


def _child(store: RowStore, queue: Any) -> None:
    queue.put(_sum(store))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_used_store_is_used_again_on_both_sides_of_a_process(
    tmp_path: Path, storage: dict[str, Any], method: str
) -> None:
    store = _store(tmp_path, storage)
    expected = _sum(store)
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_child, args=(store, queue))
    child.start()
    assert _sum(store) == expected
    assert queue.get(timeout=60) == expected
    child.join(60)
    assert child.exitcode == 0


def test_a_store_is_pickled_and_closed_and_used_again(tmp_path: Path, storage: dict[str, Any]) -> None:
    store = _store(tmp_path, storage)
    expected = _sum(store)
    open_files = len(os.listdir("/proc/self/fd"))
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= open_files
    assert not any(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert _sum(store) == expected
    assert _sum(pickle.loads(pickle.dumps(store))) == expected


def test_threads_read_one_store_at_once(tmp_path: Path, storage: dict[str, Any]) -> None:
    store = _store(tmp_path, storage)
    wrong: list[int] = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(50):
            ids = random.integers(0, 12, 8)
            rows, mask = store.read_rows(ids)
            if not (np.array_equal(rows, ROWS[ids]) and np.array_equal(mask, MASK[ids])):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from harness.storage import RowStore
for mmap in (True, False)[: int(sys.argv[2])]:
    store = RowStore(sys.argv[1], "train", mmap=mmap)
    rows, mask = store.read_rows(range(store.total_rows))
    print(len(store.paths), store.total_rows, int(rows.sum()), int(mask.sum()), store.count_tokens(2))
"""


@pytest.mark.parametrize(("name", "shards", "ways"), [("npy", 1000, 2), ("gzip", 300, 1)])
def test_more_shards_than_a_process_may_have_files(tmp_path: Path, name: str, shards: int, ways: int) -> None:
    storage = STORAGES[name]
    rows, mask = random_rows(3, 4, seed=0)
    write_rows(tmp_path, {"train": [(rows, mask)]}, storage=storage)
    manifest = RowStore(tmp_path, "train").manifest
    entry = manifest.raw["splits"]["train"]["shards"][0]
    entries = []
    for index in range(shards):
        names = {
            key: entry[key].replace("_00000", f"_{index:05d}")
            for key in ("file", "mask_file")
            if key in entry
        }
        for key, name in names.items():
            if index:
                shutil.copyfile(tmp_path / entry[key], tmp_path / name)
        entries.append(entry | names)
    train = {"total_tokens": shards * int(mask.sum()), "shards": entries}
    write_manifest(tmp_path, manifest.raw | {"splits": manifest.raw["splits"] | {"train": train}})
    done = subprocess.run(
        [sys.executable, "-c", _MANY, str(tmp_path), str(ways)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    sums = (shards * part.sum() for part in (rows, mask, mask[:, 2:]))
    assert done.stdout.splitlines() == [" ".join(map(str, (shards, 3 * shards, *sums)))] * ways


def test_a_split_is_opened_by_its_layout(tmp_path: Path) -> None:
    stream = write_set(tmp_path / "stream", {"train": [[1, 2, 3]]})
    hdf5 = write_set(tmp_path / "hdf5", {"train": [[1, 2, 3]]}, storage={"format": "hdf5"})
    rows = write_rows(tmp_path / "rows", {"train": SHARDS})
    pairs = write_rows(tmp_path / "pairs", _pairs())
    for folder, kind in (
        (stream, ShardedTokenDataset),
        (hdf5, MmapTokenStore),
        (rows, RowStore),
        (pairs, PairStore),
    ):
        for split in ("train", "val"):
            store = open_split(folder, split)
            assert type(store) is kind
            assert store.split == split
        with pytest.raises(UserError, match="split='test' must be one of train, val"):
            open_split(folder, "test")
    with pytest.raises(UserError, match=r"does not exist.*Prepare it: make it"):
        open_split(tmp_path / "none", "train", prepare_command="make it")


def _pairs() -> dict[str, list[RowShard]]:
    return {"train.pos": [random_rows(5, 6, seed=1)], "train.neg": [random_rows(5, 4, seed=2)]}


def test_a_pair_store_is_both_sides_of_one_split(tmp_path: Path) -> None:
    store = open_split(write_rows(tmp_path / "a", _pairs()), "train")
    assert isinstance(store, PairStore)
    assert (store.split, store.total_rows, store.row_width) == ("train", 5, 6)
    assert (store.pos.row_width, store.neg.row_width) == (6, 4)
    assert store.total_tokens == store.pos.total_tokens + store.neg.total_tokens
    assert store.paths == [*store.pos.paths, *store.neg.paths]
    assert [path.name for path in store.paths] == ["train_pos_00000.npy", "train_neg_00000.npy"]
    assert store.content_sha256 == store.pos.content_sha256
    rows = _pairs()["train.neg"][0][0]
    assert np.array_equal(store.neg.read_rows([4, 0])[0], rows[[4, 0]])
    store.close()
    other = RowStore(write_rows(tmp_path / "b", _pairs(), preparation={"corpus": "b"}), "train.neg")
    for pos, neg in ((store.neg, store.pos), (store.pos, store.pos), (store.pos, other)):
        with pytest.raises(UserError, match="are not pos and neg of one split"):
            PairStore(pos, neg)
    with pytest.raises(UserError, match=r"must be one of train\.pos, train\.neg, val\.pos, val\.neg"):
        RowStore(tmp_path / "a", "train")


def test_a_store_of_another_layout_is_refused_with_both_and_the_command(tmp_path: Path) -> None:
    stream = write_set(tmp_path / "stream", {"train": [[1, 2, 3]]})
    rows = write_rows(tmp_path / "rows", {"train": SHARDS}, storage=STORAGES["hdf5"])
    pairs = write_rows(tmp_path / "pairs", _pairs())
    command = "python scripts/prepare_data.py data={} corpus=test tokenizer=byte loader={}"
    cases: list[tuple[Callable[[], TokenStore | RowStore], list[str]]] = [
        (
            lambda: RowStore(stream, "train"),
            ["layout=rows", "layout=stream", command.format("npy", "padded_rows")],
        ),
        (
            lambda: open_store(rows, "train"),
            ["layout=stream", "layout=rows", command.format("hdf5", "sequential")],
        ),
        (lambda: MmapTokenStore(rows, "val"), ["layout=stream", "layout=rows", str(rows)]),
        (lambda: ShardedTokenDataset(pairs, "train"), ["layout=stream", "pairs of padded rows", str(pairs)]),
    ]
    for open_it, expected in cases:
        with pytest.raises(UserError) as caught:
            open_it()
        for part in expected:
            assert part in str(caught.value)
