"""From a chunk of the corpus to tokens: what a worker process does, and nothing that needs another chunk."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from harness.errors import UserError
from harness.prepare.chunks import Chunk, FaultChunk, FileChunk, PieceChunk, RangeChunk
from harness.prepare.tokenizers import ByteTokenizer, Tokenizer

SPLITS = ("train", "val")
MAX_PLACES = 10


@dataclass(frozen=True)
class Rules:
    """What shapes the tokens of a document. Without a `field` the corpus is text."""

    field: str | None
    separator: bytes | None
    val_fraction: float
    max_document_tokens: int | None


@dataclass
class Part:
    """One split's share of a chunk.

    `tokens` is `(n,)` of the tokenizer's dtype, each document followed by its boundary; `ends` is
    `(documents,)` int64, the position after each boundary; `bytes` counts the kept text as UTF-8.
    """

    tokens: np.ndarray
    ends: np.ndarray
    bytes: int


@dataclass
class Encoded:
    """A chunk as tokens. `bad` holds the first few bad documents as (file, line or None, reason).

    `refused` is a document, in the same form, that the tokenizer cannot encode: the chunk ends there.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    digests: bytes = b""
    lines: int = 0
    documents: int = 0
    empty: int = 0
    truncated: int = 0
    bad_documents: int = 0
    bad: list[tuple[int, int | None, str]] = field(default_factory=list)
    refused: tuple[int, int | None, str] | None = None

    def add_fault(self, file: int, line: int | None, reason: str) -> None:
        self.bad_documents += 1
        if len(self.bad) < MAX_PLACES:
            self.bad.append((file, line, reason))


class Document(NamedTuple):
    """A document as text and as UTF-8, and where it is from: a file's number, a line of the chunk."""

    text: str
    data: bytes
    file: int
    line: int | None


def split_of(digest: bytes, val_fraction: float) -> str:
    """The split of a document, from its SHA-256 alone: identical documents never part."""
    return "val" if int.from_bytes(digest[:8], "big") < int(val_fraction * 2**64) else "train"


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer | None, rules: Rules) -> Encoded:
    """Read, check, hash, split and tokenise a chunk; without a tokenizer it stops after hashing."""
    result = Encoded()
    if isinstance(chunk, PieceChunk):
        _encode_piece(chunk, tokenizer, rules, result)
        return result
    if isinstance(chunk, FaultChunk):
        result.add_fault(chunk.file, None, chunk.reason)
        return result
    if rules.field is not None:
        assert isinstance(chunk, RangeChunk)
        texts = _lines(chunk, rules.field, result)
    else:
        texts = _texts(chunk, rules.separator, result)
    by_split = _by_split(texts, tokenizer, rules, result)
    if tokenizer is not None:
        for split, documents in by_split.items():
            if documents:
                result.parts[split] = _encode(documents, tokenizer, rules.max_document_tokens, result)
    return result


def _by_split(
    documents: Iterator[Document], tokenizer: Tokenizer | None, rules: Rules, result: Encoded
) -> dict[str, list[Document]]:
    """Count, hash and sort documents; of each no more is kept than its encoding needs."""
    by_split: dict[str, list[Document]] = {split: [] for split in SPLITS}
    digests = []
    for document in documents:
        digest = hashlib.sha256(document.data).digest()
        digests.append(digest)
        if tokenizer is not None:
            kept = document._replace(text="") if isinstance(tokenizer, ByteTokenizer) else document
            by_split[split_of(digest, rules.val_fraction)].append(kept)
        result.empty += not document.data
    result.digests = b"".join(digests)
    result.documents = len(digests)
    return by_split


def read_piece(chunk: PieceChunk) -> str:
    """The text of one piece of a giant document, checked to be UTF-8 when it was cut."""
    with open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        return file.read(chunk.stop - chunk.start).decode("utf-8", errors="replace")


def join_piece(
    chunk: PieceChunk, encoded: Encoded, before: int, tokenizer: Tokenizer, limit: int | None
) -> int:
    """Clip a piece to what the document may still hold and close the document after its last piece.

    `before` is the document's tokens so far; returns them with this piece's. Changes `encoded`.
    """
    ((split, part),) = encoded.parts.items()
    tokens, kept_bytes = part.tokens, part.bytes
    total = before + len(tokens)
    if limit is not None and total > limit:
        room = max(0, limit - before)
        kept_bytes = tokenizer.kept_bytes(read_piece(chunk), tokens, room)
        tokens = tokens[:room]
    ends = np.zeros(0, np.int64)
    if chunk.last:
        encoded.documents, encoded.digests = 1, chunk.digest
        encoded.truncated = int(limit is not None and total > limit)
        tokens = np.append(tokens, np.array([tokenizer.boundary_token_id], tokens.dtype))
        ends = np.array([len(tokens)], np.int64)
    encoded.parts[split] = Part(tokens, ends, kept_bytes)
    return 0 if chunk.last else total


def _encode_piece(chunk: PieceChunk, tokenizer: Tokenizer | None, rules: Rules, result: Encoded) -> None:
    if tokenizer is None:
        if chunk.last:
            result.documents, result.digests = 1, chunk.digest
        return
    text = read_piece(chunk)
    try:
        tokens, size = tokenizer.encode_measured(text)
    except UserError as error:
        result.refused = chunk.file, None, str(error)
        return
    split = split_of(chunk.digest, rules.val_fraction)
    result.parts[split] = Part(tokens, np.zeros(0, np.int64), size)


def _texts(chunk: FileChunk | RangeChunk, separator: bytes | None, result: Encoded) -> Iterator[Document]:
    if isinstance(chunk, RangeChunk):
        yield from _parts(_read_range(chunk), chunk.file, chunk.start, separator, result)
        return
    for index, path in enumerate(chunk.paths, chunk.file):
        with open(path, "rb") as file:
            data = file.read()
        yield from _parts(data, index, 0, separator, result)


def _parts(
    data: bytes, file: int, start: int, separator: bytes | None, result: Encoded
) -> Iterator[Document]:
    """What stands between separators, unless it is empty or white space, in bytes from `start` of a file."""
    for part in [data] if separator is None else data.split(separator):
        try:
            text = part.decode("utf-8")
        except UnicodeDecodeError as error:
            result.add_fault(file, None, f"not valid UTF-8 at byte {start + error.start} ({error.reason})")
        else:
            if separator is None or (text and not text.isspace()):
                yield Document(text, part, file, None)
        start += len(part) + len(separator or b"")


def _read_range(chunk: RangeChunk) -> bytes:
    if chunk.data is not None:
        return chunk.data
    with open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        return file.read(chunk.stop - chunk.start)


def _lines(chunk: RangeChunk, name: str, result: Encoded) -> Iterator[Document]:
    data = _read_range(chunk)
    result.lines = data.count(b"\n")
    if data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(_split_lines(data), 1):
        if not line or line.isspace():
            continue
        try:
            yield Document(*_document(line, name), chunk.file, number)
        except _BadDocument as error:
            result.add_fault(chunk.file, number, str(error))


def _split_lines(data: bytes) -> Iterator[bytes]:
    """One line at a time with its end; a chunk of one giant line is that line itself and no copy of it."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        yield data[start:stop]
        start = stop


class _BadDocument(Exception):
    pass


def _document(line: bytes, name: str) -> tuple[str, bytes]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadDocument(f"not valid UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise _BadDocument(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _BadDocument(f"a JSON {type(record).__name__}, not an object")
    text = record.get(name)
    if not isinstance(text, str):
        found = f"is a {type(text).__name__}" if name in record else f"is missing{_among(record)}"
        raise _BadDocument(f"the field {name!r} {found}, expected a string")
    try:
        return text, text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadDocument(f"a lone surrogate at character {error.start} of {name!r}") from error


def _among(record: dict[str, Any]) -> str:
    names = [repr(name[:20]) for name in list(record)[:5]]
    return f" (there are {', '.join(names)}{', ...' if len(record) > 5 else ''})" if record else ""


def _encode(documents: list[Document], tokenizer: Tokenizer, limit: int | None, result: Encoded) -> Part:
    if isinstance(tokenizer, ByteTokenizer):
        return _encode_bytes([document.data for document in documents], tokenizer, limit, result)
    boundary = np.array([tokenizer.boundary_token_id], tokenizer.dtype)
    arrays: list[np.ndarray] = []
    lengths, kept_bytes = np.empty(len(documents), np.int64), 0
    for index, document in enumerate(documents):
        try:
            tokens, size = tokenizer.encode_measured(document.text)
        except UserError as error:
            result.refused = document.file, document.line, str(error)
            return Part(np.zeros(0, tokenizer.dtype), np.zeros(0, np.int64), 0)
        if limit is not None and len(tokens) > limit:
            kept_bytes += tokenizer.kept_bytes(document.text, tokens, limit)
            tokens = tokens[:limit]
            result.truncated += 1
        else:
            kept_bytes += size
        arrays += (tokens, boundary)
        lengths[index] = len(tokens) + 1
    return Part(np.concatenate(arrays), np.cumsum(lengths), kept_bytes)


def _encode_bytes(
    documents: list[bytes], tokenizer: ByteTokenizer, limit: int | None, result: Encoded
) -> Part:
    """All documents in one array operation: a byte stands where each boundary goes, then 0 is put there."""
    if limit is not None:
        result.truncated += sum(len(data) > limit for data in documents)
        documents = [data[:limit] for data in documents]
    tokens = tokenizer.encode_bytes(b"\n".join([*documents, b""]))
    ends = np.cumsum(np.fromiter(map(len, documents), np.int64, len(documents)) + 1)
    tokens[ends - 1] = tokenizer.boundary_token_id
    return Part(tokens, ends, len(tokens) - len(documents))
