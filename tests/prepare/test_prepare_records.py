"""What a set says about its making: which corpus, which tokenizer, which versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import harness
from harness.config_groups import CorpusConfig, Gpt2TokenizerConfig, HfTokenizerConfig, TokenizerConfig
from harness.errors import UserError
from harness.prepare import make_tokenizer, recorded_corpus_path, tokenizer_identity
from harness.prepare.records import configured_path
from tests.helpers_prepare import (
    REPOSITORY,
    gpt2,
    gpt2_files,
    jsonl,
    prepared,
    text,
    texts,
    write_jsonl,
    write_texts,
)


def test_a_set_records_where_its_corpus_lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", texts(20, seed)) for seed, name in enumerate("ba")]
    folder = write_texts(tmp_path / "texts", texts(30))
    monkeypatch.chdir(tmp_path)
    prepared(tmp_path / "set1", text(Path("texts")))
    prepared(tmp_path / "set2", jsonl([Path(os.path.relpath(file)) for file in files]))
    assert recorded_corpus_path(tmp_path / "set1") == str(folder)
    assert recorded_corpus_path(str(tmp_path / "set2")) == [str(file) for file in files]
    assert configured_path(CorpusConfig()) is None


@pytest.mark.parametrize("content", ["", "[]", '{"corpus_path": 5}', '{"corpus_path": [5]}', "{}"])
def test_no_corpus_is_recorded_where_none_can_be_read(tmp_path: Path, content: str) -> None:
    assert recorded_corpus_path(tmp_path) is None
    (tmp_path / "provenance.json").write_text(content)
    assert recorded_corpus_path(tmp_path) is None


def test_the_identity_of_a_tokenizer_is_that_of_its_manifest(tmp_path: Path) -> None:
    hf = tmp_path / "tokenizer.json"
    hf.write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "</s>"}, '
        '"added_tokens": [{"id": 0, "content": "</s>", "special": true, "single_word": false, '
        '"lstrip": false, "rstrip": false, "normalized": false}]}'
    )
    for config in (gpt2(), HfTokenizerConfig(path=str(hf)), HfTokenizerConfig(path=str(tmp_path))):
        assert tokenizer_identity(config) == make_tokenizer(config).sha256 is not None
    assert tokenizer_identity(TokenizerConfig()) is tokenizer_identity(Gpt2TokenizerConfig()) is None


def test_the_identity_of_a_tokenizer_needs_no_tokenizer_package() -> None:
    program = (
        "import sys; sys.modules.update(tiktoken=None, tokenizers=None)\n"
        "from harness.config_groups import Gpt2TokenizerConfig\n"
        "from harness.prepare import tokenizer_identity\n"
        "print(tokenizer_identity(Gpt2TokenizerConfig(path=sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(gpt2_files())]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == make_tokenizer(gpt2()).sha256


def test_the_identity_of_files_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for config in (Gpt2TokenizerConfig(path=str(tmp_path)), HfTokenizerConfig(path=str(tmp_path))):
        with pytest.raises(UserError, match=r"tokenizer file .* cannot be read .*tokenizer.path="):
            tokenizer_identity(config)


def test_a_set_records_the_versions_that_its_tokens_come_from(tmp_path: Path) -> None:
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", texts(30)))
    for name, tokenizer in (("byte", TokenizerConfig()), ("gpt2", gpt2())):
        prepared(tmp_path / name, source, tokenizer)
        recorded = json.loads((tmp_path / name / "provenance.json").read_text())["versions"]
        expected = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "harness": harness.__version__,
        }
        if name == "gpt2":
            expected["tiktoken"] = metadata.version("tiktoken")
        assert recorded == expected
