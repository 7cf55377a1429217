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
from harness.prepare.job import Job, State, preparation_settings, versions
from harness.prepare.seal import storage_section
from harness.storage.manifest import write_manifest
from harness.storage.manifest_schema import DTYPES


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


def write_records(
    job: Job, building: Path, state: State, splits: dict[str, Any], files: dict[str, str], started: float
) -> None:
    """The facts of the making, then the manifest, which is the last file written.

    `files` are the shards' files with the SHA-256s of their whole content.
    """
    tokenizer_files = sorted((building / workplace.TOKENIZER_FOLDER).glob("*"))
    files |= {path.relative_to(building).as_posix(): sha256_file(path) for path in tokenizer_files}
    provenance = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "host": platform.node(),
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__}
        | versions(job.tokenizer.name),
        "identity": job.identity(),
        "corpus_fingerprint": job.fingerprint(),
        "corpus_path": configured_path(job.config.corpus),
        "documents": {
            "empty": state.empty_documents,
            "truncated": state.truncated_documents,
            "skipped_windows": state.skipped_windows,
            "padding": state.padding,
            "bad": state.bad_documents,
            "bad_places": state.places,
        },
        "files_sha256": files,
        "source_files": [asdict(file) for file in job.files],
    }
    write_json(building / workplace.PROVENANCE, provenance)
    raw = {
        "format_version": next(v for v, dtype in DTYPES.items() if dtype == job.tokenizer.dtype),
        "storage": storage_section(job.storage, job.row_width),
        "tokenizer": job.tokenizer.manifest_section(),
        "preparation": preparation_settings(job.config) | {"corpus_sha256": state.corpus_chain},
        "splits": splits,
    }
    write_manifest(building, raw)
