"""A set that is there already: is it the one that was asked for?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.prepare.corpora import SourceFile
from harness.prepare.job import Job, fingerprint_of
from harness.prepare.old_set import read_old_set
from harness.prepare.seal import storage_section
from harness.prepare.settings import SHARDING, preparation_settings
from harness.prepare.summary import SplitSummary, Summary
from harness.prepare.tokenizers import tokenizer_files
from harness.prepare.workplace import provenance
from harness.storage import open_split
from harness.storage.manifest import SPLITS, load_manifest

# What a manifest that does not say it means.
_UNSAID = {"layout": "stream", "compression": "none"}


def accept_existing(job: Job, corpus_sha256: Callable[[], str]) -> Summary:
    """The summary of the set that is there if it is the wanted one; else `UserError` names each difference.

    Files with the recorded fingerprint are taken as unchanged; others are read by `corpus_sha256`, because a
    copy of the same text is the same corpus.
    """
    directory = job.directory
    old = read_old_set(directory)
    different = differences(old.raw, job)
    if not different and not _same_files(job.files, old.provenance):
        there, wanted = old.raw.get("preparation", {}).get("corpus_sha256"), corpus_sha256()
        if there != wanted:
            different = [f"preparation.corpus_sha256: there {there}, asked for {wanted}"]
    if different:
        lines = "\n".join(f"  {line}" for line in different)
        raise UserError(
            f"{directory} already holds another set:\n{lines}\nIt is never replaced unasked: checkpoints "
            "name its digest. Use another data.path= (or data.root=), or replace it with "
            "prepare.overwrite=true"
        )
    _check_whole(directory, old.raw["tokenizer"])
    return summary_of(directory, already_there=True)


def differences(raw: dict[str, Any], job: Job) -> list[str]:
    """Where a manifest differs from the job in its settings, its tokenizer or its storage: both values."""
    settings = {"sharding": SHARDING} | preparation_settings(job.config)
    preparation = {"sharding": SHARDING} | (raw.get("preparation") or {})
    if settings["sharding"] != preparation["sharding"]:
        settings.pop("shard_tokens", None)  # it belongs to one of the two
    pairs = {f"preparation.{key}": (preparation.get(key), value) for key, value in settings.items()}
    wanted = job.tokenizer.manifest_section() | {"name": job.config.tokenizer.name}
    for key, value in wanted.items():
        pairs[f"tokenizer.{key}"] = raw["tokenizer"].get(key), value
    for key, value in storage_section(job.storage, job.row_width).items():
        found = raw["storage"].get(key, _UNSAID.get(key))
        if found is not None and key != "dtype":  # it follows from the vocabulary, and has two names
            pairs[f"storage.{key}"] = found, value
    return [f"{key}: there {old}, asked for {new}" for key, (old, new) in pairs.items() if old != new]


def _same_files(files: list[SourceFile], made: dict[str, Any]) -> bool:
    """Whether the corpus is the recorded one; of a set that has grown in another order too."""
    if made.get("corpus_fingerprint") == fingerprint_of(files):
        return True
    recorded = made.get("source_files")
    if not made.get("grown_from") or not isinstance(recorded, list):
        return False
    known = [[file.get(key) for key in ("name", "size", "mtime_ns")] for file in recorded]
    return sorted(map(str, known)) == sorted(str(file.fingerprint()) for file in files)


def _check_whole(directory: Path, tokenizer: dict[str, Any]) -> None:
    """Every shard is there with its header and size, and the tokenizer's files are the recorded ones."""
    try:
        for split in SPLITS:
            open_split(directory, split)
        tokenizer_files(directory, tokenizer)
    except UserError as error:
        raise UserError(f"{directory} is the set that was asked for, but it is not whole: {error}") from error


def summary_of(directory: Path, *, already_there: bool, seconds: float = 0.0) -> Summary:
    """What the manifest and the provenance of a set say."""
    manifest = load_manifest(directory)
    splits = {
        name: SplitSummary(
            documents=split.documents or 0,
            tokens=split.total_tokens,
            bytes=split.bytes or 0,
            shards=len(split.shards),
            rows=split.total_rows,
            row_width=split.row_width,
        )
        for name, split in manifest.splits.items()
    }
    documents = provenance(directory).get("documents", {})
    of_texts = "pair_fields" in manifest.preparation  # then no document is cut, but pairs are
    padding = sum(split.cells - split.tokens for split in splits.values())
    if manifest.storage.layout != "rows":  # prompts of pairs are no targets either
        padding = documents.get("padding", 0)
    return Summary(
        directory=directory,
        digest=manifest.metadata_sha256,
        splits=splits,
        truncated_documents=0 if of_texts else documents.get("truncated", 0),
        truncated_pairs=documents.get("truncated", 0) if of_texts else 0,
        empty_documents=documents.get("empty", 0),
        skipped_windows=documents.get("skipped_windows", 0),
        padding=padding,
        bad_documents=documents.get("bad", 0),
        places=documents.get("bad_places", []),
        seconds=seconds,
        already_there=already_there,
    )
