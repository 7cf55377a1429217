"""Corpora: which documents are found, in which order, and what is said about the bad ones."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from harness.config_groups import CorpusConfig, TextCorpusConfig
from harness.prepare import chunks, faults
from harness.prepare.corpora import list_files
from tests.helpers_prepare import (
    documents_of,
    jsonl,
    prepared,
    refusal,
    small_chunks,
    snapshot,
    text,
    texts,
    write_jsonl,
    write_texts,
)


def test_the_embedded_corpus_is_the_library_without_tests_and_made_files() -> None:
    names = [file.name for file in list_files(CorpusConfig())]
    assert names == sorted(names)
    assert {"json/decoder.py", "random.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not [name for name in names if "_sysconfigdata" in name or name.startswith("config-")]


def test_gz_and_zst_give_the_set_of_the_plain_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 3000)
    plain = write_jsonl(tmp_path / "plain" / "a.jsonl", texts(200))
    data = plain.read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    sources = {"gz": tmp_path / "gz" / "a.jsonl.gz", "zst": tmp_path / "zst" / "a.jsonl.zst"}
    for name, compress in (("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)):
        sources[name].parent.mkdir()
        sources[name].write_bytes(compress(data[:half]) + compress(data[half:]))  # two members
    prepared(tmp_path / "set", jsonl(plain))
    for name, path in sources.items():
        prepared(tmp_path / f"set-{name}", jsonl(path.parent))
        assert snapshot(tmp_path / f"set-{name}") == snapshot(tmp_path / "set")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbled"])
def test_a_damaged_archive_is_refused_by_name(tmp_path: Path, suffix: str, damage: str) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", texts(300)).read_bytes()
    packed = bytearray(gzip.compress(data) if suffix == "gz" else zstandard.ZstdCompressor().compress(data))
    if damage == "truncated":
        del packed[-40:]
    else:
        packed[0] ^= 0xFF
    path = tmp_path / f"b.jsonl.{suffix}"
    path.write_bytes(packed)
    assert f"{path} is damaged" in refusal(tmp_path / "set", jsonl(path))
    assert not (tmp_path / "set").exists()


def test_order_does_not_depend_on_where_the_corpus_lies(tmp_path: Path) -> None:
    for root in ("x", "another/place"):
        for name in ("b/2.txt", "a/10.txt", "a.txt", "b/.hidden.txt", ".git/config"):
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {name}")
        prepared(tmp_path / "sets" / root, text(tmp_path / root), val_fraction=0)
    assert snapshot(tmp_path / "sets" / "x") == snapshot(tmp_path / "sets" / "another" / "place")
    found = documents_of(tmp_path / "sets" / "x", "train")
    assert found == ["text of a.txt", "text of a/10.txt", "text of b/2.txt"]


def test_suffixes_choose_files_and_a_list_keeps_its_order(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", ["one", "two"])
    (folder / "x.md").write_text("three")
    prepared(tmp_path / "set", text(folder, [".md"]), val_fraction=0)
    assert documents_of(tmp_path / "set", "train") == ["three"]
    files = [write_jsonl(tmp_path / name, [name]) for name in ("b.jsonl", "a.jsonl")]
    prepared(tmp_path / "set2", jsonl(files), val_fraction=0)
    assert documents_of(tmp_path / "set2", "train") == ["b.jsonl", "a.jsonl"]


def test_every_kind_of_bad_line_is_counted_and_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 64)
    good = [json.dumps({"body": value}).encode() for value in texts(40)]
    bad = {
        3: b'{"body": "cut off',
        9: b'{"text": "other field"}',
        15: b'{"body": 5}',
        21: b'{"body": "\xff"}',
        27: b'{"body": "\\ud800"}',
        33: b'["body"]',
        36: b"[" * 100_000,
    }
    lines = []
    for number in range(1, 48):
        lines.append(bad[number] if number in bad else good.pop() if number % 10 else b"  \r")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    message = refusal(tmp_path / "set", jsonl(path, "body"))
    for number in bad:
        assert f"{path}:{number}: " in message
    assert "7 of 43 documents are bad" in message
    assert "prepare.max_bad_fraction=0.01" in message
    summary = prepared(tmp_path / "set", jsonl(path, "body"), max_bad_fraction=0.2)
    assert (summary.bad_documents, summary.documents) == (7, 36)
    assert f"{path}:27: " in str(summary)


def test_a_wrong_field_stops_before_the_whole_corpus_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 2000)
    source = write_jsonl(tmp_path / "a.jsonl", texts(5000), "body")
    message = refusal(tmp_path / "set", jsonl(source))
    seen = int(message.split(" documents are bad")[0].split(" of ")[1].replace(",", ""))
    assert 1000 <= seen < 1200
    assert f"{source}:1: the field 'text' is missing (there are 'body')" in message
    assert "corpus.field=" in message
    assert "suffixes" not in message
    with open(source, "a") as file:
        file.writelines(json.dumps({"text": value}) + "\n" for value in texts(100))
    assert prepared(tmp_path / "set", jsonl(source), max_bad_fraction=0.99).bad_documents == 5000


def test_a_giant_document_at_the_start_is_not_taken_for_a_wrong_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GIANT_BYTES", 1000), ("PIECE_BYTES", 500)):
        monkeypatch.setattr(chunks, name, value)
    monkeypatch.setattr(faults, "EARLY_BYTES", 700)
    folder = write_texts(tmp_path / "texts", ["words and words\n" * 200, *texts(9)])
    assert prepared(tmp_path / "set", text(folder), val_fraction=0).documents == 10
    for index in range(10):
        (folder / f"000{index}.txt").write_bytes(b"\xff" * 90)
    message = refusal(tmp_path / "set2", text(write_texts(folder, []), [".txt"]))
    assert "10 of 10 documents are bad" in message
    assert "corpus.suffixes=" in message
    assert "corpus.field" not in message


def test_a_line_number_is_its_own_files_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 300)
    files = []
    for name in ("a", "b"):
        files.append(write_jsonl(tmp_path / f"{name}.jsonl", texts(20)))
        with open(files[-1], "ab") as file:
            file.write(b"nothing\n")
    message = refusal(tmp_path / "set", jsonl(files))
    assert [f"{path}:21: not JSON" in message for path in files] == [True, True]


def test_text_that_is_not_utf8_is_placed_by_byte(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    (folder / "bad.txt").write_bytes(b"abc\xff")
    message = refusal(tmp_path / "set", text(folder))
    assert f"{folder / 'bad.txt'}: not valid UTF-8 at byte 3" in message
    assert prepared(tmp_path / "set", text(folder), max_bad_fraction=0.1).bad_documents == 1


def test_a_missing_or_empty_corpus_stops_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.jsonl").touch()
    target = tmp_path / "sets" / "set"
    assert "does not exist" in refusal(target, jsonl(tmp_path / "no.jsonl"))
    assert "holds no file" in refusal(target, text(tmp_path / "empty"))
    assert "is empty" in refusal(target, jsonl(tmp_path / "nothing.jsonl"))
    write_texts(tmp_path / "texts", texts(3))
    assert "ending in .rst (corpus.suffixes)" in refusal(target, text(tmp_path / "texts", [".rst"]))
    assert "holds no file ending in .jsonl" in refusal(target, jsonl(tmp_path / "texts"))
    twice = [tmp_path / "texts" / "0000.txt", tmp_path / "texts" / ".." / "texts" / "0000.txt"]
    assert f"lists one file twice, as {twice[0]} and {twice[1]}: " in refusal(target, jsonl(twice))
    assert f"lists {twice[0]} twice: " in refusal(target, jsonl([twice[0], twice[0]]))
    assert not (tmp_path / "sets").exists()


@pytest.mark.parametrize("where", ["a list", "a folder", "alone"])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a FIFO", os.mkfifo),
        ("a device", lambda path: path.symlink_to("/dev/zero")),
        ("a link to gone", lambda path: path.symlink_to("gone")),
    ],
)
def test_only_regular_files_are_a_corpus(
    tmp_path: Path, where: str, kind: str, make: Callable[[Path], None]
) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    path = folder / "x.txt"
    make(path)
    given = {"a list": [str(folder / "0000.txt"), str(path)], "a folder": str(folder), "alone": str(path)}[
        where
    ]
    message = refusal(tmp_path / "set", TextCorpusConfig(path=given))
    assert f"{path} is {kind}" in message
    assert not (tmp_path / "set.preparing").exists()
    assert prepared(tmp_path / "set", text(folder, ["1.txt", "2.txt"])).documents == 6  # not asked for


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", ["one"])
    elsewhere = write_texts(tmp_path / "elsewhere", ["two"])
    os.symlink(elsewhere, folder / "link")
    os.symlink(folder, elsewhere / "back")
    prepared(tmp_path / "set", text(folder), val_fraction=0)
    assert documents_of(tmp_path / "set", "train") == ["one", "two"]
