"""The manifest of a prepared set: what its shards hold, and the digest that names exactly that.

One schema for every backend; DESIGN 3.1 is the contract. Everything is checked when a manifest is loaded, so
the rest of the harness may trust every field.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files import write_atomic
from harness.storage.io import FileIdentity, Irregular, identity_of, open_regular
from harness.storage.manifest_schema import (
    DTYPES,
    FORMATS,
    SPLITS,
    Shard,
    Split,
    StorageInfo,
    TokenizerInfo,
    parse_splits,
    parse_storage,
    parse_tokenizer,
)
from harness.storage.strict_json import Fields, parse_json

__all__ = ["FORMATS", "SPLITS", "Manifest", "Shard", "load_manifest", "manifest_digest", "write_manifest"]

PREPARE_COMMAND = "python scripts/prepare_data.py data=npy corpus=... tokenizer=..."

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class Manifest:
    """A checked manifest; `raw` is the parsed JSON as it stands in the file.

    `splits` is keyed by `train` and `val`, of contrastive rows by `train.pos`, `train.neg`, ....
    """

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
        """Equal for two storages of the same tokens in the same shards; None where a shard has no hash.

        Rows are named by their number and their mask's hash too: the mask is part of what is trained on.
        """
        shards = [(name, shard) for name, split in self.splits.items() for shard in split.shards]
        of_rows = self.storage.layout != "stream"
        if any(s.sha256 is None or (of_rows and s.mask_sha256 is None) for _, s in shards):
            return None
        return _digest(
            [[name, s.tokens, s.sha256, *([s.rows, s.mask_sha256] if of_rows else [])] for name, s in shards]
        )


def load_manifest(directory: Path | str, *, prepare_command: str | None = None) -> Manifest:
    """Read and check the manifest in `directory`.

    `prepare_command` is what the messages say to run; without it they show the form of the command. Raises
    `UserError` where the folder or the manifest is missing or anything in it is wrong: the file, the field,
    its value and what was expected.
    """
    return identified_manifest(directory, prepare_command)[0]


def identified_manifest(
    directory: Path | str, prepare_command: str | None = None
) -> tuple[Manifest, FileIdentity]:
    """As `load_manifest`, with the identity of the file that was read."""
    prepare_command = prepare_command or PREPARE_COMMAND
    path = _find(Path(directory), prepare_command)
    data, identity = _read(path, prepare_command)
    try:
        return _check(parse_json(data.decode("utf-8")), path, prepare_command), identity
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise _damaged(path, f"it is not UTF-8: {error}", prepare_command) from error
    except ValueError as error:
        raise _damaged(path, str(error), prepare_command) from error


def parse_manifest(raw: dict[str, Any], path: Path) -> Manifest:
    """A manifest that is known already, such as a run's copy, for the shards beside `path`; checked alike."""
    return _check(raw, path, PREPARE_COMMAND)


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
    return hashlib.sha256(_CANONICAL.encode(value).encode("ascii")).hexdigest()


def _find(directory: Path, prepare_command: str) -> Path:
    names = [file for file, _ in FORMATS.values()]
    there = [name for name in names if os.path.lexists(f"{directory}{os.sep}{name}")]
    if len(there) == 1:
        return directory / there[0]
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
    found = [name for name in names if name in entries]
    if len(found) > 1:
        raise UserError(
            f"{directory} holds {' and '.join(found)}: a folder is one set, and nothing says which "
            "of the two a run would read. Move one of them into a folder of its own, with its shards"
        )
    if found:
        return directory / found[0]
    raise UserError(
        f"{directory} holds no manifest ({' or '.join(names)}): it is not a prepared set, or preparing it "
        f"was interrupted. Prepare it: {prepare_command}"
    )


def _read(path: Path, prepare_command: str) -> tuple[bytes, FileIdentity]:
    try:
        fd, status = open_regular(path)
        try:
            data = b""
            while part := os.read(fd, status.st_size + 1):
                data += part
        finally:
            os.close(fd)
        return data, identity_of(status)
    except Irregular as error:
        raise UserError(
            f"{path} is {error.kind}, not a regular file, so nothing says which tokens a run sees. Move "
            f"{path.parent} away, and put the set back or prepare it again: {prepare_command}"
        ) from error
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
    if not {"format_version", "splits"} & top.values.keys():
        keys = ", ".join(sorted(top.values)[:8]) or "nothing"
        expected = "format_version (2 or 3), storage, tokenizer and splits"
        raise _damaged(
            path, f"it is no manifest of this harness: it has {keys}, expected {expected}", prepare_command
        )
    top.only("format_version", "storage", "tokenizer", "preparation", "splits")
    version = top.integer("format_version", 0)
    if version not in DTYPES:
        raise top.error("format_version", "but this harness reads 2 (uint16) and 3 (uint32)")
    storage = parse_storage(top.fields("storage"), version, path)
    tokenizer = parse_tokenizer(top.fields("tokenizer"), version)
    return Manifest(
        directory=path.parent,
        path=path,
        raw=raw,
        format_version=version,
        storage=storage,
        tokenizer=tokenizer,
        preparation=top.fields("preparation").values if "preparation" in top else {},
        splits=parse_splits(top, storage),
    )
