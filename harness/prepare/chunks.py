"""A corpus as a stream of small picklable chunks, the same whatever the number of processes.

Plain JSON lines are cut into byte ranges at newlines and read by whoever tokenises them; compressed
lines are decompressed here, and travel. Text files are grouped; large ones whose documents are
separated are cut into byte ranges too. A text document beyond `GIANT_BYTES` becomes pieces cut after
a newline near fixed byte positions, so that it is never held whole: BPE merges do not cross such a cut
(about one an 8 MiB). A JSON line is held whole, however long it is: as bytes, as text and as tokens, so
about four times its size with the byte tokenizer and more with a BPE.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from harness.config_groups import CorpusConfig, JsonlCorpusConfig, ParquetCorpusConfig
from harness.errors import UserError
from harness.prepare.corpora import SourceFile, separator_of

CHUNK_BYTES = 4 << 20
GIANT_BYTES = 16 << 20
PIECE_BYTES = 8 << 20
CHUNK_FILES = 4096
_BLOCK = 1 << 20
_ZSTD_BLOCK = 1 << 13  # a compressed block can hold a thousand times its size


@dataclass(frozen=True)
class RangeChunk:
    """Whole JSON lines or separated documents of one file: bytes `[start, stop)` of it, or `data` where
    it is compressed."""

    file: int
    path: str
    start: int
    stop: int
    source_bytes: int
    data: bytes | None = None


@dataclass(frozen=True)
class FileChunk:
    """Whole text files `file`, `file + 1`, ...."""

    file: int
    paths: tuple[str, ...]
    source_bytes: int


@dataclass(frozen=True)
class PieceChunk:
    """Bytes `[start, stop)` of a giant document with the SHA-256 `digest`."""

    file: int
    path: str
    start: int
    stop: int
    source_bytes: int
    digest: bytes
    last: bool


@dataclass(frozen=True)
class RowsChunk:
    """The values of a column from row `first_row` of a file on, as UTF-8; None where there is none."""

    file: int
    column: str
    first_row: int
    values: tuple[bytes | None, ...]
    source_bytes: int


@dataclass(frozen=True)
class FaultChunk:
    """A giant document that is not valid UTF-8."""

    file: int
    reason: str
    source_bytes: int


Chunk = RangeChunk | FileChunk | PieceChunk | RowsChunk | FaultChunk


def stream_chunks(config: CorpusConfig, files: list[SourceFile], *, apart: bool = False) -> Iterator[Chunk]:
    """Every chunk of the corpus in order; none of two files where they are kept `apart`.

    The same files give the same chunks.
    """
    if isinstance(config, JsonlCorpusConfig):
        for index, file in enumerate(files):
            if file.path.endswith((".gz", ".zst")):
                yield from _compressed_chunks(index, file)
            else:
                yield from _line_ranges(index, file)
    elif isinstance(config, ParquetCorpusConfig):
        from harness.prepare.parquet import parquet_chunks  # which needs the chunks defined here

        yield from parquet_chunks(files, config.field)
    else:
        yield from _text_chunks(files, separator_of(config), apart)


def _line_ranges(index: int, file: SourceFile) -> Iterator[Chunk]:
    with open(file.path, "rb") as stream:
        start = 0
        while start < file.size:
            stop = _after(b"\n", stream, start + CHUNK_BYTES, file.size)
            yield RangeChunk(index, file.path, start, stop, stop - start)
            start = stop


def _after(separator: bytes, stream: IO[bytes], position: int, size: int, within: int | None = None) -> int:
    """The end of the first separator at or behind `position`, else `size`; -1: none `within` bytes."""
    limit = size if within is None else min(size, position + within)
    while position < limit:
        stream.seek(position)
        block = stream.read(min((1 << 16) + len(separator), limit - position))
        found = block.find(separator)
        if found >= 0:
            return position + found + len(separator)
        if len(block) < len(separator):
            break
        position += len(block) - len(separator) + 1  # one may lie across the end of this block
    return size if limit >= size else -1


def _compressed_chunks(index: int, file: SourceFile) -> Iterator[Chunk]:
    pending: list[bytes] = []
    length, before = 0, 0
    with open(file.path, "rb") as raw:
        for block in _decompressed(raw, file.path):
            pending.append(block)
            length += len(block)
            if length < CHUNK_BYTES or b"\n" not in block:
                continue
            data = b"".join(pending)
            cut = data.rindex(b"\n") + 1
            yield RangeChunk(index, file.path, 0, cut, raw.tell() - before, data[:cut])
            pending, length, before = [data[cut:]], len(data) - cut, raw.tell()
        if length:
            yield RangeChunk(index, file.path, 0, length, raw.tell() - before, b"".join(pending))


def _decompressed(raw: IO[bytes], path: str) -> Iterator[bytes]:
    """Blocks of decompressed bytes, a few MiB at most. A file that ends too early is refused."""
    try:
        if path.endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as stream:
                while block := stream.read(_BLOCK):
                    yield block
        else:
            yield from _zstd_blocks(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error, _ZstdFault) as error:
        raise UserError(
            f"{path} is damaged: {error}. Its documents would be lost without a word: fetch the file "
            "again, or leave it out of corpus.path"
        ) from error


class _ZstdFault(Exception):
    pass


def _zstd_blocks(raw: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UserError("reading .zst files needs the package zstandard: pip install zstandard") from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = decompressor.decompressobj()
    inside = False  # of a frame; a file may hold several
    while data := raw.read(_ZSTD_BLOCK):
        while data:
            try:
                block = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _ZstdFault(str(error)) from error
            inside = not frame.eof
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = decompressor.decompressobj()
            if block:
                yield block
    if inside:
        raise _ZstdFault("it ends in the middle of a compressed frame")


def _text_chunks(files: list[SourceFile], separator: bytes | None, apart: bool) -> Iterator[Chunk]:
    first, size = 0, 0
    for index, file in enumerate(files):
        alone = file.size > (GIANT_BYTES if separator is None else CHUNK_BYTES)
        full = apart or size + file.size > CHUNK_BYTES or index - first >= CHUNK_FILES
        if index > first and (alone or full):
            yield FileChunk(first, tuple(f.path for f in files[first:index]), size)
            first, size = index, 0
        if alone:
            with open(file.path, "rb") as stream:
                if separator is None:
                    yield from _pieces(stream, index, file.path, 0, file.size)
                else:
                    yield from _separated(stream, index, file, separator)
            first = index + 1
        else:
            size += file.size
    if first < len(files):
        yield FileChunk(first, tuple(f.path for f in files[first:]), size)


def _separated(stream: IO[bytes], index: int, file: SourceFile, separator: bytes) -> Iterator[Chunk]:
    """Ranges that end after a separator. Every byte is searched, from the file's start on: which two of
    three newlines stand between documents follows from what was found before."""
    start = 0
    while start < file.size:
        stream.seek(start)
        ahead = stream.read(CHUNK_BYTES)
        whole = len(ahead) - len(ahead.split(separator)[-1])
        stop = start + whole if whole else _after(separator, stream, start, file.size)
        if stop - start > max(CHUNK_BYTES, GIANT_BYTES):  # then it is one document
            yield from _pieces(stream, index, file.path, start, stop, separator)
        else:
            yield RangeChunk(index, file.path, start, stop, stop - start)
        start = stop


def _pieces(
    stream: IO[bytes], index: int, path: str, start: int, stop: int, separator: bytes | None = None
) -> Iterator[Chunk]:
    """The document at `[start, stop)`, without the separator that may end it there."""
    if separator is not None:
        stream.seek(max(start, stop - len(separator)))
        stop -= len(separator) if stream.read(len(separator)) == separator else 0
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    blank, position = separator is not None, start
    stream.seek(start)
    try:
        while block := stream.read(min(_BLOCK, stop - position)):
            digest.update(block)
            position += len(block)
            text = decoder.decode(block)
            blank = blank and (not text or text.isspace())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = position - len(error.object) + error.start
        yield FaultChunk(index, f"not valid UTF-8 at byte {place} ({error.reason})", stop - start)
        return
    while start < stop and not blank:
        end = _piece_end(stream, start + PIECE_BYTES, stop)
        yield PieceChunk(index, path, start, end, end - start, digest.digest(), last=end == stop)
        start = end


def _piece_end(stream: IO[bytes], position: int, size: int) -> int:
    stop = _after(b"\n", stream, position, size, within=PIECE_BYTES // 8)
    if stop >= 0:
        return stop
    stream.seek(position)
    head = stream.read(4)
    while head and head[0] & 0xC0 == 0x80:  # inside a character: go on to its end
        position, head = position + 1, head[1:]
    return position
