"""Documents of any sources become a shard each, every one before its boundary, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from harness.config_groups import TokenizerConfig
from harness.errors import UserError
from harness.prepare import HDF5ShardWriter, JSONLSource, ShardedTokenizationPipeline, make_tokenizer
from harness.storage import MmapTokenStore
from harness.storage.manifest import load_manifest
from harness.storage.verify import is_remembered, verify_set

BYTES = make_tokenizer(TokenizerConfig("byte"))


def _ids(*texts: str) -> list[int]:
    return [i for text in texts for i in [*(byte + 1 for byte in text.encode()), 0]]


def _lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_each_source_is_a_shard_of_documents_before_their_boundaries(tmp_path: Path) -> None:
    jsonl = _lines(tmp_path / "a.jsonl", {"text": "from a file"}, {"text": "zwölf"})
    pipeline = ShardedTokenizationPipeline(tmp_path / "set", BYTES)
    manifest = pipeline.write_corpus(train=[["one", "", "two"], [], JSONLSource(jsonl)], val=[("unseen",)])
    store = MmapTokenStore(tmp_path / "set", "train")
    assert store.get_slice(0, 9).tolist() == _ids("one", "", "two")
    assert store.get_slice(9, store.total_tokens).tolist() == _ids("from a file", "zwölf")
    assert store.offsets == [0, 9, 9, 28]
    assert MmapTokenStore(tmp_path / "set", "val").get_slice(0, 7).tolist() == _ids("unseen")
    train = manifest.splits["train"]
    assert [shard.documents for shard in train.shards] == [3, 0, 2]
    assert (train.documents, train.bytes, train.total_tokens) == (5, 6 + 11 + 6, 28)
    with h5py.File(tmp_path / "set" / "train_00000.h5") as file:
        assert file["tokens"].attrs["token_count"] == 9
        assert file["tokens"].attrs["sha256"].decode() == train.shards[0].sha256
    assert verify_set(tmp_path / "set").ok
    assert is_remembered(manifest)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "set", "set.lock"]


def test_the_same_texts_give_the_same_files_and_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pipeline = ShardedTokenizationPipeline(tmp_path / name, BYTES, chunk_tokens=100, compression="gzip")
        pipeline.write_corpus(train=[[f"text {i}" * i for i in range(50)]], val=[["x"]])
    for file in ("train_00000.h5", "val_00000.h5", "shards.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    ours, theirs = load_manifest(tmp_path / "a"), load_manifest(tmp_path / "b")
    assert ours.metadata_sha256 == theirs.metadata_sha256
    assert (ours.storage.chunk_tokens, ours.storage.compression) == (100, "gzip")


def test_long_documents_are_cut_before_their_boundary(tmp_path: Path) -> None:
    pipeline = ShardedTokenizationPipeline(tmp_path / "set", BYTES, max_document_tokens=3)
    manifest = pipeline.write_corpus(train=[["abcdef", "ab", "abc"]])
    store = MmapTokenStore(tmp_path / "set", "train")
    assert store.get_slice(0, store.total_tokens).tolist() == _ids("abc", "ab", "abc")
    assert manifest.splits["train"].bytes == 8
    assert manifest.preparation["max_document_tokens"] == 3


def test_lines_that_are_no_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = [
        "{",
        "[1]",
        '"text"',
        {"body": "x"},
        {"text": 1},
        {"text": ""},
        {"text": None},
        '{"text": "\\ud800"}',
    ]
    path = _lines(tmp_path / "a.jsonl", {"text": "good"}, "", *bad, "  ", {"text": " ", "id": 7})
    with open(path, "ab") as file:
        file.write(b'{"text": "\xff"}\n{"text": "no newline at the end"}')
    source = JSONLSource(path)
    for _ in range(2):
        assert list(source) == ["good", " ", "no newline at the end"]
        assert source.dropped_lines == len(bad) + 1
    assert list(JSONLSource(_lines(tmp_path / "b.jsonl", {"body": "x"}), field="body")) == ["x"]


def test_a_source_larger_than_what_is_read_at_a_time_is_whole(tmp_path: Path) -> None:
    texts = [f"{i}" * (i % 500) + "." for i in range(6000)]
    source = JSONLSource(_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts)))
    assert source.path.stat().st_size > 3 << 20
    assert list(source) == texts


@pytest.mark.parametrize("name", ["missing.jsonl", "folder", "."])
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot be read .*readable file of JSON lines"):
        list(JSONLSource(tmp_path / name))


def _broken() -> Iterator[str]:
    yield "good"
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (_broken(), "no more"),
        (["good", "\ud800"], r"document 1 of train_00001 cannot be encoded"),
        ([b"bytes"], r"document 0 of train_00001 is a bytes, expected a text"),
        ("one text", r"train_00001 is one text, expected an iterable of texts"),
    ],
)
def test_a_corpus_that_fails_leaves_nothing(tmp_path: Path, source: object, error: str) -> None:
    pipeline = ShardedTokenizationPipeline(tmp_path / "set", BYTES)
    with pytest.raises((UserError, RuntimeError), match=error):
        pipeline.write_corpus(train=[["fine"], source])  # type: ignore[list-item]
    assert [entry.name for entry in tmp_path.iterdir()] == ["set.lock"]
    pipeline.write_corpus(train=[["fine"]])
    assert MmapTokenStore(tmp_path / "set", "train").total_tokens == 5


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    pipeline = ShardedTokenizationPipeline(tmp_path / "set", BYTES)
    manifest = pipeline.write_corpus(train=[["first"]])
    with pytest.raises(UserError, match="already holds a set"):
        pipeline.write_corpus(train=[["second"]])
    assert load_manifest(tmp_path / "set").metadata_sha256 == manifest.metadata_sha256
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a prepared set, so nothing there is touched"):
        ShardedTokenizationPipeline(tmp_path / "other", BYTES).write_corpus(train=[["x"]])
    with pytest.raises(UserError, match="max_document_tokens=0 must be at least 1"):
        ShardedTokenizationPipeline(tmp_path / "third", BYTES, max_document_tokens=0)


def test_a_manifest_of_another_schema_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with HDF5ShardWriter(tmp_path / "a.h5") as writer:
        writer.write(np.array(_ids("text"), np.uint16))
    shard = {"shard_id": "a", "path": "a.h5", "token_count": 5, "document_count": 1, "global_start": 0}
    index = {"version": 1, "chunk_size": 8192, "total_tokens": 5, "shards": [shard]}
    (tmp_path / "shards.json").write_text(json.dumps(index))
    with pytest.raises(UserError) as caught:
        MmapTokenStore(tmp_path, "train")
    for part in ("shards.json", "chunk_size", "version", "expected format_version (2 or 3), storage"):
        assert part in str(caught.value)
