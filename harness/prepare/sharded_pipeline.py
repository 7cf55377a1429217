"""Documents to an hdf5 set from Python, one shard a source: for sources that are no files of a corpus.

    pipeline = ShardedTokenizationPipeline("data/mine/hdf5-stream", make_tokenizer(ByteTokenizerConfig()))
    pipeline.write_corpus(train=[JSONLSource("a.jsonl"), ["a text", "more"]], val=[JSONLSource("b.jsonl")])

`scripts/prepare_data.py` is for corpora of files: it uses several processes, goes on after a kill, and splits
off the validation part itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.files import irregular
from harness.prepare import workplace
from harness.prepare.chunks import RangeChunk
from harness.prepare.hdf5_writer import CHUNK_TOKENS, HDF5ShardWriter
from harness.prepare.reading import Found, read_documents
from harness.prepare.seal import file_names, storage_section
from harness.prepare.tokenizer_base import Tokenizer
from harness.storage.manifest import Manifest, load_manifest, write_manifest
from harness.storage.manifest_schema import DTYPES, StorageInfo
from harness.storage.verify import remember

_BLOCK = 1 << 20  # bytes of JSON lines read at a time


class JSONLSource:
    """The texts in a JSON-lines file: the string `field` of the object on each line, in order.

    Lines that are no JSON object with a non-empty text there are left out; `dropped_lines` counts those of
    the last iteration. Blank lines are none. Raises `UserError` where the file cannot be read.
    """

    def __init__(self, path: Path | str, *, field: str = "text") -> None:
        self.path = Path(path)
        self.field = field
        self.dropped_lines = 0

    def __iter__(self) -> Iterator[str]:
        self.dropped_lines, empty, found = 0, 0, Found()
        for block in self._blocks():
            chunk = RangeChunk(0, str(self.path), 0, len(block), len(block), block)
            for document in read_documents(chunk, (self.field,), None, found):
                if document.text:
                    yield document.text
                else:
                    empty += 1
            self.dropped_lines = found.bad_documents + empty

    def _blocks(self) -> Iterator[bytes]:
        try:
            if kind := irregular(os.stat(self.path).st_mode):
                raise OSError(f"it is {kind}, not a regular file")
            with open(self.path, "rb") as file:
                while lines := file.readlines(_BLOCK):
                    yield b"".join(lines)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror or error}), so its documents would be missing. "
                "Give the path of a readable file of JSON lines"
            ) from error


class ShardedTokenizationPipeline:
    """Writes an hdf5 set: each source becomes one shard, each document is followed by its boundary token.

    `directory` is the set's folder, absent or empty. Documents longer than `max_document_tokens` are cut to
    that, before the boundary. The same texts and arguments give the same files and the same digest.
    """

    def __init__(
        self,
        directory: Path | str,
        tokenizer: Tokenizer,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        compression: str = "none",
        max_document_tokens: int | None = None,
    ) -> None:
        self.directory = Path(os.path.realpath(directory))
        self.tokenizer = tokenizer
        self.max_document_tokens = max_document_tokens
        self._storage = StorageInfo("hdf5", tokenizer.dtype, "stream", chunk_tokens, compression)
        if max_document_tokens is not None and max_document_tokens < 1:
            raise UserError(
                f"max_document_tokens={max_document_tokens} must be at least 1, or None for whole documents"
            )

    def write_corpus(
        self, train: Sequence[Iterable[str]], val: Sequence[Iterable[str]] = (), *, report: Any = print
    ) -> Manifest:
        """Tokenise the sources of both splits and return the manifest of the set.

        The set is built in `DIRECTORY.preparing` and gets its name when it is whole, so it is complete or not
        there. Raises `UserError` where there is anything in its place, or a text cannot be encoded.
        """
        with workplace.locked(self.directory, report):
            workplace.heal(self.directory)
            if workplace.settled(self.directory):
                raise UserError(
                    f"{self.directory} already holds a set, and it is never replaced unasked: checkpoints "
                    "name its digest. Give another folder, or remove that one yourself"
                )
            workplace.check_replaceable(self.directory)
            building = workplace.beside(self.directory, "preparing")
            workplace.start_building(building)
            try:
                self._write(building, {"train": train, "val": val})
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
            workplace.publish(self.directory)
        return load_manifest(self.directory)

    def _write(self, building: Path, splits: dict[str, Sequence[Iterable[str]]]) -> None:
        entries = {}
        for split, sources in splits.items():
            shards = [self._shard(building, f"{split}_{i:05d}", source) for i, source in enumerate(sources)]
            totals = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents", "bytes")}
            entries[split] = {"total_tokens": totals.pop("tokens"), **totals, "shards": shards}
            for shard in shards:
                del shard["bytes"]
        self.tokenizer.save(building / workplace.TOKENIZER_FOLDER)
        preparation = {"sharding": "source", "max_document_tokens": self.max_document_tokens}
        raw = {
            "format_version": next(v for v, dtype in DTYPES.items() if dtype == self.tokenizer.dtype),
            "storage": storage_section(self._storage, None),
            "tokenizer": self.tokenizer.manifest_section(),
            "preparation": preparation,
            "splits": entries,
        }
        remember(write_manifest(building, raw))

    def _shard(self, building: Path, stem: str, source: Iterable[str]) -> dict[str, Any]:
        if isinstance(source, str):
            raise UserError(
                f"the source of {stem} is one text, expected an iterable of texts: put it in a list"
            )
        names = file_names(stem, self._storage)
        assert self._storage.chunk_tokens is not None
        kept_bytes = 0
        with HDF5ShardWriter(
            building / names["file"],
            dtype=self._storage.dtype,
            chunk_tokens=self._storage.chunk_tokens,
            compression=self._storage.compression,
        ) as writer:
            for number, text in enumerate(source):
                tokens, size = self._encode(text, f"document {number} of {stem}")
                writer.write(tokens)
                kept_bytes += size
        return {
            **names,
            "tokens": writer.token_count,
            "documents": writer.document_count,
            "bytes": kept_bytes,
            "sha256": writer.sha256,
        }

    def _encode(self, text: str, place: str) -> tuple[np.ndarray, int]:
        """A document and its boundary, `(n,)`, and how many bytes of UTF-8 it stands for."""
        tokenizer, limit = self.tokenizer, self.max_document_tokens
        if not isinstance(text, str):
            raise UserError(f"{place} is a {type(text).__name__}, expected a text: only texts are tokenised")
        try:
            tokens, size = tokenizer.encode_measured(text)
        except (UserError, UnicodeEncodeError) as error:
            raise UserError(
                f"{place} cannot be encoded: {error}. Leave it out, or mend its source"
            ) from error
        if limit is not None and len(tokens) > limit:
            size = tokenizer.kept_bytes(text, tokens, limit)
            tokens = tokens[:limit]
        return np.append(tokens, np.array([tokenizer.boundary_token_id], tokens.dtype)), size
