"""Rows in several files are one source of a RowReader: both of its ways give the rows of the arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.storage import RowReader
from harness.storage.extents import Extent
from harness.storage.io import identity_of
from harness.storage.row_table import RowTable


def _table(folder: Path, arrays: Sequence[np.ndarray[Any, Any]], offset: int, mmap: bool = True) -> RowTable:
    """Each array in a raw file of its own, from byte `offset`, with something behind it."""
    extents = []
    for index, array in enumerate(arrays):
        path = folder / f"{array.dtype}{index}.bin"
        path.write_bytes(bytes(offset) + array.tobytes() + b"\xff" * 5)
        extents.append(Extent(path, offset, array.size, identity_of(os.stat(path))))
    return RowTable(extents, arrays[0].dtype, arrays[0].shape[1], mmap=mmap)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    width=st.sampled_from([1, 2, 7, 300]),
    dtype=st.sampled_from([np.uint8, np.uint16, np.uint32]),
    offset=st.sampled_from([0, 1, 128]),  # 1: elements that are not aligned cannot be mapped
    way=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    data=st.data(),
)
def test_any_rows_and_columns_are_those_of_the_arrays(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    width: int,
    dtype: Any,
    offset: int,
    way: tuple[bool, bool],
    data: st.DataObject,
) -> None:
    parallel, mmap = way
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 256, (size, width)).astype(dtype) for size in sizes]
    masks = [array.astype(np.bool_) for array in arrays]
    folder = tmp_path_factory.mktemp("table")
    rows, mask = (_table(folder, parts, offset, mmap) for parts in (arrays, masks))
    first = data.draw(st.integers(0, width - 1))
    stop = data.draw(st.integers(first + 1, width))
    last = sum(sizes) - 1
    ids = data.draw(st.lists(st.integers(0, last), max_size=60)) if last >= 0 else []
    with RowReader(parallel=parallel) as reader:
        for _ in range(2):
            found = reader.read((rows.columns(first, stop), mask), ids)
            assert np.array_equal(found[0], np.concatenate(arrays)[ids, first:stop].reshape(-1, stop - first))
            assert np.array_equal(found[1], np.concatenate(masks)[ids].reshape(-1, width))
            assert [array.dtype for array in found] == [np.dtype(dtype), np.bool_]
            for array in found:
                array[...] = 1  # a copy: the next round finds the files as they were
        for wrong in (last + 1, -1):
            with pytest.raises(
                UserError, match=rf"row {wrong} was asked for .*0\.bin, \.\.\.\) has {last + 1} rows"
            ):
                reader.read((rows,), [wrong])


def test_a_table_and_a_mapping_are_read_together(tmp_path: Path) -> None:
    arrays = [np.arange(12, dtype=np.uint16).reshape(4, 3), np.arange(12, 18, dtype=np.uint16).reshape(2, 3)]
    np.arange(6, dtype=np.uint8).tofile(tmp_path / "weights")
    with RowReader() as reader:
        weights = reader.map(tmp_path / "weights", np.uint8, (6, 1))
        rows, weight = reader.read((_table(tmp_path, arrays, 0), weights), [5, 0, 5])
    assert rows.tolist() == [[15, 16, 17], [0, 1, 2], [15, 16, 17]]
    assert weight.tolist() == [[5], [0], [5]]


@pytest.mark.parametrize("parallel", [True, False])
def test_another_file_in_place_of_one_of_the_table_is_refused(tmp_path: Path, parallel: bool) -> None:
    arrays = [np.zeros((4, 3), np.uint16), np.ones((4, 3), np.uint16)]
    table = _table(tmp_path, arrays, 0)
    (tmp_path / "other").write_bytes((tmp_path / "uint161.bin").read_bytes())
    (tmp_path / "other").replace(tmp_path / "uint161.bin")
    with RowReader(parallel=parallel) as reader:
        assert reader.read((table,), [0, 3])[0].tolist() == [[0, 0, 0]] * 2
        with pytest.raises(UserError, match=r"uint161\.bin is not the file that was checked"):
            reader.read((table,), [0, 4])
