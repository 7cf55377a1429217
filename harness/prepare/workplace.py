"""Where a set is built, so that under its own name it is either whole or absent.

Beside `SET` lie `SET.preparing` (the set being built), `SET.replaced` (the old one, for the moment of
a swap) and `SET.lock`. All of it is on one file system, so that renames are atomic.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files import fsync_dir, write_json
from harness.prepare.provenance import well_formed
from harness.storage.manifest import FORMATS, load_manifest

JOURNAL = "journal.json"
PROVENANCE = "provenance.json"
VERIFIED = "verified.json"  # which files were hashed, by their state on disk
TOKENIZER_FOLDER = "tokenizer"
_SHARD = re.compile(r"(train|val)(_pos|_neg)?_\d{5}\.(npy|mask\.npy|h5)")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room: the disk, a quota, a limit on files


def beside(directory: Path, suffix: str) -> Path:
    """The sibling `SET.suffix`."""
    return directory.with_name(f"{directory.name}.{suffix}")


def manifest_path(directory: Path) -> Path | None:
    """The manifest in a folder, whatever its storage, or None."""
    for name, _ in FORMATS.values():
        if (directory / name).is_file():
            return directory / name
    return None


def settled(directory: Path) -> bool:
    """Whether a set is there and no swap was interrupted."""
    return manifest_path(directory) is not None and not beside(directory, "replaced").exists()


@contextmanager
def locked(directory: Path, report: Callable[[str], object]) -> Iterator[None]:
    """Hold the set's lock; a second process waits here, and says so once."""
    if not directory.name:
        raise UserError(
            f"{directory} is the root of the file system, and a set is a folder that is swapped as a whole: "
            "set data.path to a folder below it"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(beside(directory, "lock"), "a") as file:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting: another process is preparing {directory}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            report(f"{directory}: this file system has no locks; do not prepare one set from two processes")
        yield


def heal(directory: Path) -> bool:
    """After a kill in the middle of a swap: put one whole set back under its name.

    Returns whether that completed the swap, so that the new set is there.
    """
    building, replaced = beside(directory, "preparing"), beside(directory, "replaced")
    if not replaced.exists():
        return False
    if not directory.exists():
        whole = manifest_path(building) is not None and not (building / JOURNAL).exists()
        if not whole:
            _rename(replaced, directory)
            return False
        _rename(building, directory)
    shutil.rmtree(replaced)
    return True


def finished(folder: Path, identity: str) -> bool:
    """Whether `folder` holds every file of the set with this identity, under whatever name."""
    if manifest_path(folder) is None or (folder / JOURNAL).exists():
        return False
    return provenance(folder).get("identity") == identity


def provenance(folder: Path) -> dict[str, Any]:
    """The facts of the making; an absent or damaged file is no fault, it is not part of the identity."""
    try:
        return well_formed(json.loads((folder / PROVENANCE).read_text()))
    except (OSError, ValueError, RecursionError):
        return {}


def remove_temporaries(building: Path) -> None:
    """What a kill left of files that were being written."""
    for path in building.rglob(".*.tmp"):
        path.unlink()


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def own_bytes(building: Path) -> int:
    """The size of the files in `building` that no other set shares."""
    states = [path.stat() for path in building.iterdir() if path.is_file()]
    return sum(state.st_size for state in states if state.st_nlink == 1)


def read_journal(building: Path, identity: str) -> dict[str, Any] | None:
    """The state an interrupted preparation of the same thing left, or None."""
    try:
        journal = json.loads((building / JOURNAL).read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(journal, dict) and journal.get("identity") == identity
    return journal["state"] if same else None


def write_journal(building: Path, identity: str, state: dict[str, Any]) -> None:
    write_json(building / JOURNAL, {"identity": identity, "state": state})


def start_building(building: Path) -> None:
    """An empty folder to build in; what another preparation left there is removed."""
    if building.exists():
        shutil.rmtree(building)
    building.mkdir(parents=True)
    fsync_dir(building.parent)


def publish(directory: Path) -> None:
    """Give the finished set its name.

    A process that has the old set open keeps reading the files it has opened. It opens no file of the new
    set: `TokenStore` compares each with the one it checked, and ends in words where they differ.
    """
    building, replaced = beside(directory, "preparing"), beside(directory, "replaced")
    (building / JOURNAL).unlink(missing_ok=True)
    fsync_dir(building)
    if manifest_path(directory) is not None:
        _rename(directory, replaced)
    _rename(building, directory)
    if replaced.exists():
        shutil.rmtree(replaced)


def check_replaceable(directory: Path) -> None:
    """Refuse to replace a folder that holds anything a set does not: it would be lost."""
    if not directory.exists():
        return
    path = manifest_path(directory)
    if path is None:
        if directory.is_dir() and not any(directory.iterdir()):
            return
        raise UserError(
            f"{directory} exists and is not a prepared set, so nothing there is touched. Set data.path (or "
            "data.root) to another folder, or remove this one yourself"
        )
    known = {path.name, PROVENANCE, VERIFIED, TOKENIZER_FOLDER, *_tokenizer_files()}
    try:
        manifest = load_manifest(directory)
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        known |= {file for shard in shards for file in (shard.file, shard.mask_file) if file}
    except UserError:  # a damaged set: its shards are known by their names
        known |= {entry.name for entry in directory.iterdir() if _SHARD.fullmatch(entry.name)}
    names = {entry.name for entry in directory.iterdir()}
    for name in names & known:  # a folder may stand in a file's place, and people keep notes anywhere
        entries = (directory / name).rglob("*")
        files = {path.relative_to(directory).as_posix() for path in entries if not path.is_dir()}
        names = names | files
    foreign = sorted(names - known)
    if foreign:
        raise UserError(
            f"{directory} holds files that are not part of the set: {', '.join(foreign[:5])}"
            f"{', ...' if len(foreign) > 5 else ''}. Putting another set in its place would delete them: "
            "move them away, or set data.path to another folder"
        )


def _tokenizer_files() -> set[str]:
    from harness.prepare.tokenizers import SET_FILES

    return {f"{TOKENIZER_FOLDER}/{file}" for files in SET_FILES.values() for file in files}


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    fsync_dir(target.parent)
