"""The parts of a manifest as checked values: every field, its type, its range, and what must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.storage.strict_json import Fields

SPLITS = ("train", "val")
SIDES = ("pos", "neg")  # of a split of contrastive rows
LAYOUTS = ("stream", "rows", "contrastive")
COMPRESSIONS = ("none", "gzip", "lzf")

# storage.format -> (the manifest's file name, the shards' extension)
FORMATS = {"npy": ("metadata.json", "npy"), "hdf5": ("shards.json", "h5")}

# format_version -> the stored dtype; 3 exists only for vocabularies that 16 bits cannot hold.
DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 3: np.dtype("<u4")}
_DTYPE_NAMES = {2: ("uint16", "<u2"), 3: ("uint32", "<u4")}


@dataclass(frozen=True)
class Shard:
    """One file of tokens; `sha256` is over the tokens as little-endian bytes.

    Of rows, `tokens` counts the true mask entries, `sha256` is over all tokens, padding included, and
    `mask_sha256` over the mask as bytes 0 and 1. `mask_file` is None where the mask is in the same file.
    """

    file: str
    tokens: int
    documents: int | None
    sha256: str | None
    rows: int | None = None
    mask_file: str | None = None
    mask_sha256: str | None = None


@dataclass(frozen=True)
class Split:
    """One token stream or one set of rows: its shards in order.

    `bytes` is the UTF-8 length of the text behind the tokens, `row_width` the columns of its rows.
    """

    total_tokens: int
    documents: int | None
    bytes: int | None
    shards: tuple[Shard, ...]
    row_width: int | None = None

    @property
    def total_rows(self) -> int:
        """Rows over all shards; 0 of a stream."""
        return sum(shard.rows or 0 for shard in self.shards)


@dataclass(frozen=True)
class StorageInfo:
    """How tokens lie on disk; `dtype` is little-endian.

    `layout`: `stream`; `rows` of one width with masks; `contrastive`, whose splits are each two sets of rows.
    """

    format: str
    dtype: np.dtype[Any]
    layout: str
    chunk_tokens: int | None = None
    compression: str = "none"


@dataclass(frozen=True)
class TokenizerInfo:
    """What the ids mean; every id is below `vocab_size`."""

    name: str
    vocab_size: int
    boundary_token_id: int | None
    sha256: str | None

    def means_the_same(self, other: TokenizerInfo) -> bool:
        """Whether an id stands for the same text in both. Files say it, under whatever name they are used:
        a `bpe` learnt for one set is an `hf` for the next."""
        if self.sha256 is None or other.sha256 is None:
            return (self.name, self.vocab_size) == (other.name, other.vocab_size)
        return (self.sha256, self.vocab_size) == (other.sha256, other.vocab_size)


def parse_storage(fields: Fields, version: int, path: Path) -> StorageInfo:
    """The `storage` section of a manifest of this `format_version` at `path`."""
    fields.only("format", "dtype", "layout", "row_width", "chunk_tokens", "compression")
    name = fields.text("format")
    if name not in FORMATS:
        raise fields.error("format", f"expected one of {', '.join(FORMATS)}")
    if FORMATS[name][0] != path.name:
        raise fields.error("format", f"but a manifest of that format is called {FORMATS[name][0]}")
    if fields.text("dtype") not in _DTYPE_NAMES[version]:
        raise fields.error("dtype", f"expected {_DTYPE_NAMES[version][0]!r} in format_version {version}")
    layout = fields.text("layout") if "layout" in fields else "stream"
    if layout not in LAYOUTS:
        raise fields.error("layout", f"expected one of {', '.join(LAYOUTS)}")
    compression = fields.text("compression") if "compression" in fields else "none"
    if compression not in (COMPRESSIONS if name == "hdf5" else ("none",)):
        raise fields.error("compression", f"expected one of {', '.join(COMPRESSIONS)}, in hdf5 only")
    return StorageInfo(name, DTYPES[version], layout, fields.optional_integer("chunk_tokens", 1), compression)


def parse_tokenizer(fields: Fields, version: int) -> TokenizerInfo:
    """The `tokenizer` section."""
    fields.only("name", "vocab_size", "boundary_token_id", "sha256")
    name = fields.text("name")
    vocab_size = fields.integer("vocab_size", 1)
    if version == 2 and vocab_size > 2**16:
        raise fields.error("vocab_size", f"but uint16 holds ids of a vocabulary up to {2**16}")
    if version == 3 and not 2**16 < vocab_size <= 2**32:
        raise fields.error(
            "vocab_size", f"but format_version 3 (uint32) is for vocabularies above {2**16} and up to {2**32}"
        )
    boundary = fields.optional_integer("boundary_token_id", 0)
    if boundary is not None and boundary >= vocab_size:
        raise fields.error("boundary_token_id", f"but tokenizer.vocab_size is {vocab_size}")
    return TokenizerInfo(name, vocab_size, boundary, fields.sha256("sha256"))


def parse_splits(top: Fields, storage: StorageInfo) -> dict[str, Split]:
    """The `splits` section: streams or rows by name, a contrastive split as two."""
    splits, widths = top.fields("splits"), top.fields("storage")
    if storage.layout == "stream":
        return {name: _split(splits.fields(name), name, storage, None) for name in SPLITS}
    if storage.layout == "rows":
        width = widths.integer("row_width", 2)
        return {name: _split(splits.fields(name), name, storage, width) for name in SPLITS}
    widths = widths.fields("row_width")
    result = {}
    for name in SPLITS:
        pair = splits.fields(name)
        for side in SIDES:
            width = widths.integer(side, 2)
            result[f"{name}.{side}"] = _split(pair.fields(side), f"{name}_{side}", storage, width)
        rows = [result[f"{name}.{side}"].total_rows for side in SIDES]
        if rows[0] != rows[1]:
            raise splits.error(
                name, f"but pos has {rows[0]} rows and neg {rows[1]}: rows of one number are a pair"
            )
    return result


def _split(fields: Fields, prefix: str, storage: StorageInfo, row_width: int | None) -> Split:
    fields.only("total_tokens", "documents", "bytes", "shards")
    shards: dict[str, Shard] = {}
    for entry in fields.items("shards"):
        shard = _shard(entry, prefix, storage, row_width)
        if shard.file in shards:
            raise entry.error("file", "which another shard of this split names too")
        shards[shard.file] = shard
    split = Split(
        total_tokens=fields.integer("total_tokens", 0),
        documents=fields.optional_integer("documents", 0),
        bytes=fields.optional_integer("bytes", 0),
        shards=tuple(shards.values()),
        row_width=row_width,
    )
    _check_sum(fields, "total_tokens", split.total_tokens, [shard.tokens for shard in split.shards])
    _check_sum(fields, "documents", split.documents, [shard.documents for shard in split.shards])
    return split


def _check_sum(fields: Fields, key: str, total: int | None, counts: Sequence[int | None]) -> None:
    known = [count for count in counts if count is not None]
    if total is not None and len(known) == len(counts) and sum(known) != total:
        raise fields.error(key, f"but its {len(counts)} shards add up to {sum(known)}")


def _shard(fields: Fields, prefix: str, storage: StorageInfo, row_width: int | None) -> Shard:
    fields.only("file", "tokens", "documents", "sha256", "rows", "mask_file", "mask_sha256")
    extension = FORMATS[storage.format][1]
    file = _file_name(fields, "file", prefix, extension)
    shard = Shard(
        file=file,
        tokens=fields.integer("tokens", 0),
        documents=fields.optional_integer("documents", 0),
        sha256=fields.sha256("sha256"),
    )
    if row_width is None:
        return shard
    rows, mask_file = fields.integer("rows", 0), None
    if shard.tokens > rows * row_width:
        raise fields.error("tokens", f"but {rows} rows of {row_width} columns hold {rows * row_width}")
    if storage.format == "npy":
        mask_file = _file_name(fields, "mask_file", prefix, f"mask.{extension}")
        if mask_file.split(".")[0] != file.split(".")[0]:
            raise fields.error("mask_file", f"but the rows are in {file}")
    return replace(shard, rows=rows, mask_file=mask_file, mask_sha256=fields.sha256("mask_sha256"))


def _file_name(fields: Fields, key: str, prefix: str, extension: str) -> str:
    file = fields.text(key)
    number = file.removeprefix(f"{prefix}_").removesuffix(f".{extension}")
    digits = len(number) == 5 and number.isascii() and number.isdecimal()
    if not digits or file != f"{prefix}_{number}.{extension}":
        raise fields.error(key, f"expected a plain name such as {prefix}_00000.{extension}")
    return file
