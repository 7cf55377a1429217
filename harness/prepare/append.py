"""`prepare.append`: the files that a set does not have yet become new shards behind its own."""

from __future__ import annotations

import filecmp
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.commandline.commands import shown
from harness.errors import UserError
from harness.files import link_or_copy
from harness.prepare import workplace
from harness.prepare.corpora import SourceFile
from harness.prepare.existing import differences
from harness.prepare.job import Job
from harness.prepare.old_set import OldSet, read_old_set
from harness.prepare.records import FILE_KEYS, recorded_counts
from harness.prepare.state import State
from harness.prepare.writers import Writer


def growing_job(job: Job) -> Job | None:
    """The job of adding the corpus files that the set does not have; None where it has them all.

    Raises `UserError` where there is no set, where it was made in another way, where it does not say from
    which files, or where one of them is not what it was.
    """
    if workplace.manifest_path(job.directory) is None:
        raise UserError(
            f"prepare.append=true adds to a prepared set, but {shown(job.directory)} holds none. Prepare it "
            "first, with prepare.append=false"
        )
    old = read_old_set(job.directory)
    if different := differences(old.raw, job):
        raise UserError(
            f"{shown(job.directory)} cannot be grown in another way than it was made:\n"
            + "\n".join(f"  {line}" for line in different)
            + "\nIts shards would mean different things. Set these keys to what is there, or prepare another "
            "set with data.path="
        )
    known = _KnownFiles(old)
    new = [file for file in job.files if file not in known]
    return replace(job, files=new, grown=old) if new else None


def begin_growth(old: OldSet, by_source: bool, building: Path, writers: dict[str, Writer]) -> State:
    """Give every shard of `old` a name in `building` too, and go on behind the last of them.

    Raises `UserError` where a file is not what was recorded of it.
    """
    names = [name for shard in old.shards for name in old.files_of(shard)]
    if damaged := old.changed(names):
        raise UserError(
            f"{old.folder / damaged} is not the file that was written: its SHA-256 differs from the one in "
            f"{workplace.PROVENANCE}. Nothing is added to a damaged set: restore the file, or prepare the "
            "set again with prepare.overwrite=true"
        )
    for name in names:
        link_or_copy(old.folder / name, building / name)
    for split, writer in writers.items():
        writer.restore(writer.closed_state(old.raw["splits"][split], old.files))
    state = State(by_source=by_source, total=recorded_counts(old))
    if by_source:
        state.sources = list(old.provenance["sources"])
    return state


def _source_files(old: OldSet) -> list[dict[str, Any]]:
    """What a set records of the files it was made from; all else that growing needs is recorded too."""
    made = old.provenance
    try:
        recorded_counts(old)
        whole = {name for shard in old.shards for name in old.files_of(shard)} <= made["files_sha256"].keys()
        files = [{key: file[key] for key in FILE_KEYS} for file in made["source_files"]]
        whole = whole and ("sharding" not in old.raw["preparation"] or bool(made["sources"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise UserError(
            f"{shown(old.folder / workplace.PROVENANCE)} does not say from which files the set was made, so "
            "a file might be added twice. Restore it, or prepare the set again with prepare.overwrite=true"
        )
    return files


class _KnownFiles:
    """The files that a set was made from, by their places, their names and their states."""

    def __init__(self, old: OldSet) -> None:
        self._set = old.folder
        self._by_path: dict[str, dict[str, Any]] = {}
        self._by_name: dict[str, list[dict[str, Any]]] = {}
        self._by_state: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for recorded in _source_files(old):
            self._by_path[recorded["path"]] = recorded
            self._by_name.setdefault(recorded["name"], []).append(recorded)
            self._by_state.setdefault((recorded["size"], recorded["mtime_ns"]), []).append(recorded)

    def __contains__(self, file: SourceFile) -> bool:
        """Whether the set has this file; `UserError` where it had other text, and where nobody can tell."""
        recorded = self._by_path.get(os.path.abspath(file.path))
        if recorded is not None:
            if (recorded["size"], recorded["mtime_ns"]) != (file.size, file.mtime_ns):
                raise _changed(file, recorded, self._set, "changed since")
            return True
        found = [(one, _same_text(file, one)) for one in self._by_name.get(file.name, [])]
        if any(same for _, same in found):
            return True
        for one, same in found:
            if same is None:
                raise _changed(file, one, self._set, "may be the same text in another place")
        for one in self._by_state.get((file.size, file.mtime_ns), []):
            if not os.path.lexists(one["path"]):
                raise _changed(file, one, self._set, "may be the same text under another name")
        return False


def _same_text(file: SourceFile, recorded: dict[str, Any]) -> bool | None:
    """Whether a file of the same name elsewhere is the recorded one, moved or copied; None: it may be."""
    same_state = (recorded["size"], recorded["mtime_ns"]) == (file.size, file.mtime_ns)
    try:
        there = os.stat(recorded["path"])
    except OSError:
        return True if same_state else None
    if (there.st_size, there.st_mtime_ns) == (recorded["size"], recorded["mtime_ns"]):
        return filecmp.cmp(recorded["path"], file.path, shallow=False)
    return True if same_state else None


def _changed(file: SourceFile, known: dict[str, Any], directory: Path, what: str) -> UserError:
    return UserError(
        f"{file.path} ({file.size:,} bytes, mtime {file.mtime_ns}) is not as {shown(directory)} recorded it "
        f"({known['path']}, {known['size']:,} bytes, mtime {known['mtime_ns']}): it {what}, and its "
        "documents would be there twice or in two versions. Only whole new files can be "
        "added: put the new text into a file of another name, or prepare the set again with "
        "prepare.overwrite=true"
    )
