"""A shard that is not what the manifest says is refused when the set is opened, with file and both values."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UserError
from harness.storage import ShardedTokenDataset, npy, open_store
from harness.storage.manifest import Manifest
from harness.storage.npy import npy_extents
from harness.storage.tokens import Extent
from tests.helpers_sets import write_set

TOKENS = [10, 11, 12, 13]


def _save(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def _edit(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


SHARD_DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing": (Path.unlink, ["cannot be read", "No such file"]),
    "a folder": (_instead(Path.mkdir), ["cannot be read", "a folder"]),
    "a FIFO": (_instead(os.mkfifo), ["cannot be read", "a FIFO"]),
    "an endless device": (
        _instead(lambda path: path.symlink_to("/dev/zero")),
        ["cannot be read", "a device"],
    ),
    "a link to nowhere": (_instead(lambda path: path.symlink_to("gone")), ["cannot be read", "No such file"]),
    "no bytes": (_edit(lambda data: b""), ["starts with b''", "NUMPY"]),
    "not npy": (_edit(lambda data: b"PK" + data[2:]), ["starts with b'PK", "NUMPY"]),
    "npy version 9": (_edit(lambda data: data[:6] + b"\x09" + data[7:]), ["(9, 0)", "(1, 0) or (2, 0)"]),
    "header cut": (_edit(lambda data: data[:40]), ["broken npy header"]),
    "header spoilt": (_edit(lambda data: data.replace(b"'descr'", b"'desc!'")), ["broken npy header"]),
    "one byte short": (_edit(lambda data: data[:-1]), ["is 135 bytes", "take 136"]),
    "one token short": (_edit(lambda data: data[:-2]), ["is 134 bytes", "take 136"]),
    "longer than said": (_edit(lambda data: data + b"\0\0"), ["is 138 bytes", "take 136"]),
    "more tokens": (_save(np.zeros(5, "<u2")), ["holds 5 tokens", "manifest says 4"]),
    "fewer tokens": (_save(np.zeros(3, "<u2")), ["holds 3 tokens", "manifest says 4"]),
    "no tokens": (_save(np.zeros(0, "<u2")), ["holds 0 tokens", "manifest says 4"]),
    "int16": (_save(np.zeros(4, "<i2")), ["holds <i2", "uint16 (<u2)"]),
    "uint32": (_save(np.zeros(4, "<u4")), ["holds <u4", "uint16 (<u2)"]),
    "uint8": (_save(np.zeros(4, "u1")), ["holds |u1", "uint16 (<u2)"]),
    "float": (_save(np.zeros(4, "<f4")), ["holds <f4", "uint16 (<u2)"]),
    "big-endian": (_save(np.zeros(4, ">u2")), ["big-endian >u2", "<u2"]),
    "objects": (_save(np.array([1, "x", None, 2], dtype=object)), ["holds |O", "uint16 (<u2)"]),
    "two dimensions": (_save(np.zeros((2, 2), "<u2")), ["(2, 2)", "one dimension of 4 tokens"]),
    "no dimension": (_save(np.zeros((), "<u2")), ["()", "one dimension of 4 tokens"]),
}


@pytest.mark.parametrize("name", SHARD_DAMAGES)
def test_damaged_shard_is_refused_with_file_and_both_values(tmp_path: Path, name: str) -> None:
    damage, expected = SHARD_DAMAGES[name]
    write_set(tmp_path, {"train": [[1, 2], TOKENS]})
    path = tmp_path / "train_00001.npy"
    damage(path)
    with pytest.raises(UserError) as caught:
        ShardedTokenDataset(tmp_path, "train")
    for part in [str(path), "prepare.overwrite=true", *expected]:
        assert part in str(caught.value)


def test_uint16_in_a_set_of_uint32_is_refused(tmp_path: Path) -> None:
    large = {"format_version": 3, "storage": {"dtype": "uint32"}, "tokenizer": {"vocab_size": 70_000}}
    write_set(tmp_path, {"train": [TOKENS]}, **large)
    np.save(tmp_path / "train_00000.npy", np.zeros(4, "<u2"))
    with pytest.raises(UserError, match=r"train_00000.npy holds <u2, but the manifest says uint32 \(<u4\)"):
        open_store(tmp_path, "train")


def test_a_damaged_val_shard_does_not_stop_train(tmp_path: Path) -> None:
    write_set(tmp_path, {"train": [TOKENS], "val": [[1, 2]]})
    (tmp_path / "val_00000.npy").unlink()
    assert ShardedTokenDataset(tmp_path, "train").total_tokens == 4
    with pytest.raises(UserError, match=r"val_00000\.npy"):
        ShardedTokenDataset(tmp_path, "val")


@pytest.mark.parametrize("split", ["test", "", "TRAIN", "train/"])
def test_only_train_and_val_are_splits(tmp_path: Path, split: str) -> None:
    write_set(tmp_path, {"train": [TOKENS]})
    with pytest.raises(UserError, match="must be one of train, val"):
        open_store(tmp_path, split)


def test_npy_version_2_headers_are_read(tmp_path: Path) -> None:
    write_set(tmp_path, {"train": [TOKENS]})
    with open(tmp_path / "train_00000.npy", "wb") as file:
        np.lib.format.write_array(file, np.array(TOKENS, "<u2"), version=(2, 0))
    assert open_store(tmp_path, "train").read_tokens(0, 4).tolist() == TOKENS


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::UserWarning")
def test_any_flipped_bit_of_a_header_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    write_set(tmp_path, {"train": [TOKENS]})
    path = tmp_path / "train_00000.npy"
    whole = path.read_bytes()
    refused = unchanged = 0
    for bit in range(8 * 128):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            tokens = open_store(tmp_path, "train").read_tokens(0, 4)
        except UserError as error:
            refused += str(path) in str(error)
        else:
            unchanged += tokens.tolist() == TOKENS
    assert refused + unchanged == 8 * 128
    assert refused > 500


def test_a_set_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path / "set", {"train": [TOKENS]})
    write_set(tmp_path / "other", {"train": [TOKENS[::-1]]})

    def swapped(manifest: Manifest, split: str) -> list[Extent]:
        (tmp_path / "set").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "set")
        return npy_extents(manifest, split)

    monkeypatch.setattr(npy, "npy_extents", swapped)
    with pytest.raises(UserError, match=r"metadata.json was replaced while the set was being opened"):
        open_store(tmp_path / "set", "train")
