"""The set that is written: tokens, splits, shards, counts, and nothing that depends on how it was made."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest

from harness.config import PrepareScriptConfig
from harness.config_groups import TokenizerConfig
from harness.prepare import chunks, load_tokenizer, make_tokenizer, preparation_settings, prepare
from harness.prepare.seal import npy_header
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import (
    config_of,
    documents_of,
    gpt2,
    jsonl,
    prepared,
    read_split,
    refusal,
    small_chunks,
    snapshot,
    text,
    texts,
    write_jsonl,
    write_texts,
)


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_processes_and_chunk_sizes_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer = gpt2() if kind == "gpt2" else TokenizerConfig()
    source = write_jsonl(tmp_path / "a.jsonl", texts(400))
    sets = []
    for workers, size in ((1, 4 << 20), (2, 5000), (1, 777)):
        small_chunks(monkeypatch, size)
        directory = tmp_path / f"set-{workers}-{size}"
        summary = prepared(directory, jsonl(source), tokenizer, workers=workers, shard_tokens=3001)
        sets.append((summary.digest, snapshot(directory)))
    assert sets[1:] == [sets[0]] * 2
    assert len(sets[0][1]) > 4


def test_every_document_is_followed_by_the_boundary_also_an_empty_one(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", ["ab", "", "c"])
    summary = prepared(tmp_path / "set", text(folder), val_fraction=0)
    assert read_split(tmp_path / "set", "train").tolist() == [98, 99, 0, 0, 100, 0]
    assert (summary.documents, summary.tokens, summary.empty_documents) == (3, 6, 1)
    assert summary.splits["train"].bytes == 3
    assert summary.boundary_share == 0.5
    assert summary.splits["val"].shards == 0


def test_the_manifest_counts_what_is_there(tmp_path: Path) -> None:
    documents = texts(300)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    summary = prepared(tmp_path / "set", jsonl(source), shard_tokens=2500)
    manifest = load_manifest(tmp_path / "set")
    assert manifest.metadata_sha256 == summary.digest
    for name, split in manifest.splits.items():
        found = documents_of(tmp_path / "set", name)
        assert split.bytes == sum(len(document.encode()) for document in found)
        assert split.documents == len(found)
        assert [s.tokens for s in split.shards[:-1]] == [2500] * (len(split.shards) - 1)
        for shard in split.shards:
            boundaries = np.count_nonzero(np.load(tmp_path / "set" / shard.file) == 0)
            assert shard.documents == boundaries
    assert sum(split.documents or 0 for split in manifest.splits.values()) == 300
    chain = bytes(32)
    for document in documents:
        chain = hashlib.sha256(chain + hashlib.sha256(document.encode()).digest()).digest()
    assert manifest.preparation == {
        "corpus": "jsonl",
        "field": "text",
        "max_document_tokens": None,
        "val_fraction": 0.2,
        "shard_tokens": 2500,
        "corpus_sha256": chain.hex(),
    }
    config = config_of(tmp_path / "set", jsonl(source), shard_tokens=2500)
    assert preparation_settings(config) | {"corpus_sha256": chain.hex()} == manifest.preparation


def test_a_text_corpus_says_which_suffixes_it_took(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    for suffixes, expected in (
        ([], []),
        ([".txt", ".md"], [".md", ".txt"]),
        ([".md", ".txt"], [".md", ".txt"]),
    ):
        directory = tmp_path / "-".join(["set", *suffixes])
        prepared(directory, text(folder, suffixes))
        assert load_manifest(directory).preparation["suffixes"] == expected
    message = refusal(tmp_path / "set", text(folder, [".txt"]))
    assert "preparation.suffixes: there [], asked for ['.txt']" in message


def test_the_digest_knows_nothing_of_place_and_time(tmp_path: Path) -> None:
    digests = set()
    for place in ("here", "far/away"):
        source = write_jsonl(tmp_path / place / f"{place[:3]}.jsonl", texts(100))
        digests.add(prepared(tmp_path / place / "set", jsonl(source)).digest)
        raw = (tmp_path / place / "set" / "metadata.json").read_text()
        assert str(tmp_path) not in raw
    assert len(digests) == 1


def test_documents_keep_their_split_when_others_come_and_order_changes(tmp_path: Path) -> None:
    first, more = texts(300), texts(200, seed=1)
    mixed = (more + first)[::-1]
    prepared(tmp_path / "set1", jsonl(write_jsonl(tmp_path / "1.jsonl", first)))
    prepared(tmp_path / "set2", jsonl(write_jsonl(tmp_path / "2.jsonl", mixed)))
    for split in ("train", "val"):
        before, after = documents_of(tmp_path / "set1", split), documents_of(tmp_path / "set2", split)
        assert before == [document for document in first if document in set(after)]
    share = len(documents_of(tmp_path / "set2", "val")) / len(mixed)
    assert 0.14 < share < 0.26


def test_no_text_is_in_both_splits_even_when_documents_repeat(tmp_path: Path) -> None:
    documents = texts(60) * 5
    prepared(tmp_path / "set", jsonl(write_jsonl(tmp_path / "a.jsonl", documents)), val_fraction=0.5)
    train, val = (documents_of(tmp_path / "set", split) for split in ("train", "val"))
    assert len(train) + len(val) == 300
    assert not set(train) & set(val)


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_long_documents_are_cut_not_counting_the_boundary(tmp_path: Path, kind: str) -> None:
    config = gpt2() if kind == "gpt2" else TokenizerConfig()
    tokenizer = make_tokenizer(config)
    documents = ["short", "words and words " * 20, "exactly" if kind == "gpt2" else "12345678"]
    limit = 8
    folder = write_texts(tmp_path / "texts", documents)
    summary = prepared(tmp_path / "set", text(folder), config, val_fraction=0, max_document_tokens=limit)
    expected = []
    for document in documents:
        expected += [*tokenizer.encode(document)[:limit].tolist(), tokenizer.boundary_token_id]
    found = read_split(tmp_path / "set", "train")
    assert found.tolist() == expected
    assert summary.truncated_documents == 1
    kept = load_tokenizer(tmp_path / "set", load_manifest(tmp_path / "set")).decode(found)
    assert summary.splits["train"].bytes == len(kept.encode())


def test_a_giant_document_is_cut_in_pieces_and_stays_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "é and a line of text 🙂\n"
    documents = ["before", line * 2000, "é" * 9000, "after"]
    folder = write_texts(tmp_path / "texts", documents)
    prepared(tmp_path / "whole", text(folder), val_fraction=0)
    prepared(tmp_path / "whole-cut", text(folder), val_fraction=0, max_document_tokens=20_000)
    monkeypatch.setattr(chunks, "GIANT_BYTES", 10_000)
    monkeypatch.setattr(chunks, "PIECE_BYTES", 3000)
    for name, workers, limit in (("whole", 1, None), ("whole", 2, None), ("whole-cut", 1, 20_000)):
        directory = tmp_path / f"pieces-{name}-{workers}"
        summary = prepared(
            directory, text(folder), val_fraction=0, workers=workers, max_document_tokens=limit
        )
        assert snapshot(directory) == snapshot(tmp_path / name)
    assert summary.truncated_documents == 1
    summary = prepared(tmp_path / "gpt2", text(folder), gpt2(), val_fraction=0)
    tokens = read_split(tmp_path / "gpt2", "train")
    decoded = load_tokenizer(tmp_path / "gpt2", load_manifest(tmp_path / "gpt2"))
    assert decoded.decode(tokens) == "".join(documents)
    assert np.count_nonzero(tokens == 50256) == summary.documents == 4


def test_a_giant_file_that_is_not_utf8_is_one_bad_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "GIANT_BYTES", 1000)
    folder = write_texts(tmp_path / "texts", texts(20))
    (folder / "0005.txt").write_bytes(b"a" * 4000 + b"\xff" + b"a" * 4000)
    summary = prepared(tmp_path / "set", text(folder), max_bad_fraction=0.1)
    assert (summary.documents, summary.bad_documents) == (19, 1)
    assert "0005.txt: not valid UTF-8 at byte 4000" in summary.places[0]


def test_the_header_is_what_numpy_writes_and_reads() -> None:
    for dtype in (np.dtype("<u2"), np.dtype("<u4")):
        array = np.arange(12345, dtype=dtype)
        header = npy_header(dtype, (len(array),))
        assert len(header) == 128
        assert np.array_equal(np.load(io.BytesIO(header + array.tobytes())), array)
        written = io.BytesIO()
        np.save(written, array)
        assert written.getvalue() == header + array.tobytes()


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    message = refusal(tmp_path / "set", jsonl(source), val_fraction=1e-9)
    assert "the val split got none of the 3 documents" in message
    assert "prepare.val_fraction=1e-09" in message
    one = write_texts(tmp_path / "one", ["a single text"])
    assert "is one document" in refusal(tmp_path / "set", text(one))
    assert not (tmp_path / "set").exists()
    assert prepared(tmp_path / "set", text(one), val_fraction=0).documents == 1


def test_too_many_shards_for_five_digits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.prepare import shards

    monkeypatch.setattr(shards, "MAX_SHARD_INDEX", 3)
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    message = refusal(tmp_path / "set", jsonl(source), shard_tokens=50)
    assert "use a larger prepare.shard_tokens" in message


def test_a_small_set_is_prepared_without_a_word_and_the_summary_says_it_all(tmp_path: Path) -> None:
    said: list[str] = []
    config = config_of(tmp_path / "set", jsonl(write_jsonl(tmp_path / "a.jsonl", texts(100))))
    summary = prepare(config, report=said.append)
    assert said == []
    shown = str(summary)
    for expected in (summary.digest, "documents", "bytes a token", "% of the tokens are boundaries", "train"):
        assert expected in shown


def test_the_embedded_corpus_is_prepared_by_the_defaults(tmp_path: Path) -> None:
    config = PrepareScriptConfig()
    config.data.root = str(tmp_path)
    summary = prepare(config, report=lambda line: None)
    assert summary.directory == tmp_path / "npy-stream"
    assert summary.splits["val"].tokens > 100_000
    assert summary.bad_documents == 0
