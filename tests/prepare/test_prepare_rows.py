"""Documents as padded rows: every token, closing boundaries included, is a target exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.prepare import chunks
from harness.prepare.rows import RowCutter, Rows
from harness.storage import RowStore
from tests.helpers_prepare import (
    jsonl,
    prepared,
    read_split,
    small_chunks,
    snapshot,
    text,
    texts,
    write_jsonl,
    write_texts,
)

U2 = np.dtype("<u2")


def cut(pieces: list[tuple[list[int], list[int]]], width: int, boundary: int = 0) -> Rows:
    """The rows of pieces of a stream, each with the positions after the documents that end in it."""
    cutter = RowCutter(width, boundary, U2)
    found = [
        rows for tokens, ends in pieces for rows in cutter.cut(np.array(tokens, U2), np.array(ends, np.int64))
    ]
    empty = Rows(np.zeros((0, width), U2), np.zeros((0, width), bool), np.zeros(0, np.int64))
    return Rows(*map(np.concatenate, zip(*[empty, *found], strict=True)))


def shown(rows: Rows) -> list[str]:
    """Each row as text, its targets in brackets, `;` where a document ends."""
    return [
        " ".join(f"[{token}]" if target else str(token) for token, target in zip(row, mask, strict=True))
        + ";" * int(ends)
        for row, mask, ends in zip(*rows, strict=True)
    ]


def test_a_document_starts_a_row_behind_a_boundary_and_its_last_row_is_padded() -> None:
    assert shown(cut([([5, 6, 7, 0, 8, 0, 0], [4, 6, 7])], width=4)) == [
        "0 [5] [6] [7]",
        "7 [0] 0 0;",
        "0 [8] [0] 0;",
        "0 [0] 0 0;",
    ]


def test_a_document_that_just_fills_its_rows_is_not_padded() -> None:
    assert shown(cut([([5, 6, 0, 7, 8, 9, 5, 6, 0], [3, 9])], width=4)) == [
        "0 [5] [6] [0];",
        "0 [7] [8] [9]",
        "9 [5] [6] [0];",
    ]


def test_the_boundary_is_the_tokenizers_own() -> None:
    assert shown(cut([([1, 9], [2])], width=4, boundary=9)) == ["9 [1] [9] 9;"]


def test_a_document_in_pieces_is_one_document() -> None:
    whole = shown(cut([([1, 0, *range(2, 13), 0, 5, 0], [2, 14, 16])], width=4))
    for first in range(2, 14):
        for second in range(first, 14):
            stream = [1, 0, *range(2, 13), 0, 5, 0]
            pieces = [
                (stream[:2], [2]),
                (stream[2:first], []),
                (stream[first:second], []),
                (stream[second:], [14 - second, 16 - second]),
            ]
            assert shown(cut(pieces, width=4)) == whole


def reference(documents: list[list[int]], width: int) -> list[str]:
    """The definition, row by row."""
    lines = []
    for document in documents:
        tokens, context = [*document, 0], 0
        while tokens:
            here, tokens = tokens[: width - 1], tokens[width - 1 :]
            padding = ["0"] * (width - 1 - len(here))
            end = ";" if not tokens else ""
            lines.append(" ".join([str(context), *(f"[{token}]" for token in here), *padding]) + end)
            context = here[-1]
    return lines


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=12), st.integers(2, 6), st.randoms())
def test_rows_are_the_definition_however_the_stream_is_cut(
    documents: list[list[int]], width: int, chance: object
) -> None:
    stream = [token for document in documents for token in (*document, 0)]
    ends = list(np.cumsum([len(document) + 1 for document in documents]))
    cuts = sorted(chance.choices(range(len(stream) + 1), k=3))  # type: ignore[attr-defined]
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        pieces.append((stream[start:stop], [end - start for end in ends if start < end <= stop]))
    assert shown(cut(pieces, width)) == reference(documents, width)


def test_blocks_bound_the_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [list(range(1, 1 + length)) for length in (3, 40, 0, 7, 90, 1)]
    stream = [token for document in documents for token in (*document, 0)]
    ends = list(np.cumsum([len(document) + 1 for document in documents]))
    monkeypatch.setattr("harness.prepare.rows._BLOCK_CELLS", 12)
    assert shown(cut([(stream, ends)], 4)) == reference(documents, 4)


@pytest.mark.parametrize("storage", ["npy", "hdf5", "gzip"])
def test_rows_and_a_stream_of_a_corpus_count_the_same_tokens(tmp_path: Path, storage: str) -> None:
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", [*texts(120), "", "x" * 500]))
    stream = prepared(tmp_path / "stream", source)
    rows = prepared(tmp_path / "rows", source, kind=f"{storage}-rows", shard_tokens=1000)
    for split in ("train", "val"):
        store = RowStore(tmp_path / "rows", split)
        tokens, mask = store.read_rows(np.arange(store.total_rows))
        assert np.array_equal(tokens[mask], read_split(tmp_path / "stream", split))
        assert store.total_tokens == stream.splits[split].tokens == rows.splits[split].tokens
        assert rows.splits[split].documents == stream.splits[split].documents
        assert rows.splits[split].bytes == stream.splits[split].bytes
        assert not mask[:, 0].any()
        sizes = np.diff(store.offsets)
        assert len(sizes) > 1
        assert set(sizes[:-1]) == {59}  # the first number of rows of 17 with at least 1000 cells
    cells = rows.rows * 16
    assert rows.padding == cells - rows.tokens
    recorded = json.loads((tmp_path / "rows" / "provenance.json").read_text())["documents"]
    assert recorded["padding"] == rows.padding
    assert f"{rows.rows:,} rows of 17 columns, {100 * rows.padding_share:.2f} % of their cells" in str(rows)


def test_a_document_belongs_to_the_shard_where_it_ends(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", ["a" * 40, "b", "c" * 60])
    prepared(tmp_path / "set", text(folder), kind="npy-rows", shard_tokens=51, val_fraction=0)
    store = RowStore(tmp_path / "set", "train")
    shards = store.manifest.splits["train"].shards
    assert [(shard.rows, shard.documents, shard.tokens) for shard in shards] == [
        (3, 1, 41),
        (3, 1, 34),
        (2, 1, 29),
    ]


def test_processes_chunks_and_pieces_change_no_byte_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_texts(tmp_path / "texts", [*texts(40), "é and a line\n" * 300, "after"])
    prepared(tmp_path / "whole", text(folder), kind="npy-rows", shard_tokens=2000)
    monkeypatch.setattr(chunks, "GIANT_BYTES", 1000)
    monkeypatch.setattr(chunks, "PIECE_BYTES", 300)
    small_chunks(monkeypatch, 700)
    for workers in (1, 2):
        directory = tmp_path / f"pieces{workers}"
        prepared(directory, text(folder), kind="npy-rows", shard_tokens=2000, workers=workers)
        assert snapshot(directory) == snapshot(tmp_path / "whole")


def test_long_documents_are_cut_before_they_become_rows(tmp_path: Path) -> None:
    corpus = text(write_texts(tmp_path / "texts", ["a" * 40, "b"]))
    summary = prepared(tmp_path / "set", corpus, kind="npy-rows", val_fraction=0, max_document_tokens=20)
    assert (summary.tokens, summary.rows, summary.truncated_documents) == (23, 3, 1)
