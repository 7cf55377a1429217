"""What a preparation writes down beside the shards, and what is read back of it."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness.config_groups import CorpusConfig, JsonlCorpusConfig, ParquetCorpusConfig, TextCorpusConfig
from harness.files import sha256_file, write_json
from harness.prepare import workplace
from harness.prepare.corpora import SourceFile
from harness.prepare.job import Job, fingerprint_of, versions
from harness.prepare.old_set import OldSet
from harness.prepare.seal import storage_section
from harness.prepare.settings import preparation_settings
from harness.prepare.state import Counts, State
from harness.storage.manifest import write_manifest
from harness.storage.manifest_schema import DTYPES
from harness.storage.verify import remember

FILE_KEYS = ("name", "path", "size", "mtime_ns")  # what is recorded of a source file


def configured_path(corpus: CorpusConfig) -> str | list[str] | None:
    """The corpus' own path or paths as configured, made absolute; None for the embedded corpus."""
    if not isinstance(corpus, TextCorpusConfig | JsonlCorpusConfig | ParquetCorpusConfig):
        return None
    path = corpus.path
    return os.path.abspath(path) if isinstance(path, str) else [os.path.abspath(one) for one in path]


def recorded_corpus_path(set_directory: Path | str) -> str | list[str] | None:
    """The absolute path or paths that the set in `set_directory` was prepared from.

    None for the embedded corpus, and where no readable provenance.json records it: a set made elsewhere.
    """
    path = workplace.provenance(Path(set_directory)).get("corpus_path")
    if isinstance(path, str) or (isinstance(path, list) and all(isinstance(one, str) for one in path)):
        return path
    return None


def recorded_counts(old: OldSet) -> Counts:
    """What was counted when a set was made. Raises `KeyError`, `TypeError` or `ValueError` where that is not
    recorded."""
    found = dict(old.provenance["documents"])
    found["places"] = list(found.pop("bad_places"))
    if "documents" not in found:  # a stream, made before this was recorded
        found["documents"] = sum(split["documents"] for split in old.raw["splits"].values())
    chain = old.raw["preparation"]["corpus_sha256"]
    bytes.fromhex(chain)
    return Counts(**found, chain=chain)


def write_records(
    job: Job, building: Path, state: State, splits: dict[str, Any], files: dict[str, str], started: float
) -> None:
    """The facts of the making, then the manifest; after it only the note that the shards were hashed.

    `files` are the shards' files with the SHA-256s of their whole content.
    """
    tokenizer_files = sorted((building / workplace.TOKENIZER_FOLDER).glob("*"))
    files |= {path.relative_to(building).as_posix(): sha256_file(path) for path in tokenizer_files}
    provenance: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "host": platform.node(),
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__}
        | versions(job.tokenizer.name),
        "identity": job.identity(),
        "corpus_fingerprint": fingerprint_of(job.files),
        "corpus_path": configured_path(job.config.corpus),
        "documents": _counted(job, state.total, splits),
        "files_sha256": files,
        "source_files": [asdict(file) | {"path": os.path.abspath(file.path)} for file in job.files],
    }
    if job.by_source:
        provenance["sources"] = state.sources
    if job.grown is not None:
        provenance |= _grown(job, job.grown.provenance, provenance)
    write_json(building / workplace.PROVENANCE, provenance)
    raw = {
        "format_version": next(v for v, dtype in DTYPES.items() if dtype == job.tokenizer.dtype),
        "storage": storage_section(job.storage, job.row_width),
        "tokenizer": job.tokenizer.manifest_section(),
        "preparation": preparation_settings(job.config) | {"corpus_sha256": state.total.chain},
        "splits": splits,
    }
    remember(write_manifest(building, raw))


def _counted(job: Job, total: Counts, splits: dict[str, Any]) -> dict[str, Any]:
    found = asdict(total)
    del found["chain"]  # the manifest's corpus_sha256
    found["bad_places"] = found.pop("places")
    if job.storage.layout == "rows" and job.row_width is not None:  # whatever is no target is padding
        shards = [shard for split in splits.values() for shard in split["shards"]]
        found["padding"] = sum(shard["rows"] * (job.row_width - 1) - shard["tokens"] for shard in shards)
    return found


def _grown(job: Job, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The facts of a making that added files to a set: those of all its files, and how it was made before."""
    files = [*before["source_files"], *now["source_files"]]
    listed = [SourceFile(*(file[key] for key in FILE_KEYS)) for file in files]
    assert job.grown is not None
    made = {key: before.get(key) for key in ("started", "seconds", "host", "versions", "corpus_fingerprint")}
    earlier = {"metadata_sha256": job.grown.digest, "source_files": len(before["source_files"])} | made
    return {
        "source_files": files,
        "corpus_fingerprint": fingerprint_of(listed),
        "corpus_path": _joined_paths(job.config.corpus, before.get("corpus_path"), files),
        "grown_from": [*before.get("grown_from", []), earlier],
    }


def _joined_paths(corpus: CorpusConfig, before: Any, files: list[dict[str, Any]]) -> str | list[str] | None:
    """The configured path where it names every file of the set, else the paths before and it."""
    now = configured_path(corpus)
    if now is None or before is None:
        return now
    named = [now] if isinstance(now, str) else now
    if all(any(Path(file["path"]).is_relative_to(path) for path in named) for file in files):
        return now
    return [*([before] if isinstance(before, str) else before), *named]
