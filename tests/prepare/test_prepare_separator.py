"""Documents that a separator cuts out of text files: which they are, however the file is read."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.commandline.commands import override, shell_word
from harness.commandline.composition import config_dir, register, to_dataclass
from harness.commandline.escapes import escape, unescape
from harness.config_groups import CorpusConfig
from harness.errors import UserError
from harness.prepare import chunks
from harness.prepare.corpora import list_files, separator_of
from harness.prepare.documents import Rules, encode_chunk
from harness.storage.manifest import load_manifest
from tests.helpers_forks import pasted
from tests.helpers_prepare import (
    REPOSITORY,
    documents_of,
    gpt2,
    prepared,
    refusal,
    small_chunks,
    snapshot,
    text,
    texts,
    write_texts,
)
from tests.helpers_runs import train_py

STORY = r"\n<|endoftext|>\n"


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def read_digests(corpus: CorpusConfig) -> bytes:
    """The SHA-256 of each document, in order, as the chunks of the corpus give them."""
    rules = Rules((), separator_of(corpus), 0.0, None)
    stream = chunks.stream_chunks(corpus, list_files(corpus))
    return b"".join(encode_chunk(chunk, None, rules).digests for chunk in stream)


def digests_of(documents: list[str]) -> bytes:
    return b"".join(hashlib.sha256(document.encode()).digest() for document in documents)


def test_a_file_is_cut_at_each_separator_and_nothing_else_is_stripped(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    write_texts(folder, ["one\n<|endoftext|>\n two \n\n<|endoftext|>\n", "three<|endoftext|>", "", " \n"])
    prepared(tmp_path / "set", text(folder, separator=STORY), val_fraction=0)
    assert documents_of(tmp_path / "set", "train") == ["one", " two \n", "three<|endoftext|>"]


def test_parts_that_are_empty_or_white_space_are_no_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.txt", "--".join(["", "a", "", " \n\t", "　" * 200, "b ", " " * 200, ""]))
    summary = prepared(tmp_path / "set", text(path, separator="--"), val_fraction=0)
    assert documents_of(tmp_path / "set", "train") == ["a", "b "]
    assert (summary.documents, summary.empty_documents, summary.bad_documents) == (2, 0, 0)
    small_chunks(monkeypatch, 10)
    monkeypatch.setattr(chunks, "GIANT_BYTES", 100)
    prepared(tmp_path / "pieces", text(path, separator="--"), val_fraction=0)
    assert snapshot(tmp_path / "pieces") == snapshot(tmp_path / "set")


@settings(max_examples=150, deadline=None)
@given(
    content=st.text(st.sampled_from("\n\n\nab é🙂"), max_size=80),
    separator=st.sampled_from(["\n", "\n\n", "\n\n\n", "aba", "aab", "é", "\n🙂\n"]),
    chunk=st.integers(1, 90),
    giant=st.integers(1, 60),
)
def test_where_a_file_is_cut_follows_from_its_text_alone(
    tmp_path_factory: pytest.TempPathFactory, content: str, separator: str, chunk: int, giant: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "cut.txt", content + "end")
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        patch.setattr(chunks, "GIANT_BYTES", giant)
        patch.setattr(chunks, "PIECE_BYTES", 5)
        found = read_digests(text(path, separator=separator))
    documents = [part for part in f"{content}end".split(separator) if part and not part.isspace()]
    assert found == digests_of(documents)


@pytest.mark.parametrize("separator", ["\n\n\n", "<|endoftext|>"])
def test_a_separator_across_the_end_of_a_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    small_chunks(monkeypatch, 64)
    for before in range((1 << 16) - len(separator) - 1, (1 << 16) + len(separator) + 2):
        documents = ["x" * before, "y" * before, "z"]
        path = write(tmp_path / "a.txt", separator.join(documents))
        assert read_digests(text(path, separator=separator)) == digests_of(documents)


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_processes_and_sizes_change_no_byte_of_separated_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    long = "a line with no tokens across its end\n" * 300
    documents = [*texts(200), long, *texts(100, seed=1)]
    path = write(tmp_path / "a.txt", "\n<|endoftext|>\n".join(documents))
    one_each = write_texts(tmp_path / "texts", documents)
    tokenizer = gpt2() if kind == "gpt2" else None
    split = {"val_fraction": 0.3, "shard_tokens": 3001}
    prepared(tmp_path / "files", text(one_each), tokenizer, **split)
    shards = {name: digest for name, digest in snapshot(tmp_path / "files").items() if "json" not in name}
    sets = []
    for workers, size, giant in ((1, 4 << 20, 16 << 20), (2, 700, 4000), (1, 99, 2000)):
        small_chunks(monkeypatch, size)
        monkeypatch.setattr(chunks, "GIANT_BYTES", giant)
        monkeypatch.setattr(chunks, "PIECE_BYTES", 1000)
        directory = tmp_path / f"set-{size}"
        prepared(directory, text(path, separator=STORY), tokenizer, workers=workers, **split)
        sets.append(snapshot(directory))
    assert sets[1:] == [sets[0]] * 2
    assert {name: sets[0].get(name) for name in shards} == shards
    there = load_manifest(tmp_path / "set-99").preparation or {}
    assert there["corpus_sha256"] == (load_manifest(tmp_path / "files").preparation or {})["corpus_sha256"]


@pytest.mark.parametrize(("size", "giant"), [(4 << 20, 16 << 20), (50, 16 << 20), (50, 100)])
def test_a_part_that_is_not_utf8_is_one_bad_document_placed_by_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, giant: int
) -> None:
    small_chunks(monkeypatch, size)
    monkeypatch.setattr(chunks, "GIANT_BYTES", giant)
    parts = [document.encode() for document in texts(30)]
    parts[7] = b"a" * 200 + b"\xff" + b"a" * 200
    parts[9] = "cut é".encode()[:-1]
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\n\n".join(parts))
    places = [len(b"\n\n\n".join(parts[:7])) + 3 + 200, len(b"\n\n\n".join(parts[:9])) + 3 + 4]
    corpus = text(path, separator=r"\n\n\n")
    message = refusal(tmp_path / "set", corpus)
    for place in places:
        assert f"{path}: not valid UTF-8 at byte {place} (" in message
    assert "2 of 30 documents are bad" in message
    assert prepared(tmp_path / "set", corpus, max_bad_fraction=0.1).documents == 28


def test_the_set_records_the_separator_and_refuses_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\ntwo\n\nthree")
    prepared(tmp_path / "set", text(path, separator=r"\n\n"), val_fraction=0)
    assert (load_manifest(tmp_path / "set").preparation or {})["separator"] == r"\n\n"
    assert prepared(tmp_path / "set", text(path, separator="\n\n"), val_fraction=0).already_there
    message = refusal(tmp_path / "set", text(path), val_fraction=0)
    assert r"preparation.separator: there \n\n, asked for None" in message
    prepared(tmp_path / "whole", text(path), val_fraction=0)
    message = refusal(tmp_path / "whole", text(path, separator=r"\n"), val_fraction=0)
    assert r"preparation.separator: there None, asked for \n" in message


def test_a_separator_that_is_nowhere_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\ntwo\n\nthree")
    message = refusal(tmp_path / "set", text(path, separator=r"\r\n"), val_fraction=1e-9)
    assert r"none of the 1 documents that corpus.separator='\r\n' makes" in message


@pytest.mark.parametrize(
    ("given_text", "problem"), [("", "it is empty"), (r"\d", r"\d is none of"), ("\\", "\\ is")]
)
def test_a_separator_that_separates_nothing_is_refused_before_reading(given_text: str, problem: str) -> None:
    words = ["corpus=text", "corpus.path=nowhere", override("corpus.separator", given_text)]
    with pytest.raises(UserError) as caught:
        composed(words)
    assert f"corpus.separator='{given_text}' cannot separate documents: {problem}" in str(caught.value)


@given(st.text(st.characters(codec="utf-8")))
def test_escapes_are_read_back(value: str) -> None:
    assert unescape(escape(value)) == value
    assert not set(escape(value)) & set("\n\r\t")


def composed(words: list[str]) -> Any:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return to_dataclass(compose("prepare", overrides=words))


@pytest.mark.parametrize(
    "value",
    ["\\n\\n\\n", "<|endoftext|>", "a'b\"c", "it's", "${x}", "$HOME `x` !1", "\\\\", "'\\\\'", "null", "1e3",
     "true", " x ", "a,b=c", "[x]", "{a:b}", "é", "~", "#", "%"],
)  # fmt: skip
def test_a_printed_value_passes_a_shell_and_hydra_unchanged(value: str) -> None:
    word = override("corpus.separator", value)
    done = subprocess.run(["bash", "-c", f"printf %s {shell_word(word)}"], capture_output=True, text=True)
    assert done.stdout == word
    assert composed(["corpus=text", "corpus.path=x", word]).corpus.separator == value


def test_one_file_is_refused_with_the_word_that_makes_it_several_documents(tmp_path: Path) -> None:
    write(tmp_path / "input.txt", "one\n\n\ntwo\n\n\n\nthree")
    command = f"python {REPOSITORY}/scripts/prepare_data.py corpus=text corpus.path=input.txt"
    refused = pasted(command, tmp_path)
    assert refused.returncode == 2
    word = "\"corpus.separator='\\n\\n\\n'\""
    assert f"as in {word} (" in refused.stderr
    done = pasted(f"{command} data.path=set {word} prepare.val_fraction=0", tmp_path)
    assert done.returncode == 0, done.stderr
    assert documents_of(tmp_path / "set", "train") == ["one", "two", "\nthree"]


def test_a_run_says_how_to_prepare_separated_text_and_which_words_fit_a_set(tmp_path: Path) -> None:
    path = write(tmp_path / "it's.txt", "\n<|endoftext|>\n".join(texts(100)))
    words = ["corpus=text", override("corpus.path", str(path)), "data.path=set", "prepare.val_fraction=0.3"]
    words += ["tracker=none", "loader.seq_len=16", "trainer.max_steps=1", "model.n_layer=1"]
    missing = train_py(*words, f"corpus.separator='{STORY}'", cwd=tmp_path)
    assert missing.returncode == 2
    done = pasted(missing.stderr.splitlines()[-1].strip(), tmp_path)
    assert done.returncode == 0, done.stderr
    found = documents_of(tmp_path / "set", "train") + documents_of(tmp_path / "set", "val")
    assert sorted(found) == sorted(texts(100))
    other = train_py(*words, cwd=tmp_path)
    assert other.returncode == 2
    assert f"separator: the set {STORY}, the configuration None" in other.stderr
    fitting = other.stderr.partition("say so: ")[2].splitlines()[0]
    done = pasted(f"python {REPOSITORY}/train.py {' '.join(map(shell_word, words))} {fitting}", tmp_path)
    assert done.returncode == 0, done.stderr
