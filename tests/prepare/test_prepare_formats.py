"""Every storage and layout: the same tokens in the same shards, in files that are known by their hashes."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config_groups import HfTokenizerConfig
from harness.errors import UserError
from harness.files import sha256_file
from harness.prepare import prepare
from harness.prepare.seal import write_row_shard, write_stream_shard
from harness.storage import PairStore, TokenStore, open_split
from harness.storage.manifest import load_manifest
from harness.storage.manifest_schema import StorageInfo
from tests.helpers_prepare import (
    KINDS,
    config_of,
    jsonl,
    prepared,
    refusal,
    small_chunks,
    snapshot,
    texts,
    write_lines,
)

SETTINGS: dict[str, Any] = {"shard_tokens": 1500, "val_fraction": 0.3}
OTHERS = [kind for kind in KINDS if not kind.startswith("npy")]


def content(directory: Path, split: str) -> list[np.ndarray]:
    """All that a split holds, read through its store."""
    store = open_split(directory, split)
    if isinstance(store, TokenStore):
        return [store.read_tokens(0, store.total_tokens)]
    sides = [store.pos, store.neg] if isinstance(store, PairStore) else [store]
    return [array for side in sides for array in side.read_rows(np.arange(side.total_rows))]


@pytest.mark.parametrize("kind", OTHERS)
def test_an_hdf5_set_holds_what_the_npy_set_holds(tmp_path: Path, kind: str) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(150)))
    plain = "npy-" + kind.split("-")[1]
    for name in (plain, kind):
        prepared(tmp_path / name, source, kind=name, **SETTINGS)
    manifests = [load_manifest(tmp_path / name) for name in (plain, kind)]
    assert manifests[0].content_sha256 == manifests[1].content_sha256 is not None
    assert manifests[0].metadata_sha256 != manifests[1].metadata_sha256
    for split in ("train", "val"):
        there, here = content(tmp_path / plain, split), content(tmp_path / kind, split)
        assert len(there) == len(here)
        assert all(np.array_equal(a, b) and a.size for a, b in zip(there, here, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_processes_and_chunks_change_no_byte_and_every_file_is_known_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(150)))
    directory = tmp_path / "set"
    prepared(directory, source, kind=kind, **SETTINGS)
    small_chunks(monkeypatch, 2000)
    workers = 2 if kind in ("gzip-rows", "npy-pairs") else 1
    prepared(tmp_path / "other", source, kind=kind, workers=workers, **SETTINGS)
    assert snapshot(directory) == snapshot(tmp_path / "other")
    recorded = json.loads((directory / "provenance.json").read_text())["files_sha256"]
    manifest = load_manifest(directory)
    files = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert recorded.keys() == files - {"provenance.json", "verified.json", manifest.path.name}
    assert all(sha256_file(directory / name) == sha256 for name, sha256 in recorded.items())
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    named = [name for shard in shards for name in (shard.file, shard.mask_file) if name]
    assert len(shards) > 4
    assert sorted(named) == sorted(recorded)


def test_the_manifest_says_how_the_set_is_stored(tmp_path: Path) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(60)))
    expected = {
        "npy-stream": {"format": "npy", "dtype": "uint16", "layout": "stream"},
        "gzip-stream": {
            "format": "hdf5",
            "dtype": "uint16",
            "layout": "stream",
            "chunk_tokens": 64,
            "compression": "gzip",
        },
        "hdf5-rows": {
            "format": "hdf5",
            "dtype": "uint16",
            "layout": "rows",
            "row_width": 17,
            "compression": "none",
        },
        "npy-pairs": {
            "format": "npy",
            "dtype": "uint16",
            "layout": "contrastive",
            "row_width": {"pos": 17, "neg": 17},
        },
    }
    for kind, section in expected.items():
        prepared(tmp_path / kind, source, kind=kind)
        assert load_manifest(tmp_path / kind).raw["storage"] == section


def test_vocabularies_beyond_16_bits_are_stored_whatever_the_storage_and_layout(tmp_path: Path) -> None:
    vocabulary = {"</s>": 0} | {f"w{index}": index for index in range(1, 70_000)}
    boundary = {"id": 0, "content": "</s>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "</s>"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [boundary | flags],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = HfTokenizerConfig(path=str(tmp_path / "tokenizer.json"))
    source = jsonl(
        write_lines(tmp_path / "a.jsonl", [f"w{i} w{i} w9 w{69_999 - i} w69999" for i in range(1, 60)])
    )
    for kind in ("npy-stream", "hdf5-rows", "gzip-pairs"):
        prepared(tmp_path / kind, source, config, kind=kind)
        manifest = load_manifest(tmp_path / kind)
        assert (manifest.format_version, manifest.raw["storage"]["dtype"]) == (3, "uint32")
        assert content(tmp_path / kind, "train")[0].max() > 65_536


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("pairs")])
def test_pairs_lie_side_by_side_in_shards_of_the_same_rows(tmp_path: Path, kind: str) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(200)))
    summary = prepared(tmp_path / "set", source, kind=kind, **SETTINGS)
    manifest = load_manifest(tmp_path / "set")
    for split in ("train", "val"):
        pos, neg = (manifest.splits[f"{split}.{side}"] for side in ("pos", "neg"))
        assert [shard.rows for shard in pos.shards] == [shard.rows for shard in neg.shards]
        if split == "train":
            assert {shard.rows for shard in pos.shards[:-1]} == {89}  # 1500 cells of 17 columns, whole rows
        (rows, mask, false, false_mask) = content(tmp_path / "set", split)
        assert (pos.total_tokens, neg.total_tokens) == (mask.sum(), false_mask.sum())
        prompts = np.cumsum(mask | false_mask, axis=1) == 0
        assert np.array_equal(rows[prompts], false[prompts])
        assert not np.array_equal(rows, false)
    assert summary.documents == sum(manifest.splits[f"{s}.pos"].documents or 0 for s in ("train", "val"))
    assert 0 < summary.padding < summary.rows * 16
    assert "% of their cells are padding" in str(summary)


def test_another_storage_or_width_under_the_same_name_is_named_with_both_values(tmp_path: Path) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(60)))

    def said(there: str, asked: str, **changes: Any) -> str:
        directory = tmp_path / f"{there}-{asked}"
        prepared(directory, source, kind=there)
        config = config_of(directory, source, kind=asked)
        for key, value in changes.items():
            group, name = key.split("__")
            changed = getattr(config, group)
            setattr(config, group, type(changed)(**vars(changed) | {name: value}))
        with pytest.raises(UserError) as caught:
            prepare(config, report=lambda line: None)
        return str(caught.value)

    assert "storage.format: there npy, asked for hdf5" in said("npy-stream", "hdf5-stream")
    assert "storage.layout: there stream, asked for rows" in said("npy-stream", "npy-rows")
    assert "storage.layout: there rows, asked for contrastive" in said("hdf5-rows", "hdf5-pairs")
    assert "storage.compression: there none, asked for gzip" in said("hdf5-stream", "gzip-stream")
    message = said("gzip-stream", "gzip-stream", data__chunk_tokens=128)
    assert "storage.chunk_tokens: there 64, asked for 128" in message
    message = said("npy-rows", "npy-rows", loader__row_width=20)
    assert "storage.row_width: there 17, asked for 20" in message
    assert "prepare.overwrite=true" in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_that_is_there_is_left_alone_and_one_that_lost_a_shard_is_not_taken(
    tmp_path: Path, kind: str
) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(100)))
    first = prepared(tmp_path / "set", source, kind=kind, **SETTINGS)
    before = snapshot(tmp_path / "set")
    again = prepared(tmp_path / "set", source, kind=kind, **SETTINGS)
    assert again.already_there
    assert (again.digest, again.splits, again.padding) == (first.digest, first.splits, first.padding)
    lost = sorted(p for p in (tmp_path / "set").iterdir() if p.name.startswith("train"))[-1]
    lost.unlink()
    message = refusal(tmp_path / "set", source, kind=kind, **SETTINGS)
    assert "it is not whole" in message
    assert lost.name in message
    prepared(tmp_path / "set", source, kind=kind, overwrite=True, **SETTINGS)
    assert snapshot(tmp_path / "set") == before


def test_a_set_may_be_replaced_by_one_of_another_storage(tmp_path: Path) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(100)))
    for kind in (*KINDS, KINDS[0]):
        prepared(tmp_path / "set", source, kind=kind, overwrite=True, **SETTINGS)
        prepared(tmp_path / kind, source, kind=kind, **SETTINGS)
        assert snapshot(tmp_path / "set") == snapshot(tmp_path / kind)


@pytest.mark.parametrize("kind", ["hdf5-stream", "hdf5-rows"])
def test_no_room_for_a_sealed_shard_is_said_and_the_next_run_goes_on(tmp_path: Path, kind: str) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(400)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        message = refusal(tmp_path / "set", source, kind=kind, shard_tokens=2500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "set.preparing: no room" in message
    assert not (tmp_path / "set").exists()
    prepared(tmp_path / "set", source, kind=kind, shard_tokens=2500)
    prepared(tmp_path / "other", source, kind=kind, shard_tokens=2500)
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "other")


@pytest.mark.parametrize("storage_format", ["npy", "hdf5"])
def test_a_shard_of_one_storage_is_written_in_another_with_the_same_hashes(
    tmp_path: Path, storage_format: str
) -> None:
    tokens = np.arange(5000, dtype="<u2")
    rows, mask = tokens.reshape(200, 25), np.arange(5000).reshape(200, 25) % 3 > 0
    hashes = []
    for name in ("npy", storage_format):
        folder = tmp_path / f"{name}-{storage_format}"
        folder.mkdir(exist_ok=True)
        stream = write_stream_shard(
            folder, "train_00000", tokens, StorageInfo(name, tokens.dtype, "stream"), 3
        )
        pair = write_row_shard(folder, "val_00000", rows, mask, StorageInfo(name, tokens.dtype, "rows"))
        hashes.append([stream["sha256"], pair["sha256"], pair["mask_sha256"]])
        for one in (stream, pair):
            assert all((folder / one[key]).is_file() for key in ("file", "mask_file") if key in one)
        with pytest.raises(UserError, match="never written over"):
            write_stream_shard(folder, "train_00000", tokens, StorageInfo(name, tokens.dtype, "stream"))
        if name == storage_format:
            break
    assert hashes[0] == hashes[-1]
