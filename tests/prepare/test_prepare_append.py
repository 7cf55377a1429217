"""A set that grows: what it held stays byte for byte, what is new comes behind it, nothing is added twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config_groups import BpeTokenizerConfig, CorpusConfig
from harness.prepare import Summary, prepare, recorded_corpus_path
from harness.storage import open_store
from harness.storage.manifest import load_manifest
from harness.storage.verify import verify_set
from tests.helpers_prepare import (
    KINDS,
    config_of,
    documents_of,
    jsonl,
    read_split,
    refusal,
    snapshot,
    text,
    texts,
    write_jsonl,
    write_lines,
    write_texts,
)

SETTINGS: dict[str, Any] = {"shard_tokens": 1000, "val_fraction": 0.3}


def made(directory: Path, corpus: CorpusConfig, *args: Any, **settings: Any) -> tuple[Summary, list[str]]:
    said: list[str] = []
    return prepare(config_of(directory, corpus, *args, **SETTINGS | settings), report=said.append), said


def shard_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".npy", ".h5")}


@pytest.mark.parametrize("sharding", ["tokens", "source"])
@pytest.mark.parametrize("kind", KINDS)
def test_old_shards_are_a_prefix_byte_for_byte(tmp_path: Path, kind: str, sharding: str) -> None:
    (tmp_path / "corpus").mkdir()
    corpus = jsonl(tmp_path / "corpus")
    for index in range(3):
        write_lines(tmp_path / "corpus" / f"{index}.jsonl", texts(25, seed=index))
    first, _ = made(tmp_path / "set", corpus, kind=kind, sharding=sharding)
    old, before = shard_files(tmp_path / "set"), load_manifest(tmp_path / "set").splits
    for index in range(3, 5):
        write_lines(tmp_path / "corpus" / f"{index}.jsonl", texts(25, seed=index))
    second, said = made(tmp_path / "set", corpus, kind=kind, sharding=sharding, append=True)
    assert said == [f"{tmp_path / 'set'}: adding 2 of 5 files of the corpus"]
    assert second.digest != first.digest
    assert old.items() < shard_files(tmp_path / "set").items()
    for name, split in load_manifest(tmp_path / "set").splits.items():
        assert split.shards[: len(before[name].shards)] == before[name].shards
        assert len(split.shards) > len(before[name].shards)
    assert verify_set(tmp_path / "set").ok
    again, said = made(tmp_path / "set", corpus, kind=kind, sharding=sharding, append=True)
    assert (again.digest, again.already_there, again.splits) == (second.digest, True, second.splits)
    assert said == [f"{tmp_path / 'set'}: nothing to add, the set has all 5 files of the corpus"]


def test_a_grown_set_holds_and_counts_what_one_made_at_once_does(tmp_path: Path) -> None:
    for name, documents in (
        ("a", [*texts(40), ""]),
        ("b", texts(30, seed=1)),
        ("c", ["x" * 90, *texts(9, seed=2)]),
    ):
        write_jsonl(tmp_path / f"{name}.jsonl", documents)
        with open(tmp_path / f"{name}.jsonl", "a") as file:
            file.write("nothing\n")
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    limits: dict[str, Any] = {"max_document_tokens": 80, "max_bad_fraction": 0.2}
    at_once, _ = made(tmp_path / "at-once", jsonl(files), **limits)
    for count in (1, 2, 3):
        grown, _ = made(tmp_path / "grown", jsonl(files[:count]), append=count > 1, **limits)
    for split in ("train", "val"):
        assert np.array_equal(read_split(tmp_path / "grown", split), read_split(tmp_path / "at-once", split))
    manifests = [load_manifest(tmp_path / name) for name in ("grown", "at-once")]
    assert manifests[0].preparation == manifests[1].preparation
    for field in ("documents", "tokens", "empty_documents", "truncated_documents", "bad_documents", "places"):
        assert getattr(grown, field) == getattr(at_once, field)
    assert grown.splits["train"].bytes == at_once.splits["train"].bytes


def test_naming_only_the_new_files_or_all_of_them_is_the_same(tmp_path: Path) -> None:
    old, new = write_texts(tmp_path / "old", texts(30)), write_texts(tmp_path / "new", texts(20, seed=1))
    for name, corpus in (("only", [new]), ("all", [old, new])):
        directory = tmp_path / name
        made(directory, text(old))
        config = text(old)
        config.path = [str(path) for path in corpus]
        _, said = made(directory, config, append=True)
        assert said[0].startswith(f"{directory}: adding 20 of")
        assert recorded_corpus_path(directory) == [str(old), str(new)]
        everything = text(old)
        everything.path = [str(old), str(new)]
        summary, _ = made(directory, everything)
        assert summary.already_there
    assert snapshot(tmp_path / "only") == snapshot(tmp_path / "all")


def test_a_folder_that_grew_in_the_middle_is_the_corpus_of_the_grown_set(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    made(tmp_path / "set", text(folder))
    for index in range(20):
        (folder / f"0000-{index}.txt").write_text(f"new {index} and some words")
    made(tmp_path / "set", text(folder), append=True)
    assert recorded_corpus_path(tmp_path / "set") == str(folder)
    summary, said = made(tmp_path / "set", text(folder))
    assert summary.already_there
    assert said == []
    assert sorted(documents_of(tmp_path / "set", "train") + documents_of(tmp_path / "set", "val")) == sorted(
        [*texts(30), *(f"new {index} and some words" for index in range(20))]
    )


def test_a_run_goes_on_reading_while_its_set_grows(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(100))
    made(tmp_path / "set", text(folder))
    store = open_store(tmp_path / "set", "train")
    before = read_split(tmp_path / "set", "train")
    (folder / "new.txt").write_text("new words " * 90)
    made(tmp_path / "set", text(folder), append=True)
    assert np.array_equal(store.read_tokens(0, store.total_tokens), before)
    store.close()
    assert np.array_equal(store.read_tokens(0, store.total_tokens), before)  # opened anew, by the same names


def test_a_bpe_set_keeps_the_tokenizer_that_it_was_written_with(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(60))
    bpe = BpeTokenizerConfig(vocab_size=300)
    made(tmp_path / "set", text(folder), bpe)
    tokenizer = (tmp_path / "set" / "tokenizer" / "tokenizer.json").read_bytes()
    for index in range(40):
        (folder / f"other{index}.txt").write_text(f"zzzz zzzz qqqq {index} " * 9)
    made(tmp_path / "set", text(folder), bpe, append=True)
    assert (tmp_path / "set" / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer
    assert verify_set(tmp_path / "set").ok


def test_what_made_the_set_before_stays_recorded(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    digests = [made(tmp_path / "set", text(folder))[0].digest]
    for index in range(2):
        (folder / f"new{index}.txt").write_text(f"new words {index}")
        digests.append(made(tmp_path / "set", text(folder), append=True)[0].digest)
    recorded = json.loads((tmp_path / "set" / "provenance.json").read_text())
    assert [earlier["metadata_sha256"] for earlier in recorded["grown_from"]] == digests[:2]
    assert [earlier["source_files"] for earlier in recorded["grown_from"]] == [30, 31]
    assert len({file["path"] for file in recorded["source_files"]}) == 32


def test_only_a_set_that_is_there_can_grow(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    message = refusal(tmp_path / "set", text(folder), append=True, **SETTINGS)
    assert "holds none" in message
    assert "prepare.append=false" in message
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert "holds none" in refusal(tmp_path / "other", text(folder), append=True, **SETTINGS)


def test_another_making_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    made(tmp_path / "set", text(folder))
    before = snapshot(tmp_path / "set")
    (folder / "new.txt").write_text("new words")

    def said(**settings: Any) -> str:
        return refusal(tmp_path / "set", text(folder), append=True, **SETTINGS | settings)

    assert "preparation.val_fraction: there 0.3, asked for 0.5" in said(val_fraction=0.5)
    assert "preparation.shard_tokens: there 1000, asked for 2000" in said(shard_tokens=2000)
    assert "preparation.sharding: there tokens, asked for source" in said(sharding="source")
    assert "storage.format: there npy, asked for hdf5" in said(kind="hdf5-stream")
    assert "storage.layout: there stream, asked for rows" in said(kind="npy-rows")
    message = refusal(
        tmp_path / "set", text(folder), BpeTokenizerConfig(vocab_size=300), append=True, **SETTINGS
    )
    assert "tokenizer.name: there byte, asked for bpe" in message
    assert snapshot(tmp_path / "set") == before


def test_a_known_file_that_changed_is_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    made(tmp_path / "set", text(folder))
    (folder / "0003.txt").write_text("something else")
    message = refusal(tmp_path / "set", text(folder), append=True, **SETTINGS)
    assert f"{folder / '0003.txt'} (14 bytes" in message
    assert "changed since" in message


def test_a_moved_or_copied_corpus_is_known_and_never_added_again(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    made(tmp_path / "set", text(folder))
    (tmp_path / "link").symlink_to(folder)
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    for place in ("link", "copy"):
        _, said = made(tmp_path / "set", text(tmp_path / place), append=True)
        assert "nothing to add" in said[0]
    folder.rename(tmp_path / "moved")
    _, said = made(tmp_path / "set", text(tmp_path / "moved"), append=True)
    assert "nothing to add" in said[0]
    message = refusal(tmp_path / "set", text(tmp_path / "copy"), append=True, **SETTINGS)
    assert "may be the same text in another place" in message
    assert str(folder / "0000.txt") in message


def test_files_of_one_name_in_another_folder_are_new(tmp_path: Path) -> None:
    for name, count in (("a", 30), ("b", 20)):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "part-0.jsonl", texts(count, seed=count))
        (tmp_path / name / "part-1.jsonl").write_text(f'{{"text": "{name}"}}')  # of one size
    made(tmp_path / "set", jsonl(tmp_path / "a"))
    summary, _ = made(tmp_path / "set", jsonl(tmp_path / "b"), append=True)
    assert summary.documents == 52


@pytest.mark.parametrize("damage", ["absent", "no files", "no documents"])
def test_a_set_that_does_not_say_what_it_was_made_from_does_not_grow(tmp_path: Path, damage: str) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    made(tmp_path / "set", text(folder))
    (folder / "new.txt").write_text("new words")
    path = tmp_path / "set" / "provenance.json"
    recorded = json.loads(path.read_text())
    if damage == "absent":
        path.unlink()
    else:
        recorded.pop({"no files": "source_files", "no documents": "documents"}[damage])
        path.write_text(json.dumps(recorded))
    message = refusal(tmp_path / "set", text(folder), append=True, **SETTINGS)
    assert "does not say from which files" in message
    assert "prepare.overwrite=true" in message


def test_a_damaged_shard_and_files_of_others_are_in_the_way(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(60))
    made(tmp_path / "set", text(folder))
    (folder / "new.txt").write_text("new words")
    (tmp_path / "set" / "notes.txt").write_text("mine")
    assert "notes.txt" in refusal(tmp_path / "set", text(folder), append=True, **SETTINGS)
    (tmp_path / "set" / "notes.txt").unlink()
    shard = tmp_path / "set" / "val_00000.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    message = refusal(tmp_path / "set", text(folder), append=True, **SETTINGS)
    assert f"{shard} is not the file that was written" in message


def test_too_many_bad_documents_are_counted_in_the_new_files_alone(tmp_path: Path) -> None:
    old = write_jsonl(tmp_path / "old.jsonl", texts(500))
    made(tmp_path / "set", jsonl(old))
    before = snapshot(tmp_path / "set")
    new = write_jsonl(tmp_path / "new.jsonl", texts(20, seed=1))
    with open(new, "a") as file:
        file.write("nothing\n" * 2)
    message = refusal(tmp_path / "set", jsonl(new), append=True, **SETTINGS)
    assert "2 of 22 documents are bad" in message
    assert f"{new}:21" in message
    assert snapshot(tmp_path / "set") == before


def test_a_set_made_before_shards_were_recorded_by_source_grows_too(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", texts(40))
    first, _ = made(tmp_path / "set", text(folder))
    path = tmp_path / "set" / "provenance.json"
    recorded = json.loads(path.read_text())
    for key in ("documents", "skipped_windows", "padding"):  # as an earlier version wrote it
        del recorded["documents"][key]
    path.write_text(json.dumps(recorded))
    (folder / "new.txt").write_text("new words")
    second, _ = made(tmp_path / "set", text(folder), append=True)
    assert second.documents == first.documents + 1
    assert json.loads(path.read_text())["documents"]["documents"] == 41


@pytest.mark.parametrize("sharding", ["tokens", "source"])
def test_a_renamed_file_is_not_added_again_unasked(tmp_path: Path, sharding: str) -> None:
    corpus = text(write_texts(tmp_path / "corpus", texts(20)))
    made(tmp_path / "set", corpus, sharding=sharding)
    before = snapshot(tmp_path / "set")
    (tmp_path / "corpus" / "0007.txt").rename(tmp_path / "corpus" / "renamed.txt")
    said = refusal(tmp_path / "set", corpus, **SETTINGS, sharding=sharding, append=True)
    assert "renamed.txt" in said
    assert "0007.txt" in said
    assert "may be the same text under another name" in said
    assert snapshot(tmp_path / "set") == before


def test_a_damaged_record_of_the_making_is_one_that_is_not_there(tmp_path: Path) -> None:
    corpus = text(write_texts(tmp_path / "corpus", texts(20)))
    made(tmp_path / "set", corpus, sharding="source")
    write_texts(tmp_path / "corpus" / "new", texts(2, seed=9))
    whole = json.loads((tmp_path / "set" / "provenance.json").read_text())
    for keys, wrong in DAMAGED_RECORDS:
        record = json.loads(json.dumps(whole))
        place = record
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = wrong
        copy = shutil.copytree(tmp_path / "set", tmp_path / "copy")
        (copy / "provenance.json").write_text(json.dumps(record))
        settings = SETTINGS | {"sharding": "source"}
        if keys[0] not in ("versions", "corpus_path"):  # which growing does without
            said = refusal(copy, corpus, **settings, append=True)
            assert "does not say from which files the set was made" in said
        prepare(config_of(copy, corpus, **settings, overwrite=True), report=lambda line: None)
        assert verify_set(copy).ok
        again, _ = made(copy, corpus, sharding="source")
        assert again.documents == 22
        shutil.rmtree(copy)


DAMAGED_RECORDS: list[tuple[tuple[str | int, ...], Any]] = [
    (("documents",), []),
    (("documents", "empty"), None),
    (("documents", "bad_places"), 1),
    (("files_sha256",), [1]),
    (("files_sha256", "train_00000.npy"), 5),
    (("source_files", 0, "path"), None),
    (("source_files", 0, "size"), {}),
    (("source_files", 0), "x"),
    (("sources",), {"a": 1}),
    (("sources", 0, "counts"), {}),
    (("sources", 0, "counts", "chain"), "x"),
    (("sources", 0, "counts", "padding"), "1"),
    (("sources", 0, "splits"), {}),
    (("sources", 0, "splits", "train"), []),
    (("sources", 0, "splits", "val", "bytes"), None),
    (("corpus_path",), 1),
    (("versions",), []),
]
