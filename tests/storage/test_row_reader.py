"""Rows out of mapped files: two ways to fetch them, one answer."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.storage import RowReader
from harness.storage.row_bytes import _GAP, _SPAN

WAYS = {"direct": False, "parallel": True, "adaptive": None}
DTYPES = ["<u2", "<u4", ">u2", "?", "<i8", "<f4", "S3", "u2,?"]


@pytest.fixture(params=WAYS)
def reader(request: pytest.FixtureRequest) -> Iterator[RowReader]:
    with RowReader(WAYS[request.param]) as reader:
        yield reader


def _write(path: Path, rows: int, columns: int, dtype: Any = "<u2", seed: int = 0) -> np.ndarray[Any, Any]:
    array = np.random.default_rng(seed).integers(0, 1 << 15, (rows, columns)).astype(dtype)
    array.tofile(path)
    return array


def test_the_worked_example_of_paired_tokens_and_masks(tmp_path: Path, reader: RowReader) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 32, (100, 1025), dtype=np.uint32)
    masks = rng.integers(0, 2, (100, 1025)).astype(np.bool_)
    tokens.tofile(tmp_path / "train.bin")
    masks.tofile(tmp_path / "train.bin.mask")
    sources = (
        reader.map(str(tmp_path / "train.bin"), np.uint32, (100, 1025)),
        reader.map(str(tmp_path / "train.bin.mask"), np.bool_, (100, 1025)),
    )
    for ids in ([9, 2, 9], [0, 99]):
        samples, padding = reader.read(sources, np.array(ids, dtype=np.int64))
        assert (samples.dtype, padding.dtype) == (np.dtype("uint32"), np.dtype("bool"))
        np.testing.assert_array_equal(samples, tokens[ids])
        np.testing.assert_array_equal(padding, masks[ids])


def test_the_example_in_the_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    documentation = inspect.cleandoc(RowReader.__doc__ or "")
    example = documentation.split("::\n", 1)[1].split("\nKeep one reader", 1)[0]
    exec(textwrap.dedent(example), {})


@st.composite
def _requests(draw: st.DrawFn) -> dict[str, Any]:
    """Files, slices of their mappings and row ids, all of one number of rows."""
    rows = draw(st.integers(1, 12))
    first = draw(st.integers(0, rows - 1))
    kept = slice(first, draw(st.integers(first + 1, rows)), draw(st.integers(1, 3)))
    sources = []
    for _ in range(draw(st.integers(1, 3))):
        columns = draw(st.integers(1, 9))
        left = draw(st.integers(0, columns - 1))
        right = draw(st.integers(left + 1, columns))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        before, after = draw(st.integers(0, 9)), draw(st.integers(0, 3))
        content = draw(st.integers(0, 1 << 32))
        sources.append((dtype, columns, (kept, slice(left, right)), before, after, content))
    ids = draw(st.lists(st.integers(0, len(range(rows)[kept]) - 1), max_size=14))
    id_type = draw(st.sampled_from([np.int64, np.uint8, np.uint64, list]))
    return {"rows": rows, "sources": sources, "ids": ids if id_type is list else np.array(ids, id_type)}


@settings(max_examples=120, deadline=None)
@given(request=_requests())
def test_every_way_agrees_with_numpy_bit_for_bit(request: dict[str, Any]) -> None:
    rows, ids = request["rows"], request["ids"]
    indices = np.asarray(ids).astype(np.intp)
    with tempfile.TemporaryDirectory() as folder:
        expected = []
        for index, (dtype, columns, kept, before, after, content) in enumerate(request["sources"]):
            size = rows * columns * dtype.itemsize
            data = np.random.default_rng(content).bytes(before + size + after)
            Path(folder, str(index)).write_bytes(data)
            array = np.frombuffer(data[before : before + size], dtype).reshape(rows, columns)
            expected.append(array[kept][indices])
        for way in WAYS.values():
            with RowReader(way) as reader:
                sources = tuple(
                    reader.map(f"{folder}/{index}", dtype, (rows, columns), before)[kept]
                    for index, (dtype, columns, kept, before, *_) in enumerate(request["sources"])
                )
                found = reader.read(sources, ids)
                assert all(not source.flags.writeable for source in sources)
            for ours, right in zip(found, expected, strict=True):
                assert (ours.dtype, ours.shape) == (right.dtype, right.shape)
                assert ours.tobytes() == right.tobytes()
                assert ours.flags.writeable
                assert ours.flags.c_contiguous


def test_rows_far_apart_and_rows_read_at_once_are_the_same_rows(tmp_path: Path, reader: RowReader) -> None:
    """Gaps just within and just beyond what is skipped, and more than is read at once."""
    width = 1000
    stride = _GAP + width
    rows = 2 * _SPAN // stride + 3
    array = np.zeros((rows, stride), np.uint8)
    array[:, :width] = np.random.default_rng(0).integers(0, 256, (rows, width))
    array.tofile(tmp_path / "wide")
    source = reader.map(tmp_path / "wide", np.uint8, (rows, stride))
    every = np.arange(rows)
    for columns in (slice(0, width), slice(1, width), slice(0, width + 1), slice(None)):
        for ids in (every, every[::-1], every[::2], np.array([rows - 1, 0, rows - 1, 0])):
            (found,) = reader.read((source[:, columns],), ids)
            np.testing.assert_array_equal(found, array[ids, columns])


def test_what_is_read_is_a_copy_of_its_own(tmp_path: Path, reader: RowReader) -> None:
    array = _write(tmp_path / "rows", 9, 4)
    source = reader.map(tmp_path / "rows", "<u2", (9, 4))
    (found,) = reader.read((source,), [1, 1, 2])
    found[0] = 0
    np.testing.assert_array_equal(found[1:], array[[1, 2]])
    np.testing.assert_array_equal(reader.read((source, source), [1])[1], array[[1]])
    assert (tmp_path / "rows").read_bytes() == array.tobytes()


def test_one_file_is_mapped_as_rows_and_mask_at_two_offsets(tmp_path: Path, reader: RowReader) -> None:
    rows = np.arange(30, dtype="<u2").reshape(10, 3)
    mask = rows % 2 == 0
    (tmp_path / "both").write_bytes(b"head!" + rows.tobytes() + b"gap" + mask.tobytes())
    sources = (
        reader.map(tmp_path / "both", "<u2", (10, 3), offset=5),
        reader.map(tmp_path / "both", np.bool_, (10, 3), offset=5 + rows.nbytes + 3),
    )
    found = reader.read(sources, [7, 0])
    np.testing.assert_array_equal(found[0], rows[[7, 0]])
    np.testing.assert_array_equal(found[1], mask[[7, 0]])


def test_no_rows_are_rows_too(tmp_path: Path, reader: RowReader) -> None:
    (tmp_path / "empty").touch()
    _write(tmp_path / "rows", 2, 3)
    empty = reader.map(tmp_path / "empty", np.uint32, (0, 5))
    rows = reader.map(tmp_path / "rows", "<u2", (2, 3))
    none: list[Any] = [[], np.array([], np.int64)]
    for ids in none:
        found = reader.read((empty, rows[1:1], rows), ids)
        assert [array.shape for array in found] == [(0, 5), (0, 3), (0, 3)]
        assert found[0].dtype == np.uint32
    assert reader.read((), [1, 2]) == []
    with pytest.raises(UserError, match=r"row 0 was asked for .*empty\) has 0 rows"):
        reader.read((empty,), [0])


BAD_IDS: dict[str, tuple[Any, str]] = {
    "negative": ([3, -1], r"row -1 was asked for \(place 1 of 2\), but source 0 \(.*/tokens\) has 10 rows"),
    "beyond the end": (
        [10],
        r"row 10 was asked for \(place 0 of 1\), but source 0 \(.*/tokens\) has 10 rows",
    ),
    "beyond int64": (np.array([1 << 63], np.uint64), r"row 9223372036854775808 was asked for"),
    "booleans": ([True, False], "one row of integers, not bool"),
    "floats": ([1.0], "one row of integers, not float64"),
    "two dimensions": ([[1, 2]], r"one row of integers, not int64 of shape \(1, 2\)"),
    "a number": (3, r"one row of integers, not int64 of shape \(\)"),
    "text": (["1"], "one row of integers, not <U1"),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_ids_that_are_no_rows_are_refused_by_file_and_row(
    tmp_path: Path, reader: RowReader, name: str
) -> None:
    ids, expected = BAD_IDS[name]
    _write(tmp_path / "tokens", 10, 4)
    source = reader.map(tmp_path / "tokens", "<u2", (10, 4))
    with pytest.raises(UserError, match=expected):
        reader.read((source,), ids)


def test_an_id_must_be_a_row_of_every_source(tmp_path: Path, reader: RowReader) -> None:
    _write(tmp_path / "tokens", 10, 4)
    source = reader.map(tmp_path / "tokens", "<u2", (10, 4))
    with pytest.raises(UserError, match=r"row 7 was asked for \(place 2 of 3\), but source 1 .* has 6 rows"):
        reader.read((source, source[4:]), [0, 5, 7])


BAD_SOURCES: dict[str, Callable[[np.ndarray[Any, Any], Path], Any]] = {
    "a list": lambda m, p: ([[1, 2]],),
    "an array of its own": lambda m, p: (np.ones((10, 4), np.uint16),),
    "a copy": lambda m, p: (m.copy(),),
    "a pickled mapping": lambda m, p: (pickle.loads(pickle.dumps(m)),),
    "a memmap": lambda m, p: (np.memmap(p, "<u2", "r", shape=(10, 4)),),
    "every second column": lambda m, p: (m[:, ::2],),
    "columns backwards": lambda m, p: (m[:, ::-1],),
    "rows backwards": lambda m, p: (m[::-1],),
    "one row, many times": lambda m, p: (np.broadcast_to(m[0], (10, 4)),),
    "transposed": lambda m, p: (m.T,),
    "no columns": lambda m, p: (m[:, 2:2],),
    "one dimension": lambda m, p: (m[0],),
    "three dimensions": lambda m, p: (m[None],),
    "beyond the mapping": lambda m, p: (np.lib.stride_tricks.as_strided(m, (11, 4), (8, 2)),),
    "a bare array": lambda m, p: m,
    "a good one, then a bad one": lambda m, p: (m, None),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_sources_that_are_no_mappings_are_refused_the_same_on_every_way(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "tokens", 10, 4)
    messages = set()
    for way in WAYS.values():
        with RowReader(way) as reader:
            sources = BAD_SOURCES[name](reader.map(tmp_path / "tokens", "<u2", (10, 4)), tmp_path / "tokens")
            with pytest.raises(
                UserError, match=r"is neither a mapping of this reader|must be a tuple"
            ) as caught:
                reader.read(sources, [0, 1])
            messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_mapping_of_another_reader_is_refused(tmp_path: Path, reader: RowReader) -> None:
    _write(tmp_path / "tokens", 10, 4)
    other = RowReader().map(tmp_path / "tokens", "<u2", (10, 4))
    with pytest.raises(UserError, match="neither a mapping of this reader"):
        reader.read((other,), [0])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("<u2", (11, 4)), r"tokens has 80 bytes, but 11 rows of 4 uint16 from byte 0 need 88"),
        (("<u2", (10, 4), 2), r"tokens has 80 bytes, but 10 rows of 4 uint16 from byte 2 need 82"),
        (("<u4", (10, 4)), r"tokens has 80 bytes, but 10 rows of 4 uint32 from byte 0 need 160"),
        (("<u2", (10,)), "rows, columns and the offset must be integers"),
        (("<u2", (10, 2, 2)), "rows, columns and the offset must be integers"),
        (("<u2", (10.0, 4)), "rows, columns and the offset must be integers"),
        (("<u2", (True, 4)), "rows, columns and the offset must be integers"),
        (("<u2", (-1, 4)), "at least 0 rows, 1 column"),
        (("<u2", (10, 0)), "at least 0 rows, 1 column"),
        (("<u2", (1, 4), -8), "an offset of 0 bytes"),
        ((object, (1, 4)), "must have one size and hold no objects"),
        (("S", (1, 4)), "must have one size and hold no objects"),
        (("no dtype", (1, 4)), "dtype='no dtype'"),
    ],
)
def test_a_shape_that_the_file_does_not_hold_is_refused_with_both_sizes(
    tmp_path: Path, arguments: tuple[Any, ...], expected: str
) -> None:
    _write(tmp_path / "tokens", 10, 4)
    with RowReader() as reader, pytest.raises(UserError, match=expected):
        reader.map(tmp_path / "tokens", *arguments)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with RowReader() as reader:
        with pytest.raises(UserError, match=r"absent cannot be read: No such file"):
            reader.map(tmp_path / "absent", np.uint8, (1, 1))
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(UserError, match=r"fifo cannot be read: it is a FIFO"):
            reader.map(tmp_path / "fifo", np.uint8, (1, 1))


def _replace(path: Path) -> None:
    twin = path.with_name("twin")
    twin.write_bytes(path.read_bytes())
    twin.replace(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: os.truncate(path, 8), "size 80 then, 8 now"),
    "emptied": (lambda path: os.truncate(path, 0), "size 80 then, 0 now"),
    "grown": (lambda path: os.truncate(path, 88), "size 80 then, 88 now"),
    "replaced": (_replace, r"inode \d+ then, \d+ now"),
    "removed": (Path.unlink, "cannot be read: No such file"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_changed_is_an_error_on_every_way(tmp_path: Path, reader: RowReader, name: str) -> None:
    """Also after it was read: neither stale rows, nor the end of the process at a page that is gone."""
    change, expected = CHANGES[name]
    array = _write(tmp_path / "tokens", 10, 4)
    _write(tmp_path / "other", 10, 4)
    source = reader.map(tmp_path / "tokens", "<u2", (10, 4))
    other = reader.map(tmp_path / "other", "<u2", (10, 4))
    np.testing.assert_array_equal(reader.read((source,), [9])[0], array[[9]])
    change(tmp_path / "tokens")
    with pytest.raises(UserError, match=f"tokens .*{expected}"):
        reader.read((other, source), [9])
    with pytest.raises(UserError, match=f"tokens .*{expected}"):
        reader.map(tmp_path / "tokens", "<u2", (1, 1))
    assert reader.read((other,), [0])[0].shape == (1, 4)


def test_a_relative_path_is_the_same_file_after_a_change_of_folder(
    tmp_path: Path, reader: RowReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = _write(tmp_path / "tokens", 10, 4)
    monkeypatch.chdir(tmp_path)
    source = reader.map("tokens", "<u2", (10, 4))
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(reader.read((source,), [3])[0], array[[3]])


@contextmanager
def _forked(context: Any, target: Callable[[], Any]) -> Iterator[Any]:
    """What `target` returns in a forked child; a child that takes more than 5 seconds is an error."""
    ours, theirs = context.Pipe()

    def child() -> None:
        signal.alarm(5)
        theirs.send(target())

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.join(10)
    assert process.exitcode == 0


def test_use_fork_and_use_again_on_both_sides(tmp_path: Path, reader: RowReader) -> None:
    array = _write(tmp_path / "tokens", 300, 4)
    source = reader.map(tmp_path / "tokens", "<u2", (300, 4))

    def read() -> bool:
        return all(
            np.array_equal(reader.read((source,), [i, 299 - i])[0], array[[i, 299 - i]]) for i in range(9)
        )

    assert read()
    with _forked(multiprocessing.get_context("fork"), read) as right:
        assert right
    assert read()


def test_a_child_forked_in_the_middle_of_reads_reads(tmp_path: Path) -> None:
    """Whatever locks other threads held at that moment."""
    array = _write(tmp_path / "tokens", 3000, 400)
    stop = threading.Event()
    with RowReader(parallel=True) as reader:
        source = reader.map(tmp_path / "tokens", "<u2", (3000, 400))

        def busy() -> None:
            with RowReader(parallel=True) as other:
                rows = other.map(tmp_path / "tokens", "<u2", (3000, 400))
                while not stop.is_set():
                    other.read((rows,), np.arange(0, 3000, 300))

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            for _ in range(5):
                with _forked(
                    multiprocessing.get_context("fork"), lambda: reader.read((source,), [7, 2900, 7])[0]
                ) as rows:
                    np.testing.assert_array_equal(rows, array[[7, 2900, 7]])
        finally:
            stop.set()
            thread.join()


def _read_in_child(reader: RowReader, path: Path) -> tuple[Any, Any]:
    source = reader.map(path, "<u2", (10, 4))
    return reader._fixed, reader.read((source,), [3, 1])[0]


def test_a_reader_arrives_in_a_spawned_child_without_its_mappings(tmp_path: Path, reader: RowReader) -> None:
    array = _write(tmp_path / "tokens", 10, 4)
    source = reader.map(tmp_path / "tokens", "<u2", (10, 4))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        fixed, rows = pool.apply_async(_read_in_child, (reader, tmp_path / "tokens")).get(timeout=60)
    assert fixed is reader._fixed
    np.testing.assert_array_equal(rows, array[[3, 1]])
    with pytest.raises(UserError, match="neither a mapping of this reader"):
        pickle.loads(pickle.dumps(reader)).read((source,), [0])


_MANY_FILES = """
import os, resource, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from harness.storage import RowReader
folder, parallel = sys.argv[1], sys.argv[2] == "True"
with RowReader(parallel) as reader:
    sources = tuple(reader.map(f"{folder}/{i}", "<u2", (3, 2)) for i in range(1000))
    mapped = len(os.listdir("/dev/fd"))
    for sweep in range(2):
        for i, rows in enumerate(reader.read(sources, [2, 0])):
            assert rows.tolist() == [[i, 2], [i, 0]]
    print(mapped, len(os.listdir("/dev/fd")))
print(len(os.listdir("/dev/fd")))
"""


@pytest.mark.parametrize("parallel", [False, True])
def test_a_thousand_files_are_read_with_256_descriptors(tmp_path: Path, parallel: bool) -> None:
    for i in range(1000):
        np.array([[i, row] for row in range(3)], "<u2").tofile(tmp_path / str(i))
    command = [sys.executable, "-c", _MANY_FILES, str(tmp_path), str(parallel)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    mapped, used, closed = map(int, result.stdout.split())
    assert closed == mapped, "mappings keep no descriptor, and closing leaves none"
    assert used - mapped == (256 // 8 if parallel else 0)


def test_a_closed_reader_says_so_and_its_mappings_stay_valid(tmp_path: Path) -> None:
    array = _write(tmp_path / "tokens", 10, 4)
    with RowReader() as reader:
        source = reader.map(tmp_path / "tokens", "<u2", (10, 4))
    reader.close()
    with pytest.raises(UserError, match="closed"):
        reader.read((source,), [0])
    with pytest.raises(UserError, match="closed"):
        reader.map(tmp_path / "tokens", "<u2", (10, 4))
    np.testing.assert_array_equal(source, array)


def test_the_way_is_one_of_three() -> None:
    with pytest.raises(UserError, match="parallel=1 must be True, False or None"):
        RowReader(parallel=1)  # type: ignore[arg-type]
