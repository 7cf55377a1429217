"""An HDF5 shard is whole under its name or not there, and holds exactly the tokens that were given."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from harness.errors import UserError
from harness.prepare import hdf5_files
from harness.prepare.hdf5_writer import HDF5ShardWriter, write_hdf5_rows, write_hdf5_shard


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_shard_holds_the_tokens_their_count_and_their_hash(
    tmp_path: Path, dtype: str, compression: str
) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 10_007).astype(dtype)
    with HDF5ShardWriter(tmp_path / "a.h5", dtype=dtype, chunk_tokens=100, compression=compression) as writer:
        writer.write(tokens[:7].tolist())
        writer.write(tokens[7:99], documents=2)
        writer.write(np.zeros(0, np.int64), documents=0)
        writer.write(tokens[99:5000].astype(np.int64), documents=3)
        writer.write(tokens[5000:])
    with h5py.File(tmp_path / "a.h5") as file:
        stored = file["tokens"]
        assert stored[:].tolist() == tokens.tolist()
        assert (stored.shape, stored.maxshape, stored.chunks) == ((10_007,), (None,), (100,))
        assert stored.dtype == np.dtype(dtype).newbyteorder("<")
        assert stored.compression == (None if compression == "none" else compression)
        described = {"token_count": 10_007, "document_count": 7, "sha256": _sha256(tokens).encode()}
        assert dict(stored.attrs) == described
    assert writer.sha256 == _sha256(tokens)
    parts = iter(np.array_split(tokens, 7))
    assert write_hdf5_shard(tmp_path / "parts.h5", parts, dtype=dtype, documents=7) == writer.sha256
    with h5py.File(tmp_path / "parts.h5") as file:
        assert file["tokens"].attrs["document_count"] == 7
        assert np.array_equal(file["tokens"], tokens)
    for name, array in (("c", tokens.astype(f">{tokens.dtype.str[1:]}")), ("d", np.repeat(tokens, 2)[::2])):
        assert write_hdf5_shard(tmp_path / name, array, dtype=dtype, compression=compression) == writer.sha256
    assert write_hdf5_shard(tmp_path / "b.h5", tokens, chunk_tokens=999) == writer.sha256


def test_every_write_but_the_last_is_whole_chunks_at_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend, writes = hdf5_files.SealedFile.extend, []

    def recorded(shard: hdf5_files.SealedFile, array: np.ndarray) -> None:
        writes.append((shard._dataset.shape[0], len(array)))
        extend(shard, array)
        assert shard._dataset.shape[0] == sum(writes[-1])

    monkeypatch.setattr(hdf5_files.SealedFile, "extend", recorded)
    with HDF5ShardWriter(tmp_path / "a.h5", chunk_tokens=16) as writer:
        for length in (1, 15, 3, 40, 0, 100, 7):
            writer.write(range(length))
    assert [start % 16 for start, _ in writes] == [0] * len(writes)
    assert [length % 16 for _, length in writes] == [0] * (len(writes) - 1) + [166 % 16]
    assert sum(length for _, length in writes) == writer.token_count == 166


def test_a_killed_writer_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    script = f"""
import itertools
import numpy as np
from harness.prepare import HDF5ShardWriter
writer = HDF5ShardWriter({str(tmp_path / "train_00000.h5")!r}, chunk_tokens=1000)
for round in itertools.count():
    writer.write(np.arange(10_500, dtype=np.uint16))
    print(round, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.kill()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".train_00000.h5.")
    assert left.suffix == ".tmp"
    assert write_hdf5_shard(tmp_path / "train_00000.h5", np.arange(5, dtype=np.uint16))


def test_a_shard_that_is_over_takes_no_more(tmp_path: Path) -> None:
    with HDF5ShardWriter(tmp_path / "a.h5") as writer:
        writer.write([1])
    with pytest.raises(UserError, match=r"a\.h5 is complete"):
        writer.write([2])
    writer.abandon()
    writer.close()
    with HDF5ShardWriter(tmp_path / "b.h5") as writer:
        writer.abandon()
        with pytest.raises(UserError, match=r"b\.h5 is abandoned"):
            writer.write([2])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.h5"]


def test_chunks_begin_at_pages_and_compressed_ones_take_no_more_than_they_need(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 4096, 100_000, np.uint16)
    for name, chunk, compression in (("a", 2048, "none"), ("b", 3000, "none"), ("c", 65_536, "gzip")):
        write_hdf5_shard(tmp_path / name, tokens, chunk_tokens=chunk, compression=compression)
        with h5py.File(tmp_path / name) as file:
            stored = file["tokens"].id
            chunks = [stored.get_chunk_info(index) for index in range(stored.get_num_chunks())]
        if compression == "none":
            assert [info.byte_offset % 4096 for info in chunks] == [0] * len(chunks)
        else:
            assert (tmp_path / name).stat().st_size < sum(info.size for info in chunks) + 70_000
    with h5py.File(tmp_path / "a") as file:
        offsets = [file["tokens"].id.get_chunk_info(index).byte_offset for index in range(49)]
    assert set(np.diff(offsets)) == {4096}


def test_an_unfinished_shard_never_gets_its_name(tmp_path: Path) -> None:
    def broken() -> Iterator[np.ndarray]:
        yield np.arange(200_000, dtype=np.uint16)
        assert len(list(tmp_path.iterdir())) == 1
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_hdf5_shard(tmp_path / "a.h5", broken())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [[1, 65_536], [-1], np.array([1 << 40]), [1.5], [[1]], ["a"], [True]])
def test_what_is_no_id_of_the_dtype_is_refused_before_anything_is_written(tmp_path: Path, bad: list) -> None:
    with HDF5ShardWriter(tmp_path / "a.h5") as writer:
        writer.write([1, 2])
        with pytest.raises(UserError, match=r"does not fit uint16|one row of integers"):
            writer.write(bad)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["tokens"][:].tolist() == [1, 2]
        assert file["tokens"].attrs["document_count"] == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda path: HDF5ShardWriter(path),
        lambda path: write_hdf5_shard(path, np.zeros(3, np.uint16)),
        lambda path: write_hdf5_rows(path, np.zeros((1, 2), np.uint16), np.ones((1, 2), bool)),
    ],
)
def test_an_existing_file_is_never_written_over(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(b"in use")
    with pytest.raises(UserError, match=r"a\.h5 exists"):
        write(path)
    assert path.read_bytes() == b"in use"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("limit", [0, 70_000, 3_000_000])
@pytest.mark.parametrize(
    "write",
    [
        "write_hdf5_shard(path, tokens)",
        "write_hdf5_shard(path, tokens, compression='gzip')",
        "write_hdf5_rows(path, tokens.reshape(-1, 1000), tokens.reshape(-1, 1000) > 0)",
        "w = HDF5ShardWriter(path, growing=True); w.write(tokens)",
    ],
)
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, write: str, limit: int) -> None:
    script = f"""
import resource, signal
import numpy as np
from harness.prepare.hdf5_writer import HDF5ShardWriter, write_hdf5_rows, write_hdf5_shard
path, tokens = {str(tmp_path / "a.h5")!r}, np.random.default_rng(0).integers(0, 1 << 16, 4_000_000, np.uint16)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
{write}
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "OSError: [Errno 27] File too large: " in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
@pytest.mark.parametrize("shape", [(1000, 257), (3, 70_000), (0, 9), (5, 1)])
def test_rows_and_mask_hold_what_was_given(tmp_path: Path, shape: tuple[int, int], compression: str) -> None:
    rng = np.random.default_rng(0)
    rows, mask = rng.integers(0, 1 << 16, shape, np.uint16), rng.random(shape) < 0.5
    hashes = write_hdf5_rows(tmp_path / "a.h5", rows, mask, compression=compression)
    assert hashes == (_sha256(rows), _sha256(mask))
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["rows"][:], rows)
        assert np.array_equal(file["mask"][:], mask)
        assert (file["mask"].dtype, file["rows"].dtype) == (np.bool_, np.dtype("<u2"))
        assert file["mask"].attrs["token_count"] == mask.sum()
        for name, sha256 in zip(("rows", "mask"), hashes, strict=True):
            assert file[name].attrs["sha256"] == sha256.encode()
            assert file[name].attrs["row_count"] == len(rows)
            assert file[name].compression == (None if compression == "none" or not len(rows) else compression)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*missing"):
        HDF5ShardWriter(tmp_path / "missing" / "train_00000.h5")
