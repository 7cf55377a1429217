"""Whether the files of a set still hold the tokens that its manifest promises: every byte hashed.

Start-up reads headers only; this reads contents. What was hashed once, by the preparation or by a
verification, is remembered in `verified.json` beside the manifest by each file's size, modification time and
inode, so that a run need not hash the same files again. A set that was copied is hashed once more.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.errors import UserError
from harness.files import irregular, sha256_file, write_json
from harness.storage.manifest import Manifest
from harness.storage.one_shard import Place, open_shard, places
from harness.storage.opening import open_manifest
from harness.storage.rows import RowStore
from harness.storage.tokens import TokenStore

PROVENANCE = "provenance.json"
REMEMBERED = "verified.json"
TOKENIZER_FOLDER = "tokenizer"
_BLOCK = 1 << 20  # tokens
Report = Callable[[str], object]


@dataclass(frozen=True)
class Verified:
    """What a verification found: `faults` as lines for people, and how much was compared."""

    faults: list[str]
    shards: int
    tokens: int
    files: int
    unhashed: int

    @property
    def ok(self) -> bool:
        return not self.faults


def verify_set(directory: Path | str) -> Verified:
    """Compare every shard, mask and recorded file of a set with its hash, in as many threads as cores.

    Tokens and masks are compared with the manifest, whole files with `provenance.json` where there is one.
    All faults are collected; `UserError` only for a folder without a readable manifest, and for a set that
    was replaced in the meantime.
    """
    with open_manifest(directory, None) as manifest:
        recorded, states = _recorded_files(manifest.directory), _states(manifest)
        shards = list(places(manifest))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            of_shards = pool.map(lambda place: _shard_faults(manifest, place), shards)
            of_files = pool.map(lambda item: _file_faults(manifest.directory, *item), recorded.items())
            faults = [fault for found in (*of_shards, *of_files) for fault in found]
        faults += _foreign_files(manifest, recorded)
    result = Verified(
        faults=faults,
        shards=len(shards),
        tokens=sum(place.shard.tokens for place in shards),
        files=len(recorded),
        unhashed=sum(_is_unhashed(place) for place in shards),
    )
    if result.ok and not result.unhashed:
        _remember(manifest, states)
    return result


def ensure_verified(manifest: Manifest, mode: str, report: Report, *, keep: bool = True) -> None:
    """What `data.verify` asks for at the start of a run: `full` hashes the set unless that is remembered.

    `keep` False writes nothing down, so the next start hashes again. Raises `UserError` with every fault.
    Shards without a hash in the manifest are said and let through.
    """
    if mode == "headers" or is_remembered(manifest):
        return
    shards, states = list(places(manifest)), _states(manifest)
    size = sum(state[0] for state in states.values())
    report(f"verifying {manifest.directory}: {size / 2**20:,.0f} MiB are hashed{' once' if keep else ''}")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = pool.map(lambda place: _shard_faults(manifest, place), shards)
        faults = [fault for faults in found for fault in faults]
    if faults:
        raise UserError(
            f"{manifest.path}: the set does not hold the tokens it promises:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
            + "\nRestore the files or prepare the set again with prepare.overwrite=true. data.verify=headers "
            "would train on it as it is"
        )
    if unhashed := sum(_is_unhashed(place) for place in shards):
        report(f"{manifest.path}: {unhashed} of {len(shards)} shards have no hash there and are not compared")
    if keep:
        _remember(manifest, states)


def remember(manifest: Manifest) -> None:
    """Record that every shard of the set holds what the manifest says, where the folder can be written."""
    _remember(manifest, _states(manifest))


def _remember(manifest: Manifest, states: dict[str, list[int]]) -> None:
    """`states` are from before the files were hashed: what changed since then is hashed again."""
    state = {"metadata_sha256": manifest.metadata_sha256, "files": states}
    try:
        write_json(manifest.directory / REMEMBERED, state)
    except OSError:
        return


def is_remembered(manifest: Manifest) -> bool:
    """Whether the set was hashed before and no shard has changed its size, modification time or inode."""
    try:
        state = json.loads((manifest.directory / REMEMBERED).read_text())
        return bool(state == {"metadata_sha256": manifest.metadata_sha256, "files": _states(manifest)})
    except (OSError, ValueError):
        return False


def _states(manifest: Manifest) -> dict[str, list[int]]:
    """Of each shard's file that is there."""
    states = {}
    for name in _shard_files(manifest):
        try:
            status = os.stat(manifest.directory / name)
        except OSError:
            continue
        states[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return states


def _shard_files(manifest: Manifest) -> list[str]:
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return [name for shard in shards for name in (shard.file, shard.mask_file) if name is not None]


def _is_unhashed(place: Place) -> bool:
    of_rows = place.shard.rows is not None
    return place.shard.sha256 is None or (of_rows and place.shard.mask_sha256 is None)


def _shard_faults(manifest: Manifest, place: Place) -> list[str]:
    """What is wrong with one shard, read by itself so that one fault hides no other."""
    try:
        store = open_shard(manifest, place)
        if isinstance(store, RowStore):
            return list(_row_faults(store, place))
        return list(_token_faults(store, place))
    except UserError as error:
        return [f"{error} ({place.range})"]


def _token_faults(store: TokenStore, place: Place) -> Iterator[str]:
    digest = hashlib.sha256()
    for start in range(0, place.shard.tokens, _BLOCK):
        tokens = store.read_tokens(start, min(_BLOCK, place.shard.tokens - start))
        digest.update(tokens.data)
        yield from _id_faults(store, tokens, place, start)
    yield from _hash_faults(store.paths[0], "tokens", place, place.shard.sha256, digest.hexdigest())


def _row_faults(store: RowStore, place: Place) -> Iterator[str]:
    digest, mask_digest, count = hashlib.sha256(), hashlib.sha256(), 0
    rows_a_block = max(1, _BLOCK // store.row_width)
    for start in range(0, store.total_rows, rows_a_block):
        ids = np.arange(start, min(start + rows_a_block, store.total_rows))
        rows, mask = store.read_rows(ids)
        digest.update(rows.data)
        mask_digest.update(mask.data)
        count += int(np.count_nonzero(mask))
        yield from _id_faults(store, rows, place, start)
    path, shard = store.paths[0], place.shard
    yield from _hash_faults(path, "rows", place, shard.sha256, digest.hexdigest())
    yield from _hash_faults(
        path.parent / (shard.mask_file or shard.file),
        "mask",
        place,
        shard.mask_sha256,
        mask_digest.hexdigest(),
    )
    if count != shard.tokens:
        yield f"{path}: {count} true mask entries, but the manifest says {shard.tokens} ({place.range})"


def _id_faults(store: TokenStore | RowStore, ids: np.ndarray, place: Place, start: int) -> Iterator[str]:
    if ids.size and (highest := int(ids.max())) >= store.vocab_size:
        size = store.vocab_size
        yield f"{store.paths[0]}: token id {highest}, but the vocabulary has {size} ids ({place.range})"


def _hash_faults(path: Path, what: str, place: Place, promised: str | None, found: str) -> Iterator[str]:
    if promised is not None and promised != found:
        yield f"{path}: SHA-256 of its {what} is {found}, but the manifest says {promised} ({place.range})"


def _recorded_files(directory: Path) -> dict[str, str]:
    """The whole-file hashes that the preparation wrote down; none where the set was made elsewhere."""
    try:
        recorded = json.loads((directory / PROVENANCE).read_text())["files_sha256"]
        return {str(name): str(sha256) for name, sha256 in recorded.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _file_faults(directory: Path, name: str, promised: str) -> list[str]:
    path = directory / name
    try:
        if kind := irregular(path.stat().st_mode):
            return [f"{path} is {kind}, not a regular file"]
        found = sha256_file(path)
    except FileNotFoundError:
        return [f"{path} is missing, but {PROVENANCE} names it"]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror or error}"]
    if found == promised:
        return []
    return [f"{path}: the whole file has SHA-256 {found}, but {PROVENANCE} says {promised}"]


def _foreign_files(manifest: Manifest, recorded: dict[str, str]) -> list[str]:
    """Files in the folder that nothing names: a reader ignores them, but a person may take them for data."""
    known = {*_shard_files(manifest), *recorded, manifest.path.name, PROVENANCE, REMEMBERED}
    found = [path for path in manifest.directory.rglob("*") if not path.is_dir()]
    names = sorted(path.relative_to(manifest.directory).as_posix() for path in found)
    return [
        f"{manifest.directory / name} belongs to no split: {manifest.path.name} does not name it"
        for name in names
        if name not in known and not (not recorded and name.startswith(f"{TOKENIZER_FOLDER}/"))
    ]
