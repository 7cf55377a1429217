"""The manifest of a prepared set: what its shards hold, and the digest that names exactly that.

One schema for every backend; DESIGN 3.1 is the contract. Everything is checked when a manifest is loaded, so
the rest of the harness may trust every field.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.files import irregular, write_atomic
from harness.storage.strict_json import Fields, parse_json, read_text

SPLITS = ("train", "val")
PREPARE_COMMAND = "python scripts/prepare_data.py data=npy corpus=... tokenizer=..."

# storage.format -> (the manifest's file name, the shards' extension)
FORMATS = {"npy": ("metadata.json", "npy")}

# format_version -> the stored dtype; 3 exists only for vocabularies that 16 bits cannot hold.
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 3: np.dtype("<u4")}
_DTYPE_NAMES = {2: ("uint16", "<u2"), 3: ("uint32", "<u4")}


@dataclass(frozen=True)
class Shard:
    """One file of tokens; `sha256` is over the tokens as little-endian bytes."""

    file: str
    tokens: int
    documents: int | None
    sha256: str | None


@dataclass(frozen=True)
class Split:
    """One token stream: its shards in order. `bytes` is the UTF-8 length of the text behind it."""

    total_tokens: int
    documents: int | None
    bytes: int | None
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class StorageInfo:
    """How tokens lie on disk; `dtype` is little-endian."""

    format: str
    dtype: np.dtype[Any]
    layout: str


@dataclass(frozen=True)
class TokenizerInfo:
    """What the ids mean; every id is below `vocab_size`."""

    name: str
    vocab_size: int
    boundary_token_id: int | None
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """A checked manifest; `raw` is the parsed JSON as it stands in the file."""

    directory: Path
    path: Path
    raw: dict[str, Any]
    format_version: int
    storage: StorageInfo
    tokenizer: TokenizerInfo
    preparation: dict[str, Any]
    splits: dict[str, Split]

    @cached_property
    def metadata_sha256(self) -> str:
        """The identity of the set: see `manifest_digest`."""
        return manifest_digest(self.raw)

    @cached_property
    def content_sha256(self) -> str | None:
        """Equal for two storages of the same tokens in the same shards; None where a shard has no hash."""
        shards = [(name, shard) for name in SPLITS for shard in self.splits[name].shards]
        if any(shard.sha256 is None for _, shard in shards):
            return None
        return _digest([[name, shard.tokens, shard.sha256] for name, shard in shards])


def load_manifest(directory: Path | str, *, prepare_command: str | None = None) -> Manifest:
    """Read and check the manifest in `directory`.

    `prepare_command` is what the messages say to run; without it they show the form of the command. Raises
    `UserError` where the folder or the manifest is missing or anything in it is wrong: the file, the field,
    its value and what was expected.
    """
    prepare_command = prepare_command or PREPARE_COMMAND
    directory = Path(directory)
    path = _find(directory, prepare_command)
    try:
        return _check(parse_json(_read(path, prepare_command)), path, prepare_command)
    except UserError:
        raise
    except ValueError as error:
        raise _damaged(path, str(error), prepare_command) from error


def write_manifest(directory: Path | str, raw: dict[str, Any]) -> Manifest:
    """Check `raw` as `load_manifest` would, write it atomically into `directory`, return it loaded."""
    text = json.dumps(raw, indent=2, allow_nan=False) + "\n"
    storage = raw.get("storage")
    storage_format = storage.get("format") if isinstance(storage, dict) else None
    file, _ = FORMATS.get(str(storage_format), FORMATS["npy"])
    path = Path(directory) / file
    manifest = _check(parse_json(text), path, PREPARE_COMMAND)
    write_atomic(path, text)
    return manifest


def manifest_digest(raw: dict[str, Any]) -> str:
    """SHA-256 (hex) of the whole parsed manifest as compact ASCII JSON with sorted keys.

    Independent of white space, key order and folder; every value counts, unknown keys included.
    """
    return _digest(raw)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _find(directory: Path, prepare_command: str) -> Path:
    names = [file for file, _ in FORMATS.values()]
    try:
        entries = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = "is not a folder" if directory.exists() else "does not exist"
        raise UserError(
            f"{directory} {problem}, so there is no prepared set. Prepare it: {prepare_command}"
        ) from error
    except OSError as error:
        raise UserError(
            f"{directory} cannot be read ({error.strerror}), so nothing says which tokens a run sees. Make "
            "it readable, or set data.path to a set that is"
        ) from error
    for name in names:
        if name in entries:
            return directory / name
    raise UserError(
        f"{directory} holds no manifest ({' or '.join(names)}): it is not a prepared set, or preparing it "
        f"was interrupted. Prepare it: {prepare_command}"
    )


def _read(path: Path, prepare_command: str) -> str:
    try:
        if kind := irregular(path.stat().st_mode):
            raise UserError(
                f"{path} is {kind}, not a regular file, so nothing says which tokens a run sees. Move "
                f"{path.parent} away, and put the set back or prepare it again: {prepare_command}"
            )
        return read_text(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}), so nothing says which tokens a run sees. Make it "
            f"readable; or move {path.parent} away and prepare the set again: {prepare_command}"
        ) from error


def _damaged(path: Path, what: str, prepare_command: str) -> UserError:
    return UserError(
        f"{path}: {what}. A manifest that is wrong cannot say which tokens a run sees. "
        f"Restore the file or prepare the set again: {prepare_command} prepare.overwrite=true"
    )


def _check(raw: Any, path: Path, prepare_command: str) -> Manifest:
    top = Fields(raw, "", lambda what: _damaged(path, what, prepare_command))
    top.only("format_version", "storage", "tokenizer", "preparation", "splits")
    version = top.integer("format_version", 0)
    if version not in _DTYPES:
        raise top.error("format_version", "but this harness reads 2 (uint16) and 3 (uint32)")
    storage = _storage(top.fields("storage"), version, path)
    tokenizer = _tokenizer(top.fields("tokenizer"), version)
    splits = top.fields("splits")
    _, extension = FORMATS[storage.format]
    return Manifest(
        directory=path.parent,
        path=path,
        raw=raw,
        format_version=version,
        storage=storage,
        tokenizer=tokenizer,
        preparation=top.fields("preparation").values if "preparation" in top else {},
        splits={name: _split(splits.fields(name), name, extension) for name in SPLITS},
    )


def _storage(fields: Fields, version: int, path: Path) -> StorageInfo:
    fields.only("format", "dtype", "layout")
    name = fields.text("format")
    if name not in FORMATS:
        raise fields.error("format", f"expected one of {', '.join(FORMATS)}")
    if FORMATS[name][0] != path.name:
        raise fields.error("format", f"but a manifest of that format is called {FORMATS[name][0]}")
    if fields.text("dtype") not in _DTYPE_NAMES[version]:
        raise fields.error("dtype", f"expected {_DTYPE_NAMES[version][0]!r} in format_version {version}")
    layout = fields.text("layout") if "layout" in fields else "stream"
    if layout != "stream":
        raise fields.error("layout", "expected 'stream'")
    return StorageInfo(name, _DTYPES[version], layout)


def _tokenizer(fields: Fields, version: int) -> TokenizerInfo:
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


def _split(fields: Fields, name: str, extension: str) -> Split:
    fields.only("total_tokens", "documents", "bytes", "shards")
    shards: dict[str, Shard] = {}
    for entry in fields.items("shards"):
        shard = _shard(entry, name, extension)
        if shard.file in shards:
            raise entry.error("file", "which another shard of this split names too")
        shards[shard.file] = shard
    split = Split(
        total_tokens=fields.integer("total_tokens", 0),
        documents=fields.optional_integer("documents", 0),
        bytes=fields.optional_integer("bytes", 0),
        shards=tuple(shards.values()),
    )
    _check_sum(fields, "total_tokens", split.total_tokens, lambda shard: shard.tokens, split.shards)
    _check_sum(fields, "documents", split.documents, lambda shard: shard.documents, split.shards)
    return split


def _check_sum(
    fields: Fields,
    key: str,
    total: int | None,
    count: Callable[[Shard], int | None],
    shards: tuple[Shard, ...],
) -> None:
    counts = [value for value in map(count, shards) if value is not None]
    if total is not None and len(counts) == len(shards) and sum(counts) != total:
        raise fields.error(key, f"but its {len(shards)} shards add up to {sum(counts)}")


def _shard(fields: Fields, split: str, extension: str) -> Shard:
    fields.only("file", "tokens", "documents", "sha256")
    file = fields.text("file")
    if not re.fullmatch(rf"{split}_[0-9]{{5}}\.{extension}", file):
        raise fields.error("file", f"expected a plain name such as {split}_00000.{extension}")
    return Shard(
        file=file,
        tokens=fields.integer("tokens", 1),
        documents=fields.optional_integer("documents", 0),
        sha256=fields.sha256("sha256"),
    )
