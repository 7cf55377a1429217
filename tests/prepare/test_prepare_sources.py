"""One shard a source file: which file is where, and what need not be made again when a few files change."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config import TrainConfig
from harness.config_groups import Hdf5DataConfig
from harness.data_setup import open_data
from harness.errors import UserError
from harness.prepare import Summary, chunks, prepare
from harness.prepare.convert import convert
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import (
    KINDS,
    config_of,
    jsonl,
    prepared,
    read_split,
    refusal,
    small_chunks,
    snapshot,
    text,
    texts,
    write_lines,
    write_texts,
)

SETTINGS: dict[str, Any] = {"sharding": "source", "val_fraction": 0.3}


def lines(folder: Path, count: int = 6) -> Path:
    """A folder of files of JSON lines; one is empty, and one holds a single document."""
    folder.mkdir()
    for index in range(count):
        documents = texts(20, seed=index)
        write_lines(folder / f"{index}.jsonl", documents if index != 3 else documents[:1])
    (folder / "empty.jsonl").write_text("")
    return folder


def said(directory: Path, corpus: Any, **settings: Any) -> tuple[Summary, list[str]]:
    report: list[str] = []
    return prepare(config_of(directory, corpus, **SETTINGS | settings), report=report.append), report


def sources(directory: Path) -> list[dict[str, Any]]:
    return json.loads((directory / "provenance.json").read_text())["sources"]


def inodes(directory: Path) -> set[int]:
    return {path.stat().st_ino for path in directory.iterdir() if path.name.startswith(("train", "val"))}


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_that_holds_documents_is_a_shard_of_its_own(tmp_path: Path, kind: str) -> None:
    folder = lines(tmp_path / "corpus")
    prepared(tmp_path / "set", jsonl(folder), kind=kind, shard_tokens=50, **SETTINGS)
    manifest = load_manifest(tmp_path / "set")
    recorded = sources(tmp_path / "set")
    assert [source["name"] for source in recorded] == [*(f"{i}.jsonl" for i in range(6)), "empty.jsonl"]
    for name, split in manifest.splits.items():
        stems = [shard.file.split(".")[0] for shard in split.shards]
        top, _, side = name.partition(".")
        parts = [source["splits"][top][side] if side else source["splits"][top] for source in recorded]
        assert [stem for part in parts for stem in part["shards"]] == stems
        assert all(len(part["shards"]) <= 1 for part in parts)
        assert parts[-1]["shards"] == []
        assert len(stems) in (5, 6)  # the single document is in one of the splits
    assert manifest.preparation["sharding"] == "source"
    assert "shard_tokens" not in manifest.preparation


def test_the_tokens_and_their_order_are_those_of_the_usual_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_texts(tmp_path / "texts", texts(30))
    monkeypatch.setattr(chunks, "GIANT_BYTES", 1000)
    (folder / "0007.txt").write_text("a line of a long text\n" * 100)
    prepared(tmp_path / "usual", text(folder), val_fraction=0.3)
    for workers in (1, 2):
        small_chunks(monkeypatch, 500)
        prepared(tmp_path / f"set{workers}", text(folder), workers=workers, **SETTINGS)
        for split in ("train", "val"):
            expected = read_split(tmp_path / "usual", split)
            assert np.array_equal(read_split(tmp_path / f"set{workers}", split), expected)
    assert snapshot(tmp_path / "set1") == snapshot(tmp_path / "set2")
    manifest = load_manifest(tmp_path / "set1")
    assert all(shard.documents == 1 for split in manifest.splits.values() for shard in split.shards)


@pytest.mark.parametrize("kind", ["npy-stream", "gzip-rows", "npy-pairs"])
def test_only_the_files_that_changed_are_made_again(tmp_path: Path, kind: str) -> None:
    folder = lines(tmp_path / "corpus")
    said(tmp_path / "set", jsonl(folder), kind=kind)
    kept = inodes(tmp_path / "set")
    write_lines(folder / "2.jsonl", texts(25, seed=99))
    write_lines(folder / "1b.jsonl", texts(5, seed=98))
    (folder / "4.jsonl").unlink()
    summary, report = said(tmp_path / "set", jsonl(folder), kind=kind, overwrite=True)
    assert report == [f"{tmp_path / 'set'}: 5 of 7 source files are unchanged, their shards are kept"]
    assert 0 < len(inodes(tmp_path / "set") & kept) < len(inodes(tmp_path / "set"))
    fresh, _ = said(tmp_path / "fresh", jsonl(folder), kind=kind)
    assert summary.digest == fresh.digest
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "fresh")
    assert (summary.splits, summary.documents, summary.padding) == (
        fresh.splits,
        fresh.documents,
        fresh.padding,
    )
    kept_names = ("files_sha256", "documents", "sources", "source_files", "corpus_fingerprint")
    made, anew = (json.loads((tmp_path / n / "provenance.json").read_text()) for n in ("set", "fresh"))
    assert [made[name] for name in kept_names] == [anew[name] for name in kept_names]


def test_nothing_changed_reuses_all_and_gives_the_same_set(tmp_path: Path) -> None:
    folder = lines(tmp_path / "corpus")
    said(tmp_path / "set", jsonl(folder))
    before, kept = snapshot(tmp_path / "set"), inodes(tmp_path / "set")
    _, report = said(tmp_path / "set", jsonl(folder), overwrite=True)
    assert "7 of 7 source files" in report[0]
    assert snapshot(tmp_path / "set") == before
    assert inodes(tmp_path / "set") == kept


def test_counts_of_bad_documents_stay_with_their_file(tmp_path: Path) -> None:
    folder = lines(tmp_path / "corpus")
    for name in ("0", "5"):
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write("nothing\n")
    first, _ = said(tmp_path / "set", jsonl(folder), max_bad_fraction=0.1)
    write_lines(folder / "5.jsonl", texts(20, seed=5))
    second, report = said(tmp_path / "set", jsonl(folder), max_bad_fraction=0.1, overwrite=True)
    assert "6 of 7" in report[0]
    assert (first.bad_documents, second.bad_documents) == (2, 1)
    assert second.places == first.places[:1]
    assert f"{folder / '0.jsonl'}:21" in second.places[0]


def test_a_damaged_shard_another_setting_or_other_versions_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lines(tmp_path / "corpus")
    said(tmp_path / "straight", jsonl(folder))
    said(tmp_path / "set", jsonl(folder))
    shard = tmp_path / "set" / "train_00001.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    _, report = said(tmp_path / "set", jsonl(folder), overwrite=True)
    assert "6 of 7 source files" in report[0]
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "straight")
    _, report = said(tmp_path / "set", jsonl(folder), overwrite=True, max_document_tokens=10)
    assert report == []
    _, report = said(
        tmp_path / "set", jsonl(folder), overwrite=True, max_document_tokens=10, kind="hdf5-stream"
    )
    assert report == []
    made = tmp_path / "set" / "provenance.json"
    made.write_text(made.read_text().replace('"harness": "', '"harness": "9.'))
    _, report = said(
        tmp_path / "set", jsonl(folder), overwrite=True, max_document_tokens=10, kind="hdf5-stream"
    )
    assert report == []
    made.write_text('{"sources": [5]}')
    said(tmp_path / "set", jsonl(folder), overwrite=True)
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "straight")


def test_files_of_one_name_are_never_taken_for_one_another(tmp_path: Path) -> None:
    for name, word in (("a", "one"), ("b", "two")):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "part.jsonl", [f"{word} {i}" for i in range(20)])
        os.utime(tmp_path / name / "part.jsonl", ns=(5, 5))
    corpus = jsonl([tmp_path / "a", tmp_path / "b"])
    said(tmp_path / "set", corpus)
    before = snapshot(tmp_path / "set")
    _, report = said(tmp_path / "set", corpus, overwrite=True)
    assert report == []
    assert snapshot(tmp_path / "set") == before


def test_a_converted_set_knows_its_sources_too(tmp_path: Path) -> None:
    folder = lines(tmp_path / "corpus")
    said(tmp_path / "set", jsonl(folder))
    config = config_of(tmp_path / "hdf5", jsonl(folder), kind="hdf5-stream", **SETTINGS)
    convert(tmp_path / "set", tmp_path / "hdf5", config.data, report=lambda line: None)
    (folder / "0.jsonl").unlink()
    _, report = said(tmp_path / "hdf5", jsonl(folder), kind="hdf5-stream", overwrite=True)
    assert "6 of 6 source files" in report[0]
    said(tmp_path / "fresh", jsonl(folder), kind="hdf5-stream")
    assert snapshot(tmp_path / "hdf5") == snapshot(tmp_path / "fresh")


def test_another_sharding_is_another_set_and_named(tmp_path: Path) -> None:
    folder = lines(tmp_path / "corpus")
    for sharding, other in (("source", "tokens"), ("tokens", "source")):
        directory = tmp_path / sharding
        prepared(directory, jsonl(folder), val_fraction=0.3, sharding=sharding)
        assert prepared(directory, jsonl(folder), val_fraction=0.3, sharding=sharding).already_there
        message = refusal(directory, jsonl(folder), val_fraction=0.3, sharding=other)
        assert f"preparation.sharding: there {sharding}, asked for {other}" in message
        assert "shard_tokens" not in message
        run = config_of(directory, jsonl(folder), val_fraction=0.3, sharding=other)
        train = TrainConfig(data=run.data, corpus=run.corpus, prepare=run.prepare)
        with pytest.raises(
            UserError, match=f"prepare.sharding: the set {sharding}, the configuration {other}"
        ):
            open_data(train, lambda line: None)


def test_a_copy_of_the_corpus_is_the_same_corpus_by_source_too(tmp_path: Path) -> None:
    folder = lines(tmp_path / "corpus")
    said(tmp_path / "set", jsonl(folder))
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    summary, report = said(tmp_path / "set", jsonl(tmp_path / "copy"), workers=2)
    assert summary.already_there
    assert "comparing their documents" in report[0]
    write_lines(tmp_path / "copy" / "0.jsonl", texts(20, seed=77))
    assert "corpus_sha256" in refusal(tmp_path / "set", jsonl(tmp_path / "copy"), **SETTINGS)


def test_a_set_that_grew_keeps_its_shards_too_if_all_were_made_by_these_versions(tmp_path: Path) -> None:
    folder = lines(tmp_path / "corpus")
    said(tmp_path / "set", jsonl(folder))
    write_lines(folder / "0b.jsonl", texts(9, seed=50))
    said(tmp_path / "set", jsonl(folder), append=True)
    _, report = said(tmp_path / "set", jsonl(folder), overwrite=True)
    assert "8 of 8 source files" in report[0]
    said(tmp_path / "fresh", jsonl(folder))
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "fresh")
    write_lines(folder / "9.jsonl", texts(9, seed=51))
    said(tmp_path / "set", jsonl(folder), append=True)
    made = json.loads((tmp_path / "set" / "provenance.json").read_text())
    made["grown_from"][0]["versions"]["harness"] = "0.0.0"
    (tmp_path / "set" / "provenance.json").write_text(json.dumps(made))
    _, report = said(tmp_path / "set", jsonl(folder), overwrite=True)
    assert report == []


def test_small_shards_take_no_more_room_than_they_need(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", ["a few words"] * 20 + texts(20))
    config = config_of(tmp_path / "set", text(folder), kind="hdf5-stream", **SETTINGS)
    config.data = Hdf5DataConfig(path=str(tmp_path / "set"), chunk_tokens=1_000_000)
    prepare(config, report=lambda line: None)
    shards = list((tmp_path / "set").glob("*.h5"))
    assert len(shards) == 40
    assert max(path.stat().st_size for path in shards) < 200_000
