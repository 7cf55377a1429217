"""From a chunk of the corpus to its documents: read, checked and counted, without a tokenizer."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.prepare.chunks import FileChunk, PieceChunk, RangeChunk, RowsChunk

MAX_PLACES = 10
PAIR_FIELDS = 3  # prompt, chosen, rejected


class Document(NamedTuple):
    """A document as text and as UTF-8, and where it is from: a file's number, a line of the chunk or a row.

    Of a pair `text` is the prompt and `continuations` are the chosen and the rejected one.
    """

    text: str
    data: bytes
    file: int
    line: int | str | None
    continuations: tuple[str, ...] = ()


@dataclass
class Found:
    """What a chunk held. `bad` is the first few bad documents as (file, line or row or None, reason)."""

    lines: int = 0
    bad_documents: int = 0
    bad: list[tuple[int, int | str | None, str]] = field(default_factory=list)

    def add_fault(self, file: int, line: int | str | None, reason: str) -> None:
        self.bad_documents += 1
        if len(self.bad) < MAX_PLACES:
            self.bad.append((file, line, reason))


def read_documents(
    chunk: RangeChunk | FileChunk | RowsChunk,
    fields: tuple[str, ...],
    separator: bytes | None,
    found: Found,
) -> Iterator[Document]:
    """The good documents of a chunk in order; the bad ones are counted in `found`.

    `fields` are the names in a JSON object: one of the text, or three of a prompt and its continuations.
    """
    if isinstance(chunk, RowsChunk):
        yield from _rows(chunk, found)
    elif fields:
        assert isinstance(chunk, RangeChunk)
        yield from _lines(chunk, fields, found)
    else:
        yield from _texts(chunk, separator, found)


def read_piece(chunk: PieceChunk) -> str:
    """The text of one piece of a giant document, checked to be UTF-8 when it was cut."""
    with open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        return file.read(chunk.stop - chunk.start).decode("utf-8", errors="replace")


def digests_of(document: Document) -> tuple[bytes, bytes]:
    """What a document's split follows from, and what it is known by: both SHA-256 of UTF-8.

    They are the same, but for pairs: those with the same prompt never part, and each is known by all of its
    texts. Without a prompt a pair stands for itself.
    """
    digest = hashlib.sha256(document.data).digest()
    if not document.continuations:
        return digest, digest
    texts = b"".join(hashlib.sha256(text.encode()).digest() for text in document.continuations)
    whole = hashlib.sha256(digest + texts).digest()
    return digest if document.data else whole, whole


def _rows(chunk: RowsChunk, found: Found) -> Iterator[Document]:
    for row, data in enumerate(chunk.values, chunk.first_row):
        place = f"row {row} (from 0)"
        if data is None:
            found.add_fault(chunk.file, place, f"the column {chunk.column!r} is null, expected a string")
            continue
        try:
            yield Document(data.decode("utf-8"), data, chunk.file, place)
        except UnicodeDecodeError as error:
            found.add_fault(chunk.file, place, f"not valid UTF-8 at byte {error.start} ({error.reason})")


def _texts(chunk: FileChunk | RangeChunk, separator: bytes | None, found: Found) -> Iterator[Document]:
    if isinstance(chunk, RangeChunk):
        yield from _parts(_read_range(chunk), chunk.file, chunk.start, separator, found)
        return
    for index, path in enumerate(chunk.paths, chunk.file):
        with open(path, "rb") as file:
            data = file.read()
        yield from _parts(data, index, 0, separator, found)


def _parts(data: bytes, file: int, start: int, separator: bytes | None, found: Found) -> Iterator[Document]:
    """What stands between separators, unless it is empty or white space, in bytes from `start` of a file."""
    for part in [data] if separator is None else data.split(separator):
        try:
            text = part.decode("utf-8")
        except UnicodeDecodeError as error:
            found.add_fault(file, None, f"not valid UTF-8 at byte {start + error.start} ({error.reason})")
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


def _lines(chunk: RangeChunk, fields: tuple[str, ...], found: Found) -> Iterator[Document]:
    data = _read_range(chunk)
    found.lines = data.count(b"\n")
    if data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(_split_lines(data), 1):
        if not line or line.isspace():
            continue
        try:
            yield _document(line, fields, chunk.file, number)
        except _BadDocument as error:
            found.add_fault(chunk.file, number, str(error))


def _split_lines(data: bytes) -> Iterator[bytes]:
    """One line at a time with its end; a chunk of one giant line is that line itself and no copy of it."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        yield data[start:stop]
        start = stop


class _BadDocument(Exception):
    pass


def _document(line: bytes, fields: tuple[str, ...], file: int, number: int) -> Document:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadDocument(f"not valid UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise _BadDocument(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _BadDocument(f"a JSON {type(record).__name__}, not an object")
    (text, data), *others = (_string(record, name) for name in fields)
    if not others:
        return Document(text, data, file, number)
    continuations = tuple(other for other, _ in others)
    for name, continuation in zip(fields[1:], continuations, strict=True):
        if not continuation:
            raise _BadDocument(f"the field {name!r} is empty: there is nothing to learn from")
    if len(set(continuations)) == 1:
        raise _BadDocument(f"the fields {fields[1]!r} and {fields[2]!r} hold the same text")
    return Document(text, data, file, number, continuations)


def _string(record: dict[str, Any], name: str) -> tuple[str, bytes]:
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
