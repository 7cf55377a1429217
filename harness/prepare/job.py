"""What one preparation was asked for, and how far it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
from harness.config import layout, row_width
from harness.config_groups import (
    BpeTokenizerConfig,
    Hdf5DataConfig,
    JsonlCorpusConfig,
)
from harness.prepare import chunks, workplace
from harness.prepare.bpe import learn_tokenizer
from harness.prepare.corpora import SourceFile, separator_of
from harness.prepare.documents import Rules
from harness.prepare.old_set import OldSet
from harness.prepare.pool import default_workers
from harness.prepare.seal import storage_section
from harness.prepare.settings import PrepareLike, preparation_settings
from harness.prepare.tokenizers import Tokenizer, load_tokenizer, make_tokenizer
from harness.storage.manifest import load_manifest
from harness.storage.manifest_schema import StorageInfo

SMALL_CORPUS_BYTES = 64 << 20  # below it, starting processes costs more than they save
JOURNAL_VERSION = 2  # of the state and the writers' states
Report = Callable[[str], object]


@dataclass(frozen=True)
class Job:
    """One preparation: what was asked for and what it was found to mean.

    `files` are those to read; `grown` is the set that they are added to.
    """

    config: PrepareLike
    directory: Path
    files: list[SourceFile]
    report: Report
    grown: OldSet | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What a config names is made; a `bpe` is learnt, or it is that of the set which is there.

        To learn one takes time, so it waits until it is needed. Whether the set that is there is the wanted
        one follows from what its tokenizer was learnt from: the corpus and the settings.
        """
        wanted = self.config.tokenizer
        if not isinstance(wanted, BpeTokenizerConfig):
            return make_tokenizer(wanted)
        if workplace.settled(self.directory) and not self.config.prepare.overwrite:
            return load_tokenizer(self.directory, load_manifest(self.directory))
        return learn_tokenizer(wanted, self.config.corpus, self.files, self.rules, self.report)

    @property
    def rules(self) -> Rules:
        corpus, prepare, loader = self.config.corpus, self.config.prepare, self.config.loader
        fields: tuple[str, ...] = (corpus.field,) if isinstance(corpus, JsonlCorpusConfig) else ()
        width = None
        if layout(loader) == "contrastive":
            width = row_width(loader)
            fields = tuple(corpus.pair_fields) if isinstance(corpus, JsonlCorpusConfig) else ()
        return Rules(fields, separator_of(corpus), prepare.val_fraction, prepare.max_document_tokens, width)

    @property
    def storage(self) -> StorageInfo:
        data, kind = self.config.data, layout(self.config.loader)
        if not isinstance(data, Hdf5DataConfig):
            return StorageInfo(data.name, self.tokenizer.dtype, kind)
        chunk_tokens = data.chunk_tokens if kind == "stream" else None
        return StorageInfo(data.name, self.tokenizer.dtype, kind, chunk_tokens, data.compression)

    @property
    def by_source(self) -> bool:
        return self.config.prepare.sharding == "source"

    @property
    def row_width(self) -> int | None:
        return row_width(self.config.loader)

    @property
    def workers(self) -> int:
        if self.config.prepare.workers is not None:
            return self.config.prepare.workers
        return 1 if sum(file.size for file in self.files) < SMALL_CORPUS_BYTES else default_workers()

    def identity(self) -> str:
        """What must be equal for an interrupted preparation to go on."""
        return _sha256_json(
            [
                JOURNAL_VERSION,
                preparation_settings(self.config),
                self.tokenizer.manifest_section(),
                versions(self.tokenizer.name),
                storage_section(self.storage, self.row_width),
                fingerprint_of(self.files),
                self.grown and self.grown.digest,
                [chunks.CHUNK_BYTES, chunks.CHUNK_FILES, chunks.GIANT_BYTES, chunks.PIECE_BYTES],
            ]
        )


def fingerprint_of(files: list[SourceFile]) -> str:
    """Changes with the list of files, a size or a modification time."""
    return _sha256_json([file.fingerprint() for file in files])


def versions(tokenizer: str) -> dict[str, str | None]:
    """The versions that the tokens come from: the harness' and the tokenizer's package's."""
    packages = {"gpt2": ["tiktoken"], "hf": ["tokenizers"], "bpe": ["tokenizers"]}.get(tokenizer, [])
    return {"harness": harness.__version__} | {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
