"""Contrastive pairs: which tokens a row holds, which of them are targets, and what gives no pair."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import PrepareScriptConfig
from harness.config_checks import validate
from harness.config_groups import (
    ContrastiveRowsConfig,
    CorpusConfig,
    DataConfig,
    Hdf5DataConfig,
    JsonlCorpusConfig,
    PrepareConfig,
)
from harness.errors import UserError
from harness.prepare import chunks, prepare
from harness.prepare.chunks import RangeChunk, stream_chunks
from harness.prepare.corpora import list_files
from harness.prepare.documents import SPLITS, Encoded, Rules, encode_chunk, split_of
from harness.prepare.pairs import PairPart, text_pairs, window_pairs
from harness.prepare.pool import encode_all
from harness.prepare.tokenizers import ByteTokenizer
from harness.storage import PairStore, open_split
from tests.helpers_prepare import jsonl, prepared, small_chunks, text, texts, write_jsonl, write_texts

FIELDS = ("prompt", "chosen", "rejected")
U2 = np.dtype("<u2")


def arrays(*values: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(value, U2) for value in values)


def stream(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Documents as tokens, each followed by the boundary 0, and the positions after the boundaries."""
    tokens = np.array([token for document in documents for token in (*document, 0)], U2)
    return tokens, np.cumsum([len(document) + 1 for document in documents])


def rows_of(part: PairPart) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    blocks = list(part.blocks())
    if not blocks:
        empty, no_mask = np.zeros((0, part.width), U2), np.zeros((0, part.width), bool)
        return empty, no_mask, empty, no_mask
    pos, pos_mask, neg, neg_mask = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    return pos, pos_mask, neg, neg_mask


def pair_of(prompt: list[int], chosen: list[int], rejected: list[int], width: int) -> PairPart:
    prompt_, chosen_, rejected_ = arrays(prompt, chosen, rejected)
    return text_pairs([(prompt_, chosen_, rejected_)], width, 0, U2)


def shown(rows: np.ndarray, mask: np.ndarray) -> list[str]:
    """Each row as text, its targets in brackets."""
    return [
        " ".join(f"[{token}]" if target else str(token) for token, target in zip(row, targets, strict=True))
        for row, targets in zip(rows, mask, strict=True)
    ]


def line(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def encoded(records: list[object], width: int = 32, val_fraction: float = 0.0) -> Encoded:
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    chunk = RangeChunk(0, "pairs.jsonl", 0, len(data), len(data), data)
    return encode_chunk(chunk, ByteTokenizer(), Rules(FIELDS, None, val_fraction, None, width))


def test_a_row_is_boundary_prompt_continuation_boundary_and_padding() -> None:
    part = pair_of([5, 6], [7, 8, 9], [3], width=9)
    pos, pos_mask, neg, neg_mask = rows_of(part)
    assert shown(pos, pos_mask) == ["0 5 6 [7] [8] [9] [0] 0 0"]
    assert shown(neg, neg_mask) == ["0 5 6 [3] [0] 0 0 0 0"]
    assert pos.dtype == neg.dtype == U2
    assert pos_mask.dtype == neg_mask.dtype == np.bool_
    assert (part.pairs, part.documents, part.truncated, part.skipped, part.padding) == (1, 1, 0, 0, 6)


def test_a_pair_that_just_fits_is_whole() -> None:
    pos, pos_mask, neg, neg_mask = rows_of(pair_of([5, 6], [7, 8, 9], [3, 4], width=7))
    assert shown(pos, pos_mask) == ["0 5 6 [7] [8] [9] [0]"]
    assert shown(neg, neg_mask) == ["0 5 6 [3] [4] [0] 0"]


def test_a_prompt_is_cut_on_its_left_in_both_rows_alike() -> None:
    part = pair_of([4, 5, 6], [7], [1, 2, 3], width=7)
    pos, pos_mask, neg, neg_mask = rows_of(part)
    assert shown(pos, pos_mask) == ["0 5 6 [7] [0] 0 0"]
    assert shown(neg, neg_mask) == ["0 5 6 [1] [2] [3] [0]"]
    assert part.truncated == 1


def test_a_continuation_is_cut_on_its_right_when_no_prompt_is_left() -> None:
    part = pair_of([4, 5], [7, 8, 9], [1], width=3)
    pos, pos_mask, neg, neg_mask = rows_of(part)
    assert shown(pos, pos_mask) == ["0 [7] [8]"]
    assert shown(neg, neg_mask) == ["0 [1] [0]"]
    assert part.truncated == 1


def test_a_pair_whose_rows_are_equal_once_cut_is_left_out_and_counted() -> None:
    part = pair_of([4], [7, 8, 9], [7, 8, 1], width=3)
    assert (part.pairs, part.documents, part.skipped) == (0, 0, 1)


def test_a_window_goes_on_truly_or_as_the_next_document_does_at_the_same_place() -> None:
    first, second = list(range(10, 18)), list(range(30, 37))
    part = window_pairs(*stream([first, second]), width=5, boundary=0)
    pos, pos_mask, neg, neg_mask = rows_of(part)
    assert shown(pos, pos_mask) == [
        "0 10 11 [12] [13]",
        "0 14 15 [16] [17]",
        "0 30 31 [32] [33]",
        "0 34 [35] [36] 0",
    ]
    # places 2 and 6 of the first, modulo the 6 places of two tokens in the second; then 2 and 5 modulo 7
    assert shown(neg, neg_mask) == [
        "0 10 11 [32] [33]",
        "0 14 15 [30] [31]",
        "0 30 31 [12] [13]",
        "0 34 [15] [16] 0",
    ]
    assert (part.documents, part.skipped, part.padding) == (2, 0, 2)


def test_a_false_continuation_comes_from_the_next_document_that_is_long_enough() -> None:
    documents = [[1, 2, 3, 4, 5, 6], [7], [8, 9], [11, 12, 13, 14]]
    pos, _, neg, _ = rows_of(window_pairs(*stream(documents), width=7, boundary=0))
    assert pos.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 8, 9, 0, 0, 0, 0], [0, 11, 12, 13, 14, 0, 0]]
    assert neg.tolist() == [[0, 1, 2, 3, 12, 13, 14], [0, 8, 12, 0, 0, 0, 0], [0, 11, 12, 3, 4, 0, 0]]


@pytest.mark.parametrize(
    ("documents", "skipped"),
    [
        ([[1, 2, 3, 4, 5, 6, 7]], 2),  # no other document
        ([[1, 2, 3, 4], [5], [6]], 3),  # none that is long enough, and one token is no window
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 2),  # the other goes on in the same way
        ([[], []], 0),
    ],
)
def test_a_window_without_a_false_continuation_is_skipped_and_counted(
    documents: list[list[int]], skipped: int
) -> None:
    part = window_pairs(*stream(documents), width=5, boundary=0)
    assert (part.pairs, part.documents, part.skipped) == (0, 0, skipped)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=30), min_size=1, max_size=6), st.integers(3, 12))
def test_pairs_of_windows_differ_in_the_continuation_alone(documents: list[list[int]], width: int) -> None:
    part = window_pairs(*stream(documents), width, boundary=0)
    pos, pos_mask, neg, neg_mask = rows_of(part)
    assert (pos_mask == neg_mask).all()
    assert ((pos == neg) | pos_mask).all()
    assert (pos != neg).any(axis=1).all()
    assert not pos_mask[:, 0].any()
    assert (pos[:, 0] == 0).all()
    texts_of = [bytes(document) for document in documents]
    for row, false, mask in zip(pos, neg, pos_mask, strict=True):
        window, continuation = bytes(row[row != 0].tolist()), bytes(false[mask].tolist())
        whose = [i for i, document in enumerate(texts_of) if window in document]
        assert [i for i, document in enumerate(texts_of) if continuation in document and whose != [i]]
    windows = sum(-(-len(document) // (width - 1)) for document in documents)
    assert part.pairs + part.skipped == windows


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.lists(st.integers(1, 9), min_size=n, max_size=9) for n in (0, 1, 1)]), max_size=4
    ),
    st.integers(3, 14),
)
def test_pairs_of_texts_hold_a_prompts_end_and_a_continuations_start(
    triples: list[tuple[list[int], ...]], width: int
) -> None:
    part = text_pairs([arrays(*triple) for triple in triples], width, 0, U2)  # type: ignore[misc]
    pos, pos_mask, neg, neg_mask = rows_of(part)
    made = iter(zip(pos, pos_mask, neg, neg_mask, strict=True))
    for prompt, chosen, rejected in triples:
        if ([*chosen, 0])[: width - 1] == ([*rejected, 0])[: width - 1]:
            continue
        row, mask, other, other_mask = next(made)
        start = int(mask.argmax())
        assert start == int(other_mask.argmax()) >= 1
        assert row[1:start].tolist() == other[1:start].tolist() == prompt[len(prompt) - start + 1 :]
        for one, targets, whole in ((row, mask, [*chosen, 0]), (other, other_mask, [*rejected, 0])):
            kept = one[targets].tolist()
            assert kept == whole[: width - start]
            assert not one[start + len(kept) :].any()
    assert next(made, None) is None


def test_json_lines_give_pairs_of_three_fields() -> None:
    result = encoded([line("ab", "c", "de") | {"source": "x"}, line("", "f", "g")], width=7)
    pos, pos_mask, neg, neg_mask = rows_of(result.pairs["train"])
    assert shown(pos, pos_mask) == ["0 98 99 [100] [0] 0 0", "0 [103] [0] 0 0 0 0"]
    assert shown(neg, neg_mask) == ["0 98 99 [101] [102] [0] 0", "0 [104] [0] 0 0 0 0"]
    assert (result.documents, result.empty, result.bad_documents, result.parts) == (2, 0, 0, {})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (line("p", "", "r"), "the field 'chosen' is empty"),
        (line("p", "c", ""), "the field 'rejected' is empty"),
        (line("p", "c", "c"), "the fields 'chosen' and 'rejected' hold the same text"),
        ({"prompt": "p", "chosen": "c"}, "the field 'rejected' is missing (there are 'prompt', 'chosen')"),
        (
            {"prompt": ["p"], "chosen": "c", "rejected": "r"},
            "the field 'prompt' is a list, expected a string",
        ),
        ([1], "a JSON list, not an object"),
    ],
)
def test_a_line_that_is_no_pair_is_bad_and_named(record: object, reason: str) -> None:
    result = encoded([line("p", "c", "r"), record, line("q", "c", "r")])
    assert (result.pairs["train"].pairs, result.bad_documents) == (2, 1)
    ((file, number, said),) = result.bad
    assert (file, number) == (0, 2)
    assert reason in said


def test_pairs_with_one_prompt_never_part() -> None:
    records: list[object] = [line(f"prompt {i % 20}", f"c{i}", f"r{i}") for i in range(200)]
    result = encoded(records, val_fraction=0.5)
    prompts = {}
    for split in SPLITS:
        pos, pos_mask, _, _ = rows_of(result.pairs[split])
        prompts[split] = {
            bytes(row[1 : mask.argmax()].tolist()) for row, mask in zip(pos, pos_mask, strict=True)
        }
    assert len(prompts["train"] | prompts["val"]) == 20
    assert not prompts["train"] & prompts["val"]
    assert all(prompts.values())


def test_pairs_without_a_prompt_still_come_into_both_splits() -> None:
    result = encoded([line("", f"c{i}", f"r{i}") for i in range(40)], val_fraction=0.5)
    assert all(result.pairs[split].pairs > 5 for split in SPLITS)


def test_every_text_of_a_pair_counts_in_what_the_corpus_is_known_by() -> None:
    digests = {encoded([line(*triple)]).digests for triple in ("abc", "xbc", "axc", "abx", "acb")}
    assert len(digests) == 5


@pytest.mark.parametrize("kind", ["pairs", "lines", "files"])
def test_pairs_are_the_same_whatever_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    small_chunks(monkeypatch, 2000)
    corpus: CorpusConfig
    fields: tuple[str, ...]
    if kind == "pairs":
        path = tmp_path / "a.jsonl"
        triples = zip(texts(60), texts(60, seed=1), texts(60, seed=2), strict=True)
        path.write_text("".join(json.dumps(line(*triple)) + "\n" for triple in triples))
        corpus, fields = JsonlCorpusConfig(path=str(path)), FIELDS
    elif kind == "lines":
        corpus, fields = jsonl(write_jsonl(tmp_path / "a.jsonl", texts(80))), ("text",)
    else:
        corpus, fields = text(write_texts(tmp_path / "texts", texts(80))), ()
    files = list_files(corpus)
    rules, tokenizer = Rules(fields, None, 0.3, None, pair_width=24), ByteTokenizer()

    def made(workers: int) -> list[list[list[int]]]:
        every = encode_all(stream_chunks(corpus, files), tokenizer, rules, workers, tmp_path)
        parts = [result.pairs[split] for _, result in every for split in SPLITS if split in result.pairs]
        return [array.tolist() for part in parts for array in rows_of(part)]

    alone = made(1)
    assert len(alone) > 16
    assert made(2) == alone


def test_a_corpus_without_pairs_is_refused_with_the_keys_that_mend_it(tmp_path: Path) -> None:
    def refused(corpus: CorpusConfig) -> str:
        loader = ContrastiveRowsConfig(row_width=90)
        config = PrepareScriptConfig(DataConfig(path=str(tmp_path / "set")), corpus=corpus, loader=loader)
        with pytest.raises(UserError) as caught:
            prepare(config, report=lambda said: None)
        return str(caught.value)

    said = refused(jsonl(write_jsonl(tmp_path / "a.jsonl", texts(30))))
    assert f"{tmp_path}/a.jsonl:1: the field 'prompt' is missing (there are 'text')" in said
    assert "set corpus.pair_fields= to the fields of prompt, chosen and rejected text" in said
    said = refused(text(write_texts(tmp_path / "texts", ["word " * 100] * 2)))
    assert "the train split got none of the 2 documents" in said
    assert "12 windows or pairs being left out" in said


def test_a_limit_on_tokens_is_refused_where_pairs_are_cut_by_width() -> None:
    config = PrepareScriptConfig(corpus=JsonlCorpusConfig(path="a.jsonl"), loader=ContrastiveRowsConfig())
    validate(config)
    config.prepare.max_document_tokens = 50
    with pytest.raises(UserError, match=r"max_document_tokens=50 means nothing to pairs .*row_width=129"):
        validate(config)
    config.corpus = CorpusConfig()  # windows of documents, which may be cut
    validate(config)


@pytest.mark.parametrize("storage", ["npy", "hdf5"])
def test_a_prepared_set_holds_the_pairs_of_its_lines(tmp_path: Path, storage: str) -> None:
    triples = list(zip(texts(40), texts(40, seed=1), texts(40, seed=2), strict=True))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line(*triple)) + "\n" for triple in triples))
    config = PrepareScriptConfig(
        data={"npy": DataConfig, "hdf5": Hdf5DataConfig}[storage](path=str(tmp_path / "set")),
        corpus=JsonlCorpusConfig(path=str(path)),
        prepare=PrepareConfig(val_fraction=0.25, workers=1),
        loader=ContrastiveRowsConfig(row_width=90),
    )
    prepare(config, report=lambda said: None)
    tokenizer = ByteTokenizer()
    for split in SPLITS:
        own = [
            tuple(map(tokenizer.encode, triple))
            for triple in triples
            if split_of(hashlib.sha256(triple[0].encode()).digest(), 0.25) == split
        ]
        expected = rows_of(text_pairs(own, 90, 0, U2))  # type: ignore[arg-type]
        assert len(expected[0]) > 3
        store = open_split(tmp_path / "set", split)
        assert isinstance(store, PairStore)
        numbers = np.arange(store.total_rows)
        found = (*store.pos.read_rows(numbers), *store.neg.read_rows(numbers))
        store.close()
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)


def test_windows_of_a_giant_document_are_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "GIANT_BYTES", 3000)
    monkeypatch.setattr(chunks, "PIECE_BYTES", 1000)
    corpus = text(write_texts(tmp_path, ["x" * 4000]))
    every = [
        encode_chunk(chunk, ByteTokenizer(), Rules((), None, 0.0, None, pair_width=101))
        for chunk in stream_chunks(corpus, list_files(corpus))
    ]
    assert [result.documents for result in every] == [0, 0, 0, 1]
    assert [result.pairs["train"].pairs for result in every] == [0] * 4
    assert [result.pairs["train"].skipped for result in every] == [10] * 4


def test_pairs_that_do_not_fit_are_said_to_be_cut_to_the_row(tmp_path: Path) -> None:
    lines = [{"prompt": f"prompt {i} " * 5, "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = prepared(tmp_path / "set", jsonl(tmp_path / "a.jsonl"), kind="npy-pairs")
    assert (summary.truncated_pairs, summary.truncated_documents) == (20, 0)
    assert "20 pairs cut to the 17 columns of a row" in str(summary)
    assert "max_document_tokens" not in str(summary)
