"""A manifest is either exactly what its shards hold, or refused with file, field and both values."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import UserError
from harness.storage import ShardedTokenDataset, open_store
from harness.storage.manifest import load_manifest, manifest_digest, write_manifest
from tests.helpers_sets import write_set

SHARDS = {"train": [[10, 11, 12, 13], [14, 15, 16]], "val": [[1, 2, 3]]}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return write_set(tmp_path / "set", SHARDS)


def _raw(directory: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((directory / "metadata.json").read_text())
    return raw


def _put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A mutation that sets the value at `path[:-1]` to `path[-1]`."""

    def mutate(raw: dict[str, Any]) -> None:
        place: Any = raw
        for key in path[:-2]:
            place = place[key]
        place[path[-2]] = path[-1]

    return mutate


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def mutate(raw: dict[str, Any]) -> None:
        place: Any = raw
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return mutate


def _misspell_hash(raw: dict[str, Any]) -> None:
    shard = raw["splits"]["train"]["shards"][0]
    shard["sha265"] = shard.pop("sha256")


SHARD0 = ("splits", "train", "shards", 0)

DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], list[str]]] = {
    "version 1": (_put("format_version", 1), ["format_version is 1", "2 (uint16)"]),
    "version 4": (_put("format_version", 4), ["format_version is 4", "3 (uint32)"]),
    "version as text": (_put("format_version", "2"), ['format_version is "2"', "integer"]),
    "version true": (_put("format_version", True), ["format_version is true", "integer"]),
    "no version": (_drop("format_version"), ["format_version is missing"]),
    "unknown format": (_put("storage", "format", "zarr"), ['storage.format is "zarr"', "npy"]),
    "int16": (_put("storage", "dtype", "int16"), ['storage.dtype is "int16"', "'uint16'"]),
    "big-endian": (_put("storage", "dtype", ">u2"), ['storage.dtype is ">u2"', "'uint16'"]),
    "uint32 in version 2": (_put("storage", "dtype", "uint32"), ['storage.dtype is "uint32"', "version 2"]),
    "unknown layout": (
        _put("storage", "layout", "columns"),
        ['storage.layout is "columns"', "stream, rows"],
    ),
    "storage a list": (_put("storage", ["npy"]), ["storage is a list of 1", "an object"]),
    "no tokenizer": (_drop("tokenizer"), ["tokenizer is missing"]),
    "tokenizer unnamed": (_put("tokenizer", "name", None), ["tokenizer.name is null", "a string"]),
    "vocabulary beyond uint16": (
        _put("tokenizer", "vocab_size", 65_537),
        ["tokenizer.vocab_size is 65537", "65536"],
    ),
    "no vocabulary": (_drop("tokenizer", "vocab_size"), ["tokenizer.vocab_size is missing"]),
    "vocabulary zero": (_put("tokenizer", "vocab_size", 0), ["tokenizer.vocab_size is 0", "at least 1"]),
    "boundary outside": (
        _put("tokenizer", "boundary_token_id", 257),
        ["tokenizer.boundary_token_id is 257", "vocab_size is 257"],
    ),
    "boundary true": (_put("tokenizer", "boundary_token_id", True), ["boundary_token_id is true", "integer"]),
    "tokenizer hash": (_put("tokenizer", "sha256", "12ab"), ['tokenizer.sha256 is "12ab"', "64"]),
    "preparation a list": (_put("preparation", [1, 2]), ["preparation is a list of 2", "an object"]),
    "no val": (_drop("splits", "val"), ["splits.val is missing"]),
    "splits null": (_put("splits", None), ["splits is null", "an object"]),
    "shards an object": (
        _put("splits", "train", "shards", {}),
        ["splits.train.shards is an object", "a list"],
    ),
    "shard a string": (_put(*SHARD0, "train_00000.npy"), ["splits.train.shards[0] is", "an object"]),
    "total a float": (_put("splits", "train", "total_tokens", 7.0), ["total_tokens is 7.0", "an integer"]),
    "total wrong": (_put("splits", "train", "total_tokens", 8), ["total_tokens is 8", "add up to 7"]),
    "documents wrong": (_put("splits", "train", "documents", 3), ["documents is 3", "add up to 2"]),
    "bytes negative": (_put("splits", "train", "bytes", -1), ["splits.train.bytes is -1", "at least 0"]),
    "tokens true": (_put(*SHARD0, "tokens", True), ["splits.train.shards[0].tokens is true", "an integer"]),
    "tokens negative": (_put(*SHARD0, "tokens", -1), ["splits.train.shards[0].tokens is -1", "at least 0"]),
    "tokens text": (_put(*SHARD0, "tokens", "4"), ['shards[0].tokens is "4"', "an integer"]),
    "no tokens": (_drop(*SHARD0, "tokens"), ["splits.train.shards[0].tokens is missing"]),
    "file repeated": (
        _put(*SHARD0, "file", "train_00001.npy"),
        ['shards[1].file is "train_00001.npy"', "another shard"],
    ),
    "file in a folder": (
        _put(*SHARD0, "file", "a/train_00000.npy"),
        ['"a/train_00000.npy"', "train_00000.npy"],
    ),
    "file above": (_put(*SHARD0, "file", "../train_00000.npy"), ['"../train_00000.npy"', "plain name"]),
    "file of the other split": (_put(*SHARD0, "file", "val_00000.npy"), ['"val_00000.npy"', "train_00000"]),
    "file with a line end": (
        _put(*SHARD0, "file", "train_00000.npy\n"),
        [r"train_00000.npy\n", "plain name"],
    ),
    "file a number": (_put(*SHARD0, "file", 0), ["shards[0].file is 0", "a string"]),
    "shard hash upper case": (_put(*SHARD0, "sha256", "A" * 64), ["A" * 64, "lower-case"]),
    "optional key misspelt": (
        _misspell_hash,
        ["unknown key splits.train.shards[0].sha265", "did you mean sha256?"],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_manifest_is_refused_with_file_and_both_values(prepared: Path, name: str) -> None:
    mutate, expected = DAMAGES[name]
    raw = _raw(prepared)
    mutate(raw)
    (prepared / "metadata.json").write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught:
        load_manifest(prepared)
    for part in [str(prepared / "metadata.json"), "prepare_data.py", *expected]:
        assert part in str(caught.value)


BROKEN_TEXTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda text: b"", "not JSON"),
    "truncated": (lambda text: text[: len(text) // 2], "not JSON"),
    "not JSON": (lambda text: b"format_version: 2", "not JSON"),
    "not an object": (lambda text: b"[2]", "the whole file is a list of 1, expected an object"),
    "not UTF-8": (lambda text: b'{"\xff": 1}', "not UTF-8"),
    "byte order mark": (lambda text: b"\xef\xbb\xbf" + text, "byte order mark"),
    "duplicate key": (
        lambda text: text.replace(b'"format_version": 2', b'"format_version": 2, "format_version": 3'),
        "'format_version' occurs twice, with 2 and 3",
    ),
    "NaN": (lambda text: text.replace(b'"corpus": "test"', b'"x": NaN'), "nan"),
    "infinity": (lambda text: text.replace(b'"corpus": "test"', b'"x": -Infinity'), "inf"),
    "beyond float": (lambda text: text.replace(b'"corpus": "test"', b'"x": 1e999'), "1e999"),
    "too deep": (lambda text: b"[" * 200_000, "nested too deeply"),
}


@pytest.mark.parametrize("name", BROKEN_TEXTS)
def test_manifest_that_is_not_one_json_object_is_refused(prepared: Path, name: str) -> None:
    spoil, expected = BROKEN_TEXTS[name]
    path = prepared / "metadata.json"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(UserError) as caught:
        load_manifest(prepared)
    assert str(path) in str(caught.value)
    assert expected.lower() in str(caught.value).lower()


def test_missing_folder_and_missing_manifest_say_how_to_prepare(tmp_path: Path) -> None:
    command = "python scripts/prepare_data.py data=npy corpus=stdlib tokenizer=byte"
    with pytest.raises(UserError, match="does not exist") as caught:
        load_manifest(tmp_path / "none", prepare_command=command)
    assert command in str(caught.value)
    with pytest.raises(UserError, match=r"holds no manifest \(metadata.json or shards.json\)") as caught:
        load_manifest(tmp_path)
    assert "python scripts/prepare_data.py" in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        load_manifest(tmp_path / "file")


def test_every_field_is_loaded(prepared: Path) -> None:
    manifest = load_manifest(prepared)
    assert manifest.raw == _raw(prepared)
    assert (manifest.format_version, manifest.storage.dtype) == (2, np.dtype("<u2"))
    assert (manifest.storage.format, manifest.storage.layout) == ("npy", "stream")
    assert (manifest.tokenizer.name, manifest.tokenizer.vocab_size) == ("byte", 257)
    assert (manifest.tokenizer.boundary_token_id, manifest.tokenizer.sha256) == (0, None)
    assert manifest.preparation == {"corpus": "test"}
    train = manifest.splits["train"]
    assert (train.total_tokens, train.documents, train.bytes) == (7, 2, 7)
    assert [(shard.file, shard.tokens) for shard in train.shards] == [
        ("train_00000.npy", 4),
        ("train_00001.npy", 3),
    ]


def test_optional_keys_may_be_absent(prepared: Path) -> None:
    raw = _raw(prepared)
    for place in [
        *raw["splits"].values(),
        *raw["splits"]["train"]["shards"],
        *raw["splits"]["val"]["shards"],
    ]:
        for key in ("documents", "bytes", "sha256"):
            place.pop(key, None)
    for section, key in (("storage", "layout"), ("tokenizer", "boundary_token_id"), ("tokenizer", "sha256")):
        del raw[section][key]
    del raw["preparation"]
    manifest = write_manifest(prepared, raw)
    assert manifest.tokenizer.boundary_token_id is None
    assert manifest.splits["train"].documents is None
    assert manifest.preparation == {}
    assert manifest.content_sha256 is None
    assert manifest.storage.layout == "stream"


def test_version_3_is_uint32_for_large_vocabularies_only(tmp_path: Path) -> None:
    version_3 = {"format_version": 3, "storage": {"dtype": "uint32"}}
    write_set(tmp_path / "large", SHARDS, **version_3, tokenizer={"vocab_size": 65_537})
    assert load_manifest(tmp_path / "large").storage.dtype == np.dtype("<u4")
    with pytest.raises(UserError, match=r"vocab_size is 65536, but format_version 3 .*65536"):
        write_set(tmp_path / "small", SHARDS, **version_3, tokenizer={"vocab_size": 65_536})
    with pytest.raises(UserError, match="dtype is \"uint16\", expected 'uint32'"):
        write_set(tmp_path / "mixed", SHARDS, format_version=3, tokenizer={"vocab_size": 65_537})


def test_dtype_may_be_written_as_little_endian_code(tmp_path: Path) -> None:
    write_set(tmp_path, SHARDS, storage={"dtype": "<u2"})
    assert load_manifest(tmp_path).storage.dtype == np.dtype("uint16")


def test_digest_is_of_the_parsed_manifest_and_of_all_of_it(prepared: Path, tmp_path: Path) -> None:
    before = load_manifest(prepared)
    assert before.metadata_sha256 == manifest_digest(before.raw)
    compact = json.dumps(before.raw, sort_keys=True, separators=(",", ":"))
    assert before.metadata_sha256 == hashlib.sha256(compact.encode()).hexdigest()

    moved = tmp_path / "elsewhere"
    shutil.copytree(prepared, moved)
    reordered = dict(reversed(before.raw.items()))
    (moved / "metadata.json").write_text(json.dumps(reordered, indent=7))
    assert load_manifest(moved).metadata_sha256 == before.metadata_sha256

    extended = copy.deepcopy(before.raw)
    extended["preparation"]["anything"] = 0.5
    extended["storage"]["comment"] = "ä"
    after = write_manifest(moved, extended)
    assert after.metadata_sha256 not in (before.metadata_sha256, None)
    assert after.content_sha256 == before.content_sha256


def test_content_digest_is_over_split_tokens_and_hash_of_each_shard(prepared: Path) -> None:
    rows = []
    for split in ("train", "val"):
        for tokens in SHARDS[split]:
            digest = hashlib.sha256(np.array(tokens, "<u2").tobytes()).hexdigest()
            rows.append([split, len(tokens), digest])
    text = json.dumps(rows, separators=(",", ":"))
    assert load_manifest(prepared).content_sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_refused_manifest_leaves_the_old_one_as_it_was(prepared: Path) -> None:
    before = (prepared / "metadata.json").read_bytes()
    raw = _raw(prepared)
    raw["splits"]["val"]["total_tokens"] = 4
    with pytest.raises(UserError, match="add up to 3"):
        write_manifest(prepared, raw)
    assert (prepared / "metadata.json").read_bytes() == before
    assert sorted(path.name for path in prepared.iterdir()) == [
        "metadata.json",
        "train_00000.npy",
        "train_00001.npy",
        "val_00000.npy",
    ]


def test_the_command_that_a_caller_knows_is_the_one_shown(tmp_path: Path) -> None:
    command = "python scripts/prepare_data.py corpus=text corpus.path=/texts"
    for opener in (open_store, ShardedTokenDataset):
        with pytest.raises(UserError) as caught:
            opener(tmp_path, "train", prepare_command=command)
        assert command in str(caught.value)
        assert "..." not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "make"),
    [("a folder", Path.mkdir), ("a FIFO", os.mkfifo), ("a link", lambda p: p.symlink_to("gone"))],
)
def test_a_manifest_that_is_no_file_is_refused_with_what_mends_it(
    prepared: Path, kind: str, make: Callable[[Path], None]
) -> None:
    (prepared / "metadata.json").unlink()
    make(prepared / "metadata.json")
    with pytest.raises(UserError) as caught:
        load_manifest(prepared, prepare_command="the command")
    expected = (
        "cannot be read (No such file or directory)" if kind == "a link" else f"is {kind}, not a regular"
    )
    for part in (
        f"{prepared / 'metadata.json'} {expected}",
        "which tokens",
        f"ove {prepared} away",
        "the command",
    ):
        assert part in str(caught.value)
