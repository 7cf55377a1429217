"""An HDF5 file is read as it was made, wherever it was made; what is not as promised is refused in words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from harness.errors import UserError
from harness.prepare.hdf5_writer import write_hdf5_rows
from harness.storage import MmapTokenStore, ShardedTokenDataset, hdf5_layout
from harness.storage.chunk_cache import ChunkedRows, Decoded
from harness.storage.hdf5 import hdf5_rows_layout
from harness.storage.manifest import write_manifest
from tests.helpers_sets import write_set

TOKENS = np.random.default_rng(0).integers(0, 257, 1000).astype("<u2")


def _set(directory: Path, **storage: Any) -> Path:
    """A set of one shard, `TOKENS`; the path of that shard."""
    write_set(
        directory, {"train": [TOKENS.tolist()]}, storage={"format": "hdf5", "chunk_tokens": 64} | storage
    )
    return directory / "train_00000.h5"


def _made_elsewhere(path: Path, **options: Any) -> None:
    """Write `TOKENS` in place of our shard, as other programs do."""
    path.unlink()
    file_options = {key: options.pop(key) for key in ("userblock_size", "libver") if key in options}
    with h5py.File(path, "w", **file_options) as file:
        file.create_dataset("tokens", data=TOKENS, **options)


MAPPED: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "contiguous, new headers": {"libver": "latest"},
    "one chunk": {"chunks": (1000,)},
    "fixed size in chunks": {"chunks": (100,), "libver": "latest"},
    "extensible": {"chunks": (64,), "maxshape": (None,)},
    "bounded": {"chunks": (64,), "maxshape": (5000,), "libver": "latest"},
}
THROUGH_H5PY: dict[str, dict[str, Any]] = {
    "gzip": {"chunks": (64,), "compression": "gzip"},
    "lzf, shuffled": {"chunks": (64,), "compression": "lzf", "shuffle": True},
    "checksums": {"chunks": (64,), "fletcher32": True},
    "a user block": {"userblock_size": 512},
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", [*MAPPED, *THROUGH_H5PY])
def test_files_made_elsewhere_are_read_without_loss(tmp_path: Path, name: str, mmap: bool) -> None:
    path = _set(tmp_path)
    _made_elsewhere(path, **{**MAPPED, **THROUGH_H5PY}[name])
    store = MmapTokenStore(tmp_path, "train", mmap=mmap)
    assert np.array_equal(store.get_slice(0, 1000), TOKENS)
    assert np.array_equal(store.get_slice(99, 301), TOKENS[99:301])
    assert isinstance(store.reader(), Decoded) == (name in THROUGH_H5PY)


def test_data_in_a_header_or_at_an_odd_byte_are_read_through_h5py(tmp_path: Path) -> None:
    for kind in ("compact", "odd"):
        path = _set(tmp_path / kind)
        path.unlink()
        with h5py.File(path, "w") as file:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if kind == "compact":
                plist.set_layout(h5py.h5d.COMPACT)
            else:
                file.create_dataset("before", data=np.zeros(3001, np.uint8))
            space = h5py.h5s.create_simple((1000,))
            made = h5py.h5d.create(file.id, b"tokens", h5py.h5t.STD_U16LE, space, plist)
            h5py.Dataset(made)[:] = TOKENS
            assert (made.get_offset() or 1) % 2 == 1
        store = MmapTokenStore(tmp_path / kind, "train")
        assert np.array_equal(store.get_slice(0, 1000), TOKENS)
        assert isinstance(store.reader(), Decoded)


def test_more_chunks_than_are_listed_are_read_through_h5py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5_layout, "MAX_LISTED_CHUNKS", 15)
    _set(tmp_path)
    store = MmapTokenStore(tmp_path, "train")
    assert isinstance(store.reader(), Decoded)
    assert np.array_equal(store.get_slice(3, 998), TOKENS[3:998])


def test_a_dataset_padded_to_whole_chunks_is_cut_at_its_token_count(tmp_path: Path) -> None:
    path = _set(tmp_path)
    padded = np.concatenate([TOKENS, np.zeros(24, "<u2")])
    for count, chunks in ((1000, (64,)), (None, (64,)), (1000, (512,)), (1000, (8,))):
        path.unlink()
        with h5py.File(path, "w") as file:
            dataset = file.create_dataset("tokens", data=padded, chunks=chunks, maxshape=(None,))
            if count is not None:
                dataset.attrs["token_count"] = count
        if count is not None and chunks != (8,):
            store = MmapTokenStore(tmp_path, "train")
            assert store.total_tokens == 1000
            assert np.array_equal(store.get_slice(0, 1000), TOKENS)
        else:  # nobody says that the rest is padding, or it is more than the last chunk's
            with pytest.raises(UserError, match=r"holds 1024 tokens, but the manifest says 1000"):
                MmapTokenStore(tmp_path, "train")


def _replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _instead(make: Callable[[h5py.File], object], **options: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        with h5py.File(path, "w", **options) as file:
            make(file)

    return damage


def _edit(change: Callable[[h5py.File], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)

    return damage


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _data(array: Any, **options: Any) -> Callable[[Path], None]:
    return _instead(lambda file: file.create_dataset("tokens", data=array, **options))


def _external_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere.h5"))
    with h5py.File(path, "w") as file:
        file["tokens"] = h5py.ExternalLink("elsewhere.h5", "tokens")


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((1000,), "<u2")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "tokens", (1000,))
    file.create_virtual_dataset("tokens", layout)


def _unwritten(file: h5py.File) -> None:
    file.create_dataset("tokens", (1000,), "<u2", chunks=(64,))[:500] = TOKENS[:500]


def _chunk_address(number: int, change: Callable[[int], int]) -> Callable[[Path], None]:
    """Change one address in the chunk table of an old-style file, which has no checksums."""

    def damage(path: Path) -> None:
        _made_elsewhere(path, chunks=(64,), maxshape=(None,))
        with h5py.File(path) as file:
            address = file["tokens"].id.get_chunk_info(number).byte_offset
        old, new = (value.to_bytes(8, "little") for value in (address, change(address)))
        data = path.read_bytes()
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))

    return damage


def _killed_writer(path: Path) -> None:
    path.unlink()
    pid = os.fork()
    if pid == 0:
        file = h5py.File(path, "w", libver="latest")
        file.create_dataset("tokens", data=TOKENS, chunks=(64,), maxshape=(None,))
        file.swmr_mode = True
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def _filter_not_installed(path: Path) -> None:
    _made_elsewhere(path, chunks=(64,), compression="lzf", maxshape=(None,))
    data = path.read_bytes()  # lzf is filter 32000; 32015 is zstd, which is a package of its own
    message = (32000).to_bytes(2, "little") + (8).to_bytes(2, "little")
    assert data.count(message) == 1
    path.write_bytes(data.replace(message, (32015).to_bytes(2, "little") + message[2:]))


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing": (Path.unlink, ["cannot be read", "No such file"]),
    "a folder": (_replaced_by(Path.mkdir), ["cannot be read", "a folder"]),
    "a FIFO": (_replaced_by(os.mkfifo), ["cannot be read", "a FIFO"]),
    "no bytes": (_bytes(lambda data: b""), ["no whole HDF5 file", "signature not found"]),
    "not HDF5": (_bytes(lambda data: b"PK" + data[2:]), ["no whole HDF5 file", "signature not found"]),
    "cut": (_bytes(lambda data: data[:-100]), ["no whole HDF5 file", "truncated file"]),
    "left by a killed writer": (_killed_writer, ["marked as being written", "h5clear --status"]),
    "no tokens": (_instead(lambda file: file.create_group("words")), ["no dataset 'tokens'", "words"]),
    "a group": (_instead(lambda file: file.create_group("tokens")), ["has a Group as 'tokens'"]),
    "a link away": (_external_link, ["only a link to elsewhere"]),
    "virtual": (_instead(_virtual), ["data of 'tokens' in other files"]),
    "external": (_data(TOKENS, external="raw.bin"), ["data of 'tokens' in other files"]),
    "big-endian": (_data(TOKENS.astype(">u2")), ["big-endian >u2", "<u2"]),
    "uint32": (_data(TOKENS.astype("<u4")), ["holds <u4", "uint16 (<u2)"]),
    "int16": (_data(TOKENS.astype("<i2")), ["holds <i2", "uint16 (<u2)"]),
    "strings": (_data(["a"] * 1000), ["holds |O", "uint16 (<u2)"]),
    "two dimensions": (_data(TOKENS.reshape(10, 100)), ["(10, 100)", "one dimension of 1000 tokens"]),
    "a scalar": (_data(TOKENS[0]), ["()", "one dimension of 1000 tokens"]),
    "empty": (_data(h5py.Empty("<u2")), ["None", "one dimension of 1000 tokens"]),
    "shorter": (_data(TOKENS[:999]), ["holds 999 tokens", "manifest says 1000"]),
    "longer": (_data(np.tile(TOKENS, 2)), ["holds 2000 tokens", "manifest says 1000"]),
    "never written": (_instead(_unwritten), ["holds 8 chunks", "expected 16"]),
    "no storage": (_instead(lambda f: f.create_dataset("tokens", (1000,), "<u2")), ["at byte None"]),
    "another count": (_edit(lambda f: f["tokens"].attrs.modify("token_count", 7)), ["token_count=7", "1000"]),
    "other documents": (_edit(lambda f: f["tokens"].attrs.modify("document_count", 7)), ["=7", "says 1"]),
    "other tokens": (_edit(lambda f: f["tokens"].attrs.modify("sha256", np.bytes_("00"))), ["sha256='00'"]),
    "chunk outside": (_chunk_address(3, lambda at: at + (1 << 20)), ["has a chunk that ends at byte"]),
    "chunk far outside": (_chunk_address(15, lambda at: 1 << 62), ["has a chunk that ends at byte"]),
    "chunks over one another": (_chunk_address(3, lambda at: at - 128), ["lie over one another"]),
    "an unknown filter": (_filter_not_installed, ["the HDF5 filter 32015", "not installed here"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_refused_with_file_and_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where HDF5 writes what lies in another file
    damage, expected = DAMAGES[name]
    path = _set(tmp_path)
    damage(path)
    with pytest.raises(UserError) as caught:
        MmapTokenStore(tmp_path, "train").read_tokens(0, 1000)
    for part in [str(path), *expected]:
        assert part in str(caught.value)
    assert "prepare" in str(caught.value)


def test_no_flipped_bit_of_our_headers_gives_other_tokens(tmp_path: Path) -> None:
    path = _set(tmp_path)
    whole = path.read_bytes()
    first, size = next(iter(MmapTokenStore(tmp_path, "train")._extents)).offset, TOKENS.nbytes
    places = [at for at in range(len(whole)) if whole[at] and not first <= at < first + size]
    refused = unchanged = 0
    for at in places[::2]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            tokens = MmapTokenStore(tmp_path, "train").read_tokens(0, 1000)
        except UserError as error:
            refused += str(path) in str(error)
        else:
            unchanged += np.array_equal(tokens, TOKENS)
    assert refused + unchanged == len(places[::2])
    assert refused > 200


def test_a_damaged_compressed_chunk_is_named_with_its_tokens(tmp_path: Path) -> None:
    path = _set(tmp_path, compression="gzip", chunk_tokens=1000)
    with h5py.File(path) as file:
        chunk = file["tokens"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 16
    path.write_bytes(data)
    store = MmapTokenStore(tmp_path, "train")
    with pytest.raises(UserError, match=r"train_00000\.h5 cannot be decoded in tokens \[0, 1000\)"):
        store.get_slice(5, 7)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_file_put_in_the_place_of_the_checked_one_is_refused(tmp_path: Path, compression: str) -> None:
    path = _set(tmp_path, compression=compression)
    store = MmapTokenStore(tmp_path, "train")
    shutil.copy(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    with pytest.raises(UserError, match=r"is not the file that was checked.*inode"):
        store.get_slice(0, 1)


def test_text_of_variable_length_is_no_reason_to_read_a_heap(tmp_path: Path) -> None:
    path = _set(tmp_path)
    _made_elsewhere(path, chunks=(64,))
    with h5py.File(path, "r+") as file:
        file["tokens"].attrs["sha256"] = "of variable length"
    whole = path.read_bytes()
    heap = whole.index(b"GCOL")
    path.write_bytes(whole[: heap + 24] + b"\0" * 8 + whole[heap + 32 :])  # an object of no size: no end
    script = (
        f"from harness.storage import MmapTokenStore; print(MmapTokenStore({str(tmp_path)!r}, 'train')"
        ".get_slice(0, 2).tolist())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert result.stdout.strip() == str(TOKENS[:2].tolist())


def test_a_store_of_one_format_refuses_a_set_of_the_other_and_of_rows(tmp_path: Path) -> None:
    write_set(tmp_path / "npy", {"train": [[1]]})
    _set(tmp_path / "hdf5")
    with pytest.raises(UserError, match=r"format npy, expected hdf5.*data=npy"):
        MmapTokenStore(tmp_path / "npy", "train")
    with pytest.raises(UserError, match=r"format hdf5, expected npy.*data=hdf5"):
        ShardedTokenDataset(tmp_path / "hdf5", "train")
    raw = json.loads((tmp_path / "hdf5" / "shards.json").read_text())
    raw["storage"] |= {"layout": "rows", "row_width": 100}
    raw["splits"]["train"]["shards"][0]["rows"] = 10
    write_manifest(tmp_path / "hdf5", raw)
    with pytest.raises(UserError, match=r"storage\.layout=stream.*shards\.json holds padded rows"):
        MmapTokenStore(tmp_path / "hdf5", "train")


def _rows(path: Path, compression: str) -> tuple[np.ndarray, np.ndarray]:
    rows = TOKENS.reshape(40, 25)
    mask = rows % 3 > 0
    write_hdf5_rows(path, rows, mask, compression=compression)
    return rows, mask


def test_plain_rows_and_masks_lie_where_the_layout_says(tmp_path: Path) -> None:
    path = tmp_path / "train_00000.h5"
    rows, mask = _rows(path, "none")
    layout = hdf5_rows_layout(path, (40, 25), np.dtype("<u2"))
    assert layout.rows_offset is not None
    assert layout.mask_offset is not None
    assert layout.rows_offset % 4096 == 0
    data = path.read_bytes()
    assert data[layout.rows_offset :][: rows.nbytes] == rows.tobytes()
    assert data[layout.mask_offset :][: mask.nbytes] == mask.tobytes()
    assert layout.file.size == len(data)


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
def test_rows_come_in_the_order_asked_for(tmp_path: Path, compression: str) -> None:
    files = []
    for index in range(2):
        path = tmp_path / f"train_{index:05d}.h5"
        rows, mask = _rows(path, compression)
        layout = hdf5_rows_layout(path, (40, 25), np.dtype("<u2"))
        assert (layout.rows_offset is None) == (compression != "none")
        files.append((path, layout.file))
    reader = ChunkedRows(files)
    for ids in ([9, 2, 9], [39, 0], [], list(range(40))):
        for index in range(2):
            found, found_mask = reader.read(index, ids)
            assert np.array_equal(found, rows[ids].reshape(len(ids), 25))
            assert np.array_equal(found_mask, mask[ids].reshape(len(ids), 25))
            assert found.flags.writeable
            assert (found.dtype, found_mask.dtype) == (rows.dtype, np.bool_)
    for wrong in (-1, 40):
        with pytest.raises(UserError, match=rf"row {wrong} was asked for, but .*train_00001\.h5 has 40 rows"):
            reader.read(1, [3, wrong])


ROW_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "fewer rows": (lambda path: None, r"rows of shape \(40, 25\).*\(41, 25\)"),
    "no mask": (_edit(lambda file: file.__delitem__("mask")), r"no dataset 'mask' \(there is: rows\)"),
    "a mask of integers": (
        _edit(lambda f: (f.__delitem__("mask"), f.create_dataset("mask", data=np.zeros((41, 25), "u1")))),
        r"holds \|u1, but the manifest says bool",
    ),
    "other rows": (_edit(lambda f: f["rows"].attrs.modify("sha256", np.bytes_("1" * 64))), "sha256='111"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_DAMAGES)
def test_damaged_rows_are_refused(tmp_path: Path, name: str) -> None:
    damage, expected = ROW_DAMAGES[name]
    path = tmp_path / "train_00000.h5"
    _rows(path, "none")
    damage(path)
    count = 41 if name == "fewer rows" else 40
    sha256 = "2" * 64 if name == "other rows" else None
    with pytest.raises(UserError, match=expected) as caught:
        hdf5_rows_layout(path, (count, 25), np.dtype("<u2"), sha256=sha256)
    assert str(path) in str(caught.value)
