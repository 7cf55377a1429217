"""Parquet: the same documents as JSON lines with the same texts, in bounded pieces, and no silent loss."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from harness.config_groups import ParquetCorpusConfig
from harness.errors import UserError
from harness.prepare import chunks
from harness.prepare.chunks import RowsChunk, stream_chunks
from harness.prepare.corpora import list_files
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import (
    REPOSITORY,
    config_of,
    documents_of,
    gpt2,
    jsonl,
    prepared,
    refusal,
    small_chunks,
    snapshot,
    start_child,
    texts,
    write_jsonl,
)


def parquet(path: Path | list[Path], field: str = "text") -> ParquetCorpusConfig:
    given = [str(p) for p in path] if isinstance(path, list) else str(path)
    return ParquetCorpusConfig(path=given, field=field)


def write_parquet(path: Path, values: Any, name: str = "text", kind: Any = None, **settings: Any) -> Path:
    """A file with a column of `values` between two that nobody asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    table = pa.table({"id": range(len(column)), name: column, "tags": [["a", "b"]] * len(column)})
    pq.write_table(table, path, **settings)
    return path


def all_documents(directory: Path) -> list[str]:
    return sorted(documents_of(directory, "train") + documents_of(directory, "val"))


@pytest.mark.parametrize("workers", [1, 2])
def test_parquet_gives_the_tokens_and_the_corpus_of_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    small_chunks(monkeypatch, 1500)
    documents = [*texts(200), "", *texts(100, seed=1), ""]
    lines = write_jsonl(tmp_path / "a.jsonl", documents)
    write_parquet(tmp_path / "parquet" / "1.parquet", documents[:90], row_group_size=7, compression="zstd")
    write_parquet(tmp_path / "parquet" / "2.parquet", documents[90:])
    for tokenizer in (None, gpt2()):
        name = "bytes" if tokenizer is None else "gpt2"
        of_lines = prepared(tmp_path / f"lines-{name}", jsonl(lines), tokenizer)
        corpus = parquet(tmp_path / "parquet")
        of_rows = prepared(tmp_path / f"rows-{name}", corpus, tokenizer, workers=workers)
        assert of_rows.splits == of_lines.splits
        assert of_rows.empty_documents == of_lines.empty_documents == 2
        one, other = (load_manifest(tmp_path / f"{kind}-{name}") for kind in ("lines", "rows"))
        assert other.content_sha256 == one.content_sha256
        assert other.preparation == one.preparation | {"corpus": "parquet"}
        assert one.preparation["corpus_sha256"] is not None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (pa.string(), {"use_dictionary": False}),
        (pa.large_string(), {}),
        (pa.binary(), {}),
        (pa.dictionary(pa.int16(), pa.string()), {}),
        (pa.string(), {"row_group_size": 1, "data_page_version": "2.0", "compression": "gzip"}),
    ],
    ids=str,
)
def test_every_kind_of_string_column_is_read(tmp_path: Path, kind: Any, settings: dict[str, Any]) -> None:
    documents = [*texts(30), "the same", "the same"]
    plain: Any = documents if not pa.types.is_binary(kind) else [text.encode() for text in documents]
    write_parquet(tmp_path / "a.parquet", plain, kind=kind, **settings)
    prepared(tmp_path / "set", parquet(tmp_path / "a.parquet"))
    assert all_documents(tmp_path / "set") == sorted(documents)


def test_chunks_follow_the_text_and_not_how_the_file_was_written(tmp_path: Path) -> None:
    documents = texts(3000)

    def chunked(path: Path) -> list[tuple[int, tuple[bytes | None, ...]]]:
        corpus = parquet(path)
        every = list(stream_chunks(corpus, list_files(corpus)))
        assert sum(chunk.source_bytes for chunk in every) == path.stat().st_size
        return [(c.first_row, c.values) for c in every if isinstance(c, RowsChunk)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 10_000)
        one = chunked(write_parquet(tmp_path / "a.parquet", documents, row_group_size=1 << 20))
        many = chunked(
            write_parquet(tmp_path / "b.parquet", documents, row_group_size=11, compression="gzip")
        )
    assert one == many
    assert [value for _, values in one for value in values] == [text.encode() for text in documents]
    assert len(one) > 20
    for _, values in one[:-1]:
        size = sum(len(value or b"") + 1 for value in values)
        assert 10_000 <= size <= 10_000 + len(values[-1] or b"")


def test_a_row_group_is_never_held_whole(tmp_path: Path) -> None:
    """200 MB of text in one row group of many pages; the process that reads it grows by less than 100 MiB."""
    chance = np.random.default_rng(0)
    block = chance.integers(97, 123, 200_000, np.uint8).tobytes().decode()
    column = pa.array([block[i:] + block[:i] for i in range(1000)])
    path = write_parquet(tmp_path / "a.parquet", column, write_batch_size=10, use_dictionary=False)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    code = (
        "import re, sys\n"
        "import pyarrow, pyarrow.parquet\n"
        "from harness.config_groups import ParquetCorpusConfig\n"
        "from harness.prepare import chunks\n"
        "from harness.prepare.corpora import list_files\n"
        "corpus = ParquetCorpusConfig(path=sys.argv[1])\n"
        "def memory(name):\n"
        "    return int(re.search(name + r':\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
        "before = memory('VmRSS')\n"
        "read = sum(sum(map(len, c.values)) for c in chunks.stream_chunks(corpus, list_files(corpus)))\n"
        "print(read, memory('VmHWM') - before)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    read, grown = map(int, out.split())
    assert read == 200_000_000
    assert grown < 100 << 10


def test_a_null_or_broken_value_is_a_bad_document_with_its_file_and_row(tmp_path: Path) -> None:
    values = [text.encode() for text in texts(50)]
    first = write_parquet(tmp_path / "a.parquet", [*values[:20], None, *values[20:]], row_group_size=8)
    broken = pa.array([b"good", b"caf\xe9"]).cast(pa.large_binary()).view(pa.large_string())
    second = write_parquet(tmp_path / "b.parquet", broken)
    corpus = parquet([first, second])
    summary = prepared(tmp_path / "set", corpus, max_bad_fraction=0.1)
    assert summary.bad_documents == 2
    assert summary.places == [
        f"{first}, row 20 (from 0): the column 'text' is null, expected a string",
        f"{second}, row 1 (from 0): not valid UTF-8 at byte 3 (unexpected end of data)",
    ]
    assert len(all_documents(tmp_path / "set")) == 51
    assert f"{first}, row 20" in refusal(tmp_path / "other", corpus)


@pytest.mark.parametrize(
    ("column", "kind"),
    [([1, 2], "int64"), ([["a"], ["b"]], "list<"), ([{"a": "x"}] * 2, "struct<"), ([None, None], "null")],
)
def test_a_column_of_anything_but_strings_is_refused(tmp_path: Path, column: list[Any], kind: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", column)
    said = refusal(tmp_path / "set", parquet(path))
    assert f"{path}: its column 'text' holds {kind}" in said
    assert "Set corpus.field= to a column of strings: id (int64), text (" in said


def test_a_missing_column_is_refused_before_any_file_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", texts(10))
    last = write_parquet(tmp_path / "2.parquet", texts(10), name="content")
    said = refusal(tmp_path / "set", parquet(tmp_path))
    assert f"{last} has no column 'text'" in said
    assert "corpus.field=" in said
    assert "id (int64), content (string), tags (list<" in said
    corpus = parquet(tmp_path)
    with pytest.raises(UserError, match="has no column"):
        next(stream_chunks(corpus, list_files(corpus)))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "has 2 columns 'text'" in refusal(tmp_path / "set", parquet(tmp_path))


def test_a_damaged_file_is_an_error_that_names_it_or_does_no_harm(tmp_path: Path) -> None:
    """With the checksums of pages, which a writer may leave out, no flipped bit changes a document."""
    chance = random.Random(5)
    documents = texts(120)
    path = write_parquet(tmp_path / "a.parquet", documents, write_page_checksum=True, row_group_size=50)
    whole = path.read_bytes()
    corpus = parquet(path)

    def read() -> list[bytes | None]:
        every = stream_chunks(corpus, list_files(corpus))
        return [value for c in every if isinstance(c, RowsChunk) for value in c.values]

    for trial in range(60):
        data = bytearray(whole)
        place = chance.randrange(len(data))
        if trial % 4 == 0:
            del data[place:]
        else:
            data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            found = read()
        except UserError as error:
            said = str(error)
        else:
            said = ""
            assert found == [text.encode() for text in documents]
        assert said.startswith(f"{path}") or (not said and len(data) == len(whole))
    assert not (tmp_path / "set").exists()


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text(json.dumps({"text": "no"}))
    assert f"{tmp_path}/a.parquet is damaged or not Parquet" in refusal(tmp_path / "set", parquet(tmp_path))


def test_a_folder_gives_its_parquet_files_and_nothing_else(tmp_path: Path) -> None:
    documents = texts(30)
    root = tmp_path / "corpus"
    write_parquet(root / "year=2024" / "part-1.snappy.parquet", documents[:10])
    write_parquet(root / "year=2023" / "part-1.snappy.parquet", documents[10:])
    write_parquet(root / ".hidden.parquet", ["hidden"])
    (root / "_SUCCESS").write_text("")
    (root / "readme.txt").write_text("not this")
    write_parquet(root / "empty.parquet", [], kind=pa.string())
    prepared(tmp_path / "set", parquet(root))
    assert all_documents(tmp_path / "set") == sorted(documents)
    assert "holds no file ending in .parquet" in refusal(tmp_path / "other", parquet(tmp_path / "set"))


def test_a_shard_a_source_file_is_a_shard_a_parquet_file(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        write_parquet(tmp_path / "parquet" / f"{name}.parquet", texts(40, seed))
        write_jsonl(tmp_path / "lines" / f"{name}.jsonl", texts(40, seed))
    prepared(tmp_path / "rows", parquet(tmp_path / "parquet"), sharding="source")
    prepared(tmp_path / "of-lines", jsonl(tmp_path / "lines"), sharding="source")
    one, other = (load_manifest(tmp_path / name) for name in ("rows", "of-lines"))
    assert one.raw["splits"] == other.raw["splits"]
    assert len(one.splits["train"].shards) == 3


def test_a_finished_set_is_known_by_its_documents(tmp_path: Path) -> None:
    documents = texts(80)
    path = write_parquet(tmp_path / "a.parquet", documents)
    prepared(tmp_path / "set", parquet(path))
    assert prepared(tmp_path / "set", parquet(path)).already_there
    write_parquet(path, documents, compression="gzip", row_group_size=3)  # another file, the same texts
    assert prepared(tmp_path / "set", parquet(path)).already_there
    write_parquet(path, documents[1:])
    assert "preparation.corpus_sha256" in refusal(tmp_path / "set", parquet(path))
    said = refusal(tmp_path / "set", parquet(path, field="id"))
    assert "preparation.field: there text, asked for id" in said


@pytest.mark.parametrize("kill_at", [6, 9, 14])
def test_a_killed_preparation_goes_on_and_ends_with_the_same_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    small_chunks(monkeypatch, 2000)
    path = write_parquet(tmp_path / "a.parquet", texts(150), row_group_size=40)
    child = start_child(path, tmp_path / "set", kill_at=kill_at)
    child.communicate(timeout=60)
    assert child.returncode == -9
    assert not (tmp_path / "set").exists()
    said: list[str] = []
    from harness.prepare import prepare

    prepare(config_of(tmp_path / "set", parquet(path), shard_tokens=3000), report=said.append)
    assert any("going on after" in line for line in said)
    prepared(tmp_path / "straight", parquet(path), shard_tokens=3000)
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "straight")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", texts(5))
    code = "import sys; sys.modules['pyarrow'] = None; from harness.prepare.cli import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "corpus=parquet",
            f"corpus.path={tmp_path}",
            f"data.path={tmp_path}/set",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "corpus=parquet needs the package pyarrow: pip install pyarrow" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "set").exists()
