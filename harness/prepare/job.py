"""What one preparation was asked for, and how far it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
from harness.config import PrepareScriptConfig, TrainConfig, layout, row_width
from harness.config_groups import Hdf5DataConfig, JsonlCorpusConfig, ParquetCorpusConfig, TextCorpusConfig
from harness.errors import UserError
from harness.escapes import escape
from harness.prepare import chunks
from harness.prepare.chunks import Chunk, RangeChunk
from harness.prepare.corpora import SourceFile, separator_of
from harness.prepare.documents import Encoded, Rules
from harness.prepare.pool import default_workers
from harness.prepare.reading import MAX_PLACES
from harness.prepare.seal import storage_section
from harness.prepare.tokenizers import Tokenizer
from harness.storage.manifest_schema import StorageInfo

SMALL_CORPUS_BYTES = 64 << 20  # below it, starting processes costs more than they save
JOURNAL_VERSION = 2  # of State and the writers' states
Report = Callable[[str], object]
PrepareLike = PrepareScriptConfig | TrainConfig


@dataclass
class State:
    """How far a preparation is; with the writers' states, all that going on needs."""

    next_chunk: int = 0
    source_bytes: int = 0
    corpus_chain: str = bytes(32).hex()
    line_file: int = -1
    lines: int = 0
    piece_tokens: int = 0
    documents: int = 0
    empty_documents: int = 0
    truncated_documents: int = 0
    bad_documents: int = 0
    skipped_windows: int = 0
    padding: int = 0  # of pairs
    places: list[str] = field(default_factory=list)

    def absorb(self, chunk: Chunk, encoded: Encoded, files: list[SourceFile]) -> None:
        """Count one chunk; `UserError` for a document that the tokenizer cannot encode.

        The chain is over documents, so it knows nothing of chunks or files.
        """
        if isinstance(chunk, RangeChunk) and chunk.file != self.line_file:
            self.line_file, self.lines = chunk.file, 0
        if encoded.refused is not None:
            raise UserError(self._place(*encoded.refused, files))
        for bad in encoded.bad[: MAX_PLACES - len(self.places)]:
            self.places.append(self._place(*bad, files))
        link = bytes.fromhex(self.corpus_chain)
        for start in range(0, len(encoded.digests), 32):
            link = hashlib.sha256(link + encoded.digests[start : start + 32]).digest()
        self.corpus_chain = link.hex()
        self.next_chunk += 1
        self.source_bytes += chunk.source_bytes
        self.lines += encoded.lines
        self.documents += encoded.documents
        self.empty_documents += encoded.empty
        self.truncated_documents += encoded.truncated
        for part in encoded.pairs.values():
            self.truncated_documents += part.truncated
            self.skipped_windows += part.skipped
            self.padding += part.padding
        self.bad_documents += encoded.bad_documents

    def _place(self, file: int, line: int | str | None, reason: str, files: list[SourceFile]) -> str:
        where = files[file].path
        if line is not None:
            where += f":{self.lines + line}" if isinstance(line, int) else f", {line}"
        return f"{where}: {reason}"


@dataclass(frozen=True)
class Job:
    """One preparation: what was asked for and what it was found to mean."""

    config: PrepareLike
    directory: Path
    files: list[SourceFile]
    tokenizer: Tokenizer
    report: Report

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
    def row_width(self) -> int | None:
        return row_width(self.config.loader)

    @property
    def workers(self) -> int:
        if self.config.prepare.workers is not None:
            return self.config.prepare.workers
        return 1 if sum(file.size for file in self.files) < SMALL_CORPUS_BYTES else default_workers()

    def fingerprint(self) -> str:
        """Changes with the list of files, a size or a modification time."""
        return _sha256_json([file.fingerprint() for file in self.files])

    def identity(self) -> str:
        """What must be equal for an interrupted preparation to go on."""
        return _sha256_json(
            [
                JOURNAL_VERSION,
                preparation_settings(self.config),
                self.tokenizer.manifest_section(),
                versions(self.tokenizer.name),
                storage_section(self.storage, self.row_width),
                self.fingerprint(),
                [chunks.CHUNK_BYTES, chunks.CHUNK_FILES, chunks.GIANT_BYTES, chunks.PIECE_BYTES],
            ]
        )


def preparation_settings(config: PrepareLike) -> dict[str, Any]:
    """The manifest's `preparation` as far as it follows from the config: all but `corpus_sha256`."""
    settings: dict[str, Any] = {"corpus": config.corpus.name}
    if isinstance(config.corpus, JsonlCorpusConfig) and layout(config.loader) == "contrastive":
        settings["pair_fields"] = list(config.corpus.pair_fields)
    elif isinstance(config.corpus, JsonlCorpusConfig | ParquetCorpusConfig):
        settings["field"] = config.corpus.field
    if isinstance(config.corpus, TextCorpusConfig):
        # also null and [], so that a set without one differs from one with
        separator = separator_of(config.corpus)
        settings["separator"] = None if separator is None else escape(separator.decode())
        settings["suffixes"] = sorted(set(config.corpus.suffixes))
    return settings | {
        "max_document_tokens": config.prepare.max_document_tokens,
        "val_fraction": float(config.prepare.val_fraction),
        "shard_tokens": config.prepare.shard_tokens,
    }


def versions(tokenizer: str) -> dict[str, str | None]:
    """The versions that the tokens come from: the harness' and the tokenizer's package's."""
    packages = {"gpt2": ["tiktoken"], "hf": ["tokenizers"]}.get(tokenizer, [])
    return {"harness": harness.__version__} | {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
