"""Tokenizers: ids, round trips, and files that are what they claim to be."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config_groups import Gpt2TokenizerConfig, HfTokenizerConfig, TokenizerConfig
from harness.errors import UserError
from harness.prepare import Tokenizer, load_tokenizer, make_tokenizer
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import (
    gpt2,
    gpt2_files,
    jsonl,
    prepared,
    refusal,
    small_chunks,
    text,
    texts,
    write_jsonl,
    write_texts,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="module")
def hf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with two special tokens, and truncation and padding left switched on."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts(50), trainer)
    library.enable_truncation(4)
    library.enable_padding(length=16, pad_token="<pad>")
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizers(hf_file: Path) -> list[Tokenizer]:
    configs = [TokenizerConfig(), gpt2(), HfTokenizerConfig(path=str(hf_file))]
    return [make_tokenizer(config) for config in configs]


def test_bytes_are_shifted_by_one_and_zero_is_the_boundary() -> None:
    tokenizer = make_tokenizer(TokenizerConfig())
    assert (tokenizer.vocab_size, tokenizer.boundary_token_id, tokenizer.sha256) == (257, 0, None)
    assert tokenizer.encode("aé").tolist() == [98, 196, 170]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.encode("\xff").dtype == np.uint16


def test_gpt2_gives_the_published_ids() -> None:
    tokenizer = make_tokenizer(gpt2())
    assert tokenizer.encode("Hello world!").tolist() == [15496, 995, 0]
    assert (tokenizer.vocab_size, tokenizer.boundary_token_id) == (50257, 50256)


@settings(max_examples=60, deadline=None)
@given(TEXT)
def test_decoding_gives_back_what_was_encoded(tokenizers: list[Tokenizer], value: str) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode(value)
        assert tokenizer.decode(ids) == value
        assert tokenizer.decode([*ids, tokenizer.boundary_token_id]) == value
        assert tokenizer.kept_bytes(value, ids, len(ids)) == len(value.encode())
        assert ids.dtype == tokenizer.dtype == np.uint16


def test_a_special_token_written_out_in_a_document_is_ordinary_text(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode("a <|endoftext|> b")
        assert tokenizer.boundary_token_id not in ids
        assert tokenizer.decode(ids) == "a <|endoftext|> b"


def test_a_cut_character_is_replaced_and_a_foreign_id_is_refused(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        assert "�" in tokenizer.decode(tokenizer.encode("🙂")[:1])
        with pytest.raises(UserError, match=f"token id {tokenizer.vocab_size} .*{tokenizer.vocab_size}"):
            tokenizer.decode([tokenizer.vocab_size])


@pytest.mark.parametrize("name", ["vocab.bpe", "encoder.json"])
def test_another_file_than_the_published_is_refused_with_both_hashes(tmp_path: Path, name: str) -> None:
    for file in ("vocab.bpe", "encoder.json"):
        (tmp_path / file).write_bytes((gpt2_files() / file).read_bytes())
    published = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\n")
    found = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    with pytest.raises(UserError) as caught:
        make_tokenizer(Gpt2TokenizerConfig(path=str(tmp_path)))
    assert str(tmp_path / name) in str(caught.value)
    assert published in str(caught.value)
    assert found in str(caught.value)


def test_a_missing_file_is_named_with_the_key_that_mends_it(tmp_path: Path) -> None:
    for config in (
        Gpt2TokenizerConfig(path=str(tmp_path)),
        HfTokenizerConfig(path=str(tmp_path / "no.json")),
    ):
        with pytest.raises(UserError, match=r"tokenizer file .*tokenizer.path="):
            make_tokenizer(config)


def test_gpt2_without_network_says_which_files_to_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(UserError, match=r"vocab.bpe and encoder.json.*tokenizer.path="):
        make_tokenizer(Gpt2TokenizerConfig())


def test_the_boundary_of_a_tokenizer_json_is_chosen_or_found_or_refused(
    tmp_path: Path, hf_file: Path
) -> None:
    assert make_tokenizer(HfTokenizerConfig(path=str(hf_file))).boundary_token_id == 1
    chosen = HfTokenizerConfig(path=str(hf_file), boundary_token="<pad>")
    assert make_tokenizer(chosen).boundary_token_id == 0
    with pytest.raises(UserError, match=r"<stop> is not in the vocabulary.*<pad>, <\|endoftext\|>"):
        make_tokenizer(HfTokenizerConfig(path=str(hf_file), boundary_token="<stop>"))
    other = json.loads(hf_file.read_text())
    other["added_tokens"] = [t for t in other["added_tokens"] if t["content"] == "<pad>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"none of the usual.*tokenizer.boundary_token=.*<pad>"):
        make_tokenizer(HfTokenizerConfig(path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer.json"):
        make_tokenizer(HfTokenizerConfig(path=str(tmp_path)))


def test_a_word_of_the_vocabulary_is_no_boundary(hf_file: Path) -> None:
    with pytest.raises(UserError, match=r"boundary_token=a is an ordinary token.*<pad>, <\|endoftext\|>"):
        make_tokenizer(HfTokenizerConfig(path=str(hf_file), boundary_token="a"))


def _saved(library: Any, path: Path) -> HfTokenizerConfig:
    library.add_special_tokens(["</s>"])
    library.save(str(path))
    return HfTokenizerConfig(path=str(path))


@pytest.mark.parametrize("workers", [1, 2])
def test_text_that_a_tokenizer_cannot_encode_is_refused_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.WordLevel({"a": 0, "b": 1}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    config = _saved(library, tmp_path / "tokenizer.json")
    small_chunks(monkeypatch, 100)
    source = write_jsonl(tmp_path / "x.jsonl", [*(["a b"] * 40), "a c", *(["a b"] * 9)])
    message = refusal(tmp_path / "set", jsonl(source), config, val_fraction=0, workers=workers)
    for part in (f"{source}:41: the tokenizer.json cannot encode it: ", "UNK", "tokenizer.path"):
        assert part in message
    with pytest.raises(UserError, match="cannot encode"):
        make_tokenizer(config).encode("c")
    folder = write_texts(tmp_path / "texts", ["a", "a c"])
    message = refusal(tmp_path / "set", text(folder), config, val_fraction=0, workers=workers)
    assert f"{folder / '0001.txt'}: the tokenizer.json cannot encode it: " in message


def test_characters_that_would_be_in_no_token_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.BPE({"a": 0, "b": 1, "▁": 2}, []))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    config = _saved(library, tmp_path / "tokenizer.json")
    for left_out in ("数", "a数b", "ab 数", "数 ab", "é"):
        source = write_jsonl(tmp_path / "x.jsonl", ["a b", left_out])
        message = refusal(tmp_path / "set", jsonl(source), config, val_fraction=0)
        assert f"{source}:2: the tokenizer.json leaves " in message
    source = write_jsonl(tmp_path / "x.jsonl", ["a b", "ab  a"])
    summary = prepared(tmp_path / "set", jsonl(source), config, val_fraction=0)
    assert summary.splits["train"].bytes == 8


@pytest.mark.parametrize("limit", [None, 3])
def test_white_space_that_is_in_no_token_is_no_byte_of_the_text(tmp_path: Path, limit: int | None) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.WordLevel({"é": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = _saved(library, tmp_path / "tokenizer.json")
    source = write_jsonl(tmp_path / "x.jsonl", [" é  b\n", "b b b b b ", "  "])
    summary = prepared(tmp_path / "set", jsonl(source), config, val_fraction=0, max_document_tokens=limit)
    assert summary.splits["train"].bytes == 3 + (limit or 5)


def test_the_offsets_of_a_byte_level_tokenizer_cover_its_white_space(tmp_path: Path, hf_file: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import processors

    library = Library.from_file(str(hf_file))
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make_tokenizer(HfTokenizerConfig(path=str(tmp_path)))
    value = "  words  and \n été 🙂  "
    ids, size = tokenizer.encode_measured(value)
    assert (tokenizer.decode(ids), size) == (value, len(value.encode()))
    assert ids.tolist() == make_tokenizer(HfTokenizerConfig(path=str(hf_file))).encode(value).tolist()


def test_a_set_keeps_its_tokenizer_and_refuses_another(tmp_path: Path, hf_file: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    for name, config in (
        ("gpt2", gpt2()),
        ("hf", HfTokenizerConfig(path=str(hf_file), boundary_token="<pad>")),
    ):
        directory = tmp_path / name
        prepared(directory, jsonl(source), config)
        manifest = load_manifest(directory)
        tokenizer = load_tokenizer(directory, manifest)
        assert tokenizer.manifest_section() == manifest.raw["tokenizer"]
        assert (
            load_tokenizer(directory, manifest.raw).encode("a b").tolist() == tokenizer.encode("a b").tolist()
        )
        file = sorted((directory / "tokenizer").iterdir())[0]
        file.write_bytes(file.read_bytes().replace(b"a", b"b", 1))
        with pytest.raises(UserError, match=r"another tokenizer.*SHA-256"):
            load_tokenizer(directory, manifest)
        file.unlink()
        with pytest.raises(UserError, match=r"cannot be read"):
            load_tokenizer(directory, manifest)


def test_a_vocabulary_beyond_16_bits_is_stored_in_32(tmp_path: Path, hf_file: Path) -> None:
    large = json.loads(hf_file.read_text())
    large["model"]["vocab"] |= {f"unused{i}": 300 + i for i in range(70_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(large))
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    prepared(tmp_path / "set", jsonl(source), HfTokenizerConfig(path=str(tmp_path)))
    manifest = load_manifest(tmp_path / "set")
    assert (manifest.format_version, manifest.storage.dtype, manifest.tokenizer.vocab_size) == (
        3,
        np.dtype("<u4"),
        70_300,
    )
    assert np.load(tmp_path / "set" / "train_00000.npy").dtype == np.uint32


def test_gpt2_without_its_files_stops_before_anything_is_written(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))
    refusal(tmp_path / "sets" / "set", jsonl(source), Gpt2TokenizerConfig(path=str(tmp_path)))
    assert not (tmp_path / "sets").exists()
