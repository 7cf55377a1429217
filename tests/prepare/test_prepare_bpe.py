"""`tokenizer=bpe`: the same corpus gives the same tokenizer, learnt from its training documents alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import TrainConfig
from harness.config_groups import BpeTokenizerConfig, HfTokenizerConfig, JsonlCorpusConfig
from harness.data_setup import open_data
from harness.errors import UserError
from harness.prepare import Tokenizer, bpe, chunks, load_tokenizer, prepare
from harness.prepare.bpe import training_texts
from harness.prepare.chunks import stream_chunks
from harness.prepare.corpora import list_files
from harness.prepare.documents import Rules, split_of
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import (
    REPOSITORY,
    config_of,
    jsonl,
    prepared,
    read_split,
    refusal,
    small_chunks,
    snapshot,
    start_child,
    text,
    texts,
    write_jsonl,
    write_texts,
)

RULES = Rules(("text",), None, 0.2, None)


def learnt(vocab_size: int = 300, train_bytes: int = 1 << 20) -> BpeTokenizerConfig:
    return BpeTokenizerConfig(vocab_size=vocab_size, train_bytes=train_bytes)


def tokenizer_of(directory: Path) -> Tokenizer:
    return load_tokenizer(directory, load_manifest(directory))


def sample(path: Path, limit: int, rules: Rules = RULES) -> list[str]:
    corpus = jsonl(path)
    return training_texts(stream_chunks(corpus, list_files(corpus)), rules, limit)


def sha256(document: str) -> bytes:
    return hashlib.sha256(document.encode()).digest()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with a vocabulary of 300, and the file it was made from beside it."""
    folder = tmp_path_factory.mktemp("bpe")
    prepared(folder / "set", jsonl(write_jsonl(folder / "a.jsonl", texts(300))), learnt())
    return folder


def test_threads_and_processes_do_not_change_the_tokenizer_or_the_set(made: Path, tmp_path: Path) -> None:
    expected = load_manifest(made / "set").metadata_sha256
    for run, (parallel, threads, workers) in enumerate(
        [("true", "4", 1), ("true", "2", 2), ("false", "1", 1)]
    ):
        words = ["corpus=jsonl", f"corpus.path={made}/a.jsonl", "prepare.val_fraction=0.2"]
        words += ["tokenizer=bpe", "tokenizer.vocab_size=300", f"tokenizer.train_bytes={1 << 20}"]
        words += [f"prepare.workers={workers}", f"data.path={tmp_path}/{run}"]
        subprocess.run(
            [sys.executable, str(REPOSITORY / "scripts" / "prepare_data.py"), *words],
            env=os.environ | {"TOKENIZERS_PARALLELISM": parallel, "RAYON_NUM_THREADS": threads},
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )
        assert load_manifest(tmp_path / str(run)).metadata_sha256 == expected
        assert snapshot(tmp_path / str(run)) == snapshot(made / "set")


def test_order_files_and_chunks_do_not_change_the_tokenizer(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 900)
    documents = texts(300)
    random.Random(3).shuffle(documents)
    folder = write_texts(tmp_path / "texts", documents)
    prepared(tmp_path / "set", text(folder), learnt())
    assert tokenizer_of(tmp_path / "set").sha256 == tokenizer_of(made / "set").sha256


def test_the_manifest_says_what_was_learnt_and_from_what(made: Path) -> None:
    manifest = load_manifest(made / "set")
    content = (made / "set" / "tokenizer" / "tokenizer.json").read_bytes()
    named = f"{hashlib.sha256(content).hexdigest()}  tokenizer.json\n"
    assert manifest.raw["tokenizer"] == {
        "name": "bpe",
        "vocab_size": 300,
        "boundary_token_id": 0,
        "sha256": hashlib.sha256(named.encode()).hexdigest(),
    }
    vocabulary = json.loads(content)["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(300))
    assert vocabulary["<|endoftext|>"] == 0
    assert manifest.preparation["bpe_vocab_size"] == 300
    assert manifest.preparation["bpe_train_bytes"] == 1 << 20


def test_the_set_alone_gives_its_text_back(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "set", tmp_path / "elsewhere")
    tokenizer = tokenizer_of(tmp_path / "elsewhere")
    found = []
    for split in ("train", "val"):
        tokens = read_split(tmp_path / "elsewhere", split)
        assert tokens.max() < 300
        ends = np.flatnonzero(tokens == 0)
        found += [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]
    assert sorted(found) == sorted(texts(300))
    assert sum(len(read_split(tmp_path / "elsewhere", split)) for split in ("train", "val")) < sum(
        len(document.encode()) for document in found
    )


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=80) | st.just("a<|endoftext|>b\x00\r\n\u2028 🙂"))
def test_any_text_comes_back_and_never_holds_the_boundary(made: Path, value: str) -> None:
    tokenizer = tokenizer_of(made / "set")
    ids, size = tokenizer.encode_measured(value)
    assert tokenizer.decode(ids) == value
    assert size == len(value.encode())
    assert 0 not in ids


def test_a_text_too_small_for_the_vocabulary_gives_a_smaller_one_and_says_so(tmp_path: Path) -> None:
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", [f"{i} same words" for i in range(40)]))
    said: list[str] = []
    prepare(config_of(tmp_path / "set", source, learnt(5000)), report=said.append)
    real = load_manifest(tmp_path / "set").tokenizer.vocab_size
    assert 257 < real < 400
    assert tokenizer_of(tmp_path / "set").vocab_size == real
    assert any(f"{real:,} ids, not tokenizer.vocab_size=5,000" in line for line in said)
    said.clear()
    assert prepare(config_of(tmp_path / "set", source, learnt(5000)), report=said.append).already_there
    assert said == []


def test_the_sample_is_the_training_documents_with_the_smallest_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 3000)
    documents = texts(400)
    path = write_jsonl(tmp_path / "a.jsonl", documents + documents[:50])  # some of them twice
    training = sorted((d for d in documents if split_of(sha256(d), 0.2) == "train"), key=sha256)
    for limit in (1, 500, 20_000, 1 << 20):
        expected, total = [], 0
        for document in training:
            part = document.encode()[:limit].decode(errors="ignore")
            total += len(part.encode())
            if total > limit:
                break
            expected.append(part)
        assert sample(path, limit) == expected
    assert len(sample(path, 1 << 20)) == len(training)
    assert sum(len(document.encode()) for document in sample(path, 20_000)) > 19_000


def test_validation_documents_teach_the_tokenizer_nothing(made: Path, tmp_path: Path) -> None:
    others = [d for d in texts(400, seed=9) if split_of(sha256(d), 0.2) == "val"]
    own = [d for d in texts(300) if split_of(sha256(d), 0.2) == "train"]
    prepared(tmp_path / "set", jsonl(write_jsonl(tmp_path / "b.jsonl", others + own)), learnt())
    assert tokenizer_of(tmp_path / "set").sha256 == tokenizer_of(made / "set").sha256


def test_one_giant_document_is_not_the_whole_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(chunks, "GIANT_BYTES", 20_000)
    monkeypatch.setattr(chunks, "PIECE_BYTES", 8_000)
    giant = "".join(f"line {i} of a giant\n" for i in range(5000))
    write_texts(tmp_path / "texts", [giant, *texts(60)])
    corpus = text(tmp_path / "texts")
    found = training_texts(stream_chunks(corpus, list_files(corpus)), Rules((), None, 0.0, None), 1 << 20)
    of_giant = [part for part in found if part in giant]
    assert len(found) - len(of_giant) == 60
    assert len(of_giant) == -(-len(giant) // 8000)
    assert all(980 <= len(part) <= 1000 for part in of_giant[:-1])


def test_a_large_corpus_is_sampled_from_beginning_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 4000)
    monkeypatch.setattr(bpe, "READ_BYTES", 40_000)
    documents = [f"{i} {'before' if i < 3000 else 'behind'} the middle" for i in range(6000)]
    corpus = jsonl(write_jsonl(tmp_path / "a.jsonl", documents))
    said: list[str] = []
    config = learnt(300, train_bytes=2000)
    tokenizer = bpe.learn_tokenizer(config, corpus, list_files(corpus), RULES, said.append)
    vocabulary = json.loads(tokenizer.files["tokenizer.json"])["model"]["vocab"]
    assert {"Ġbefore", "Ġbehind", "Ġmiddle"} <= set(vocabulary)


def test_pairs_teach_with_each_of_their_texts(tmp_path: Path) -> None:
    record = {"prompt": "what?", "chosen": "this", "rejected": "that"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    rules = Rules(("prompt", "chosen", "rejected"), None, 0.0, None, 16)
    assert sample(tmp_path / "a.jsonl", 1 << 20, rules) == ["what?", "this", "that"]


def test_a_finished_set_keeps_its_tokenizer_and_other_settings_are_named(made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "set"
    shutil.copytree(made / "set", directory)
    source = jsonl(made / "a.jsonl")
    said: list[str] = []
    assert prepare(config_of(directory, source, learnt()), report=said.append).already_there
    assert said == []
    refused = refusal(directory, source, learnt(280))
    assert "preparation.bpe_vocab_size: there 300, asked for 280" in refused
    assert "bpe_train_bytes: there 1048576, asked for 99" in refusal(directory, source, learnt(300, 99))
    refused = refusal(directory, source)
    assert "tokenizer.name: there bpe, asked for byte" in refused
    prepared(tmp_path / "bytes", source)
    refused = refusal(tmp_path / "bytes", source, learnt())
    assert "tokenizer.name: there byte, asked for bpe" in refused
    assert "preparation.bpe_vocab_size: there None, asked for 300" in refused


def test_a_run_over_a_finished_set_names_another_vocabulary_and_learns_nothing(made: Path) -> None:
    settings_of: dict[str, Any] = {"corpus": JsonlCorpusConfig(), "tokenizer": learnt()}
    config = TrainConfig(**settings_of)
    config.data.path, config.loader.seq_len, config.prepare.val_fraction = str(made / "set"), 16, 0.2
    said: list[str] = []
    open_data(config, said.append).close()
    config.tokenizer = learnt(4096)
    with pytest.raises(UserError) as caught:
        open_data(config, said.append)
    assert "tokenizer.vocab_size: the set 300, the configuration 4096" in str(caught.value)
    assert "To train on this set say so: tokenizer.vocab_size=300" in str(caught.value)
    assert said == []


def test_another_corpus_is_written_with_the_same_tokenizer_and_evaluated_on(
    made: Path, tmp_path: Path
) -> None:
    other = jsonl(write_jsonl(tmp_path / "other.jsonl", texts(100, seed=8)))
    same = HfTokenizerConfig(path=str(made / "set" / "tokenizer"))
    prepared(tmp_path / "other", other, same)
    settings_of: dict[str, Any] = {"corpus": JsonlCorpusConfig(), "tokenizer": learnt()}
    config = TrainConfig(**settings_of)
    config.data.path, config.loader.seq_len, config.prepare.val_fraction = str(made / "set"), 16, 0.2
    config.evaluation.set = str(tmp_path / "other")
    open_data(config, print).close()
    prepared(tmp_path / "learnt-there", other, learnt())
    config.evaluation.set = str(tmp_path / "learnt-there")
    with pytest.raises(UserError, match="losses would mean nothing"):
        open_data(config, print)


def test_a_set_that_grows_keeps_its_tokenizer(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "1.jsonl", texts(100))
    prepared(tmp_path / "set", jsonl(tmp_path / "corpus"), learnt())
    before = tokenizer_of(tmp_path / "set").sha256
    write_jsonl(tmp_path / "corpus" / "2.jsonl", texts(100, seed=7))
    summary = prepared(tmp_path / "set", jsonl(tmp_path / "corpus"), learnt(), append=True)
    assert summary.documents == 200
    assert tokenizer_of(tmp_path / "set").sha256 == before
    assert prepared(tmp_path / "set", jsonl(tmp_path / "corpus"), learnt()).already_there


def test_replacing_a_set_learns_anew(made: Path, tmp_path: Path) -> None:
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", texts(100)))
    prepared(tmp_path / "set", source, learnt())
    before = tokenizer_of(tmp_path / "set").sha256
    write_jsonl(tmp_path / "a.jsonl", texts(100, seed=4))
    prepared(tmp_path / "set", source, learnt(), overwrite=True)
    assert tokenizer_of(tmp_path / "set").sha256 != before


@pytest.mark.parametrize("kill_at", [1, 6, 12])
def test_a_kill_does_not_change_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    small_chunks(monkeypatch, 2000)
    path = write_jsonl(tmp_path / "a.jsonl", texts(150))
    child = start_child(path, tmp_path / "set", kill_at=kill_at, tokenizer="bpe")
    child.communicate(timeout=60)
    assert child.returncode == -9
    said: list[str] = []
    settings_of: dict[str, Any] = {"shard_tokens": 3000, "tokenizer": BpeTokenizerConfig()}
    prepare(config_of(tmp_path / "set", jsonl(path), **settings_of), report=said.append)
    assert any("going on after" in line for line in said) == (kill_at == 12)
    prepared(tmp_path / "straight", jsonl(path), **settings_of)
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "straight")


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(5))
    code = "import sys; sys.modules['tokenizers'] = None; from harness.prepare.cli import main; main()"
    words = ["corpus=jsonl", f"corpus.path={path}", "tokenizer=bpe", f"data.path={tmp_path}/set"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "tokenizer=bpe needs the package tokenizers: pip install tokenizers" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "set").exists()
