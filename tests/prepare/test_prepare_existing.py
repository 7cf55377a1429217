"""A set that is there: never touched unasked, replaced whole when asked, and never by two at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UserError
from harness.prepare import load_tokenizer
from harness.storage import open_store
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import (
    REPOSITORY,
    documents_of,
    gpt2,
    jsonl,
    prepared,
    refusal,
    snapshot,
    start_child,
    text,
    texts,
    write_jsonl,
    write_texts,
)


def whole_state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_the_same_set_is_left_alone(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(100), ""])
    first = prepared(tmp_path / "set", jsonl(source))
    before = whole_state(tmp_path / "set")
    again = prepared(tmp_path / "set", jsonl(source))
    assert again.already_there
    assert not first.already_there
    assert (again.digest, again.splits, again.empty_documents) == (first.digest, first.splits, 1)
    assert "already prepared" in str(again)
    assert whole_state(tmp_path / "set") == before


def _lose_tokenizer(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer")


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a train shard": (lambda folder: (folder / "train_00001.npy").unlink(), "train_00001.npy cannot be read"),
    "a val shard": (lambda folder: (folder / "val_00000.npy").unlink(), "val_00000.npy cannot be read"),
    "a part of one": (lambda folder: os.truncate(folder / "train_00000.npy", 200), "is 200 bytes long"),
    "the tokenizer": (_lose_tokenizer, "encoder.json cannot be read"),
    "a tokenizer file": (
        lambda folder: (folder / "tokenizer" / "vocab.bpe").unlink(),
        "vocab.bpe cannot be read",
    ),
    "its content": (
        lambda folder: (folder / "tokenizer" / "vocab.bpe").write_text("other"),
        "another tokenizer than",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_set_that_lost_something_is_not_taken_for_prepared(tmp_path: Path, name: str) -> None:
    lose, expected = LOSSES[name]
    corpus = jsonl(write_jsonl(tmp_path / "a.jsonl", texts(100)))
    prepared(tmp_path / "set", corpus, gpt2(), shard_tokens=500)
    before = snapshot(tmp_path / "set")
    lose(tmp_path / "set")
    message = refusal(tmp_path / "set", corpus, gpt2(), shard_tokens=500)
    for part in (str(tmp_path / "set"), expected, "prepare.overwrite=true"):
        assert part in message
    prepared(tmp_path / "set", corpus, gpt2(), shard_tokens=500, overwrite=True)
    assert snapshot(tmp_path / "set") == before
    assert load_tokenizer(tmp_path / "set", load_manifest(tmp_path / "set")).name == "gpt2"


def test_a_set_that_is_there_is_found_without_writing_a_thing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    prepared(tmp_path / "sets" / "set", jsonl(source))
    (tmp_path / "sets" / "set.lock").unlink()  # a shared folder may be read-only, where no lock can be made
    assert prepared(tmp_path / "sets" / "set", jsonl(source)).already_there
    assert [path.name for path in (tmp_path / "sets").iterdir()] == ["set"]


def test_a_copy_of_the_corpus_is_the_same_corpus(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    prepared(tmp_path / "set", jsonl(source))
    copy = tmp_path / "copy.jsonl"
    shutil.copyfile(source, copy)
    os.utime(copy, ns=(1, 1))
    assert prepared(tmp_path / "set", jsonl(copy), workers=2).already_there


def test_another_set_is_refused_naming_each_difference(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    prepared(tmp_path / "set", jsonl(source))
    before = whole_state(tmp_path / "set")
    message = refusal(tmp_path / "set", jsonl(source), val_fraction=0.3, max_document_tokens=9)
    assert "preparation.val_fraction: there 0.2, asked for 0.3" in message
    assert "preparation.max_document_tokens: there None, asked for 9" in message
    assert "shard_tokens" not in message
    assert "prepare.overwrite=true" in message
    with open(source, "a") as file:
        file.write('{"text": "one more"}\n')
    message = refusal(tmp_path / "set", jsonl(source))
    there = json.loads((tmp_path / "set" / "metadata.json").read_text())["preparation"]["corpus_sha256"]
    assert f"preparation.corpus_sha256: there {there}, asked for " in message
    assert whole_state(tmp_path / "set") == before


def test_overwriting_swaps_in_a_whole_set_and_disturbs_no_reader(tmp_path: Path) -> None:
    old = write_jsonl(tmp_path / "old.jsonl", texts(100))
    new = write_jsonl(tmp_path / "new.jsonl", texts(50, seed=1))
    prepared(tmp_path / "set", jsonl(old))
    mapped = np.load(tmp_path / "set" / "train_00000.npy", mmap_mode="r")
    held = mapped.copy()
    prepared(tmp_path / "set", jsonl(new), overwrite=True)
    assert np.array_equal(mapped, held)
    found = documents_of(tmp_path / "set", "train") + documents_of(tmp_path / "set", "val")
    assert sorted(found) == sorted(texts(50, seed=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.jsonl", "old.jsonl", "set", "set.lock"]


@pytest.mark.parametrize("mmap", [True, False])
def test_overwriting_under_an_open_store_is_an_error_and_never_other_tokens(
    tmp_path: Path, mmap: bool
) -> None:
    old, new = ([f"{letter}{i:04d}" * 5 for i in range(100)] for letter in "ab")
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", documents) for i, documents in enumerate((old, new))]
    prepared(tmp_path / "set", jsonl(sources[0]), val_fraction=0, shard_tokens=100)
    store = open_store(tmp_path / "set", "train", mmap=mmap)
    whole = open_store(tmp_path / "set", "train").read_tokens(0, store.total_tokens)
    store.read_tokens(0, 250)
    prepared(tmp_path / "set", jsonl(sources[1]), val_fraction=0, shard_tokens=100, overwrite=True)
    assert open_store(tmp_path / "set", "train").offsets == store.offsets
    assert np.array_equal(
        store.read_tokens(0, 300), whole[:300]
    )  # files that were open are still the old ones
    for start in range(300, store.total_tokens, 100):
        with pytest.raises(
            UserError, match=r"train_\d+.npy is not the file that was checked.*inode"
        ) as caught:
            store.read_tokens(start, 100)
        assert "start a new run on the new set" in str(caught.value)
    store.close()
    with pytest.raises(UserError, match="is not the file that was checked"):
        store.read_tokens(0, 100)


def test_a_failed_overwrite_leaves_the_old_set(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    prepared(tmp_path / "set", jsonl(source))
    before = whole_state(tmp_path / "set")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nothing\n" * 5)
    assert "5 of 5 documents are bad" in refusal(tmp_path / "set", jsonl(bad), overwrite=True)
    assert whole_state(tmp_path / "set") == before


def test_files_of_others_are_never_lost(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert "is not a prepared set" in refusal(tmp_path / "mine", jsonl(source), overwrite=True)
    prepared(tmp_path / "set", jsonl(source))
    (tmp_path / "set" / "notes.txt").write_text("mine")
    message = refusal(tmp_path / "set", jsonl(source), overwrite=True)
    assert "notes.txt" in message
    assert (tmp_path / "set" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    assert prepared(tmp_path / "set", jsonl(write_jsonl(tmp_path / "a.jsonl", texts(50)))).documents == 50


def test_two_preparations_at_once_make_one_set(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(500))
    children = [start_child(source, tmp_path / "set") for _ in range(2)]
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    already = sorted("already True" in out for out, _ in outputs)
    assert already == [False, True]
    digests = {line for out, _ in outputs for line in out.split() if len(line) == 64 and line.isalnum()}
    assert digests == {prepared(tmp_path / "other", jsonl(source), shard_tokens=3000).digest}


_FULL_DISK = """
import resource, sys
from harness.config import PrepareScriptConfig
from harness.config_groups import DataConfig, JsonlCorpusConfig, PrepareConfig
from harness.errors import UserError
from harness.prepare import chunks, pipeline, prepare
chunks.CHUNK_BYTES, pipeline.JOURNAL_SECONDS = 2000, 0.0
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    prepare(PrepareScriptConfig(
        data=DataConfig(path=sys.argv[2]), corpus=JsonlCorpusConfig(path=sys.argv[1]),
        prepare=PrepareConfig(val_fraction=0.2, workers=1)))
except UserError as error:
    print(error)
"""


def test_no_room_says_how_much_is_needed_and_goes_on_later(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(2000))
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(source), str(tmp_path / "set")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "set.preparing: no room" in done.stdout
    assert "bytes are needed" in done.stdout
    assert "are free" in done.stdout
    assert not (tmp_path / "set").exists()
    said = (tmp_path / "set.preparing" / "journal.json").read_text()
    assert json.loads(said)["state"]["splits"]["train"]["partial_tokens"] > 10_000
    prepared(tmp_path / "set", jsonl(source))
    prepared(tmp_path / "other", jsonl(source))
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "other")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(10))
    (tmp_path / "file").write_text("not a folder")
    message = refusal(tmp_path / "file" / "set", jsonl(source))
    assert str(tmp_path / "file") in message


@pytest.mark.parametrize("place", ["tokenizer/notes.txt", "provenance.json/notes.txt"])
def test_a_file_anywhere_in_a_set_is_not_lost_when_the_set_is_replaced(tmp_path: Path, place: str) -> None:
    corpus = text(write_texts(tmp_path / "corpus", texts(20)))
    prepared(tmp_path / "set", corpus)
    notes = tmp_path / "set" / place
    if notes.parent.is_file():
        notes.parent.unlink()
    notes.parent.mkdir()
    notes.write_text("mine")
    said = refusal(tmp_path / "set", corpus, overwrite=True, val_fraction=0.4)
    assert place in said
    assert notes.read_text() == "mine"


def test_a_set_inside_its_own_corpus_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path, texts(20))
    said = refusal(tmp_path / "data" / "set", text(tmp_path))
    assert "lies in the corpus that it is made from" in said
    assert not (tmp_path / "data").exists()
    for corpus in (text(tmp_path, [".txt"]), jsonl(write_jsonl(tmp_path / "a.jsonl", texts(20)).parent)):
        directory = tmp_path / "data" / corpus.name
        first = prepared(directory, corpus)
        assert prepared(directory, corpus).digest == first.digest


def test_the_root_of_the_file_system_is_no_place_for_a_set(tmp_path: Path) -> None:
    corpus = jsonl(write_jsonl(tmp_path / "a.jsonl", texts(20)))
    assert "is the root of the file system" in refusal(Path("/"), corpus)
