"""Parquet files as a corpus: one column of text, read a batch of rows at a time.

The rows travel to whoever tokenises them, as compressed lines do: a worker could not start in the middle of
a row group, and a row group may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.errors import UserError
from harness.prepare import chunks
from harness.prepare.corpora import SourceFile

_BATCH_ROWS = 1024
_LISTED = 20  # columns in a message
# With a buffer and nothing read ahead a column is read page by page, else a row group's share of it at once.
# Most writers close a page after 1 MiB, but look at its size every 1024 rows only.
_STREAMED = {"buffer_size": 1 << 20, "pre_buffer": False}


def parquet_chunks(files: list[SourceFile], column: str) -> Iterator[chunks.RowsChunk]:
    """The values of `column` of every file in order.

    Raises `UserError` before the first of them where a file is damaged, has no such column or one that
    holds no text; later where damage shows only then.
    """
    for file in files:
        with _opened(file) as parquet:
            _check_column(parquet.schema_arrow, column, file.path)
    for index, file in enumerate(files):
        yield from _file_chunks(index, file, column)


def _file_chunks(index: int, file: SourceFile, column: str) -> Iterator[chunks.RowsChunk]:
    """Chunks are cut by the size of their values alone, so they do not follow row groups or batches."""
    values: list[bytes | None] = []
    first_row, size, before = 0, 0, 0
    with _opened(file) as parquet:
        rows = parquet.metadata.num_rows
        for batch in _batches(parquet, column):
            for value in batch:
                values.append(value)
                size += 1 if value is None else 1 + len(value)
                last = first_row + len(values) == rows
                if size < chunks.CHUNK_BYTES and not last:
                    continue
                done = file.size * (first_row + len(values)) // rows
                yield chunks.RowsChunk(index, column, first_row, tuple(values), done - before)
                first_row, size, before, values = first_row + len(values), 0, done, []
        if first_row != rows or values:
            raise OSError(f"{first_row + len(values):,} rows were read, its footer says {rows:,}")


def _batches(parquet: Any, column: str) -> Iterator[list[bytes | None]]:
    import pyarrow

    batches = parquet.iter_batches(_batch_rows(parquet.metadata), columns=[column], use_threads=False)
    for batch in batches:
        array = batch.column(batch.schema.get_field_index(column))
        if pyarrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        yield array.cast(pyarrow.large_binary()).to_pylist()  # UTF-8 is checked where faults are counted


def _batch_rows(metadata: Any) -> int:
    """Rows that hold about a chunk of text, so that memory follows neither row groups nor long documents.

    From the size of all columns: to ask damaged metadata for one column's ends the process.
    """
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    mean = size // max(1, metadata.num_rows)
    return max(1, min(_BATCH_ROWS, chunks.CHUNK_BYTES // max(1, mean)))


@contextmanager
def _opened(file: SourceFile) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`; what it raises inside is said of the file."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(
            "corpus=parquet needs the package pyarrow: pip install pyarrow, or write the text as JSON lines "
            "and use corpus=jsonl"
        ) from error
    try:
        with ParquetFile(file.path, page_checksum_verification=True, **_STREAMED) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{file.path} is damaged or not Parquet: {str(error).rstrip('.')}. Its documents would be lost "
            "without a word: fetch the file again, or leave it out of corpus.path"
        ) from error


def _check_column(schema: Any, column: str, path: str) -> None:
    listed = ", ".join(f"{field.name} ({str(field.type)[:40]})" for field in list(schema)[:_LISTED])
    listed += ", ..." if len(schema) > _LISTED else ""
    if schema.names.count(column) != 1:
        many = f"{schema.names.count(column)} columns" if column in schema.names else "no column"
        raise UserError(
            f"{path} has {many} {column!r}, so nothing says which text is meant. Set corpus.field= to one of "
            f"its columns of strings: {listed or 'it has none'}"
        )
    kind = schema.field(column).type
    if not _is_text(kind):
        raise UserError(
            f"{path}: its column {column!r} holds {kind}, and a document is a string. Set corpus.field= to a "
            f"column of strings: {listed}"
        )


def _is_text(kind: Any) -> bool:
    """Strings, also as bytes, which some writers make of them, and as entries of a dictionary."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    views = (types.is_string_view, types.is_binary_view)
    return any(test(kind) for test in (*tests, *views))
