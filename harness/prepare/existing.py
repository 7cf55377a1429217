"""A set that is there already: is it the one that was asked for?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.prepare.summary import SplitSummary, Summary
from harness.prepare.tokenizers import tokenizer_files
from harness.prepare.workplace import provenance
from harness.storage import open_store
from harness.storage.manifest import SPLITS, load_manifest

# What a manifest that does not say it means.
_UNSAID = {"layout": "stream", "compression": "none"}


def accept_existing(
    directory: Path,
    settings: dict[str, Any],
    tokenizer: dict[str, Any],
    storage: dict[str, Any],
    fingerprint: str,
    corpus_sha256: Callable[[], str],
) -> Summary:
    """The summary of the set in `directory` if it is the wanted one; else `UserError` names each difference.

    Files with the recorded fingerprint are taken as unchanged; others are read by `corpus_sha256`,
    because a copy of the same text is the same corpus.
    """
    raw = load_manifest(directory).raw
    preparation = raw.get("preparation") or {}
    wanted = {f"preparation.{key}": value for key, value in settings.items()}
    wanted |= {f"tokenizer.{key}": value for key, value in tokenizer.items()}
    there = {f"preparation.{key}": preparation.get(key) for key in settings}
    there |= {f"tokenizer.{key}": raw["tokenizer"].get(key) for key in tokenizer}
    for key, value in storage.items():
        found = raw["storage"].get(key, _UNSAID.get(key))
        if found is not None and key != "dtype":  # it follows from the vocabulary, and has two names
            wanted[f"storage.{key}"], there[f"storage.{key}"] = value, found
    if wanted == there and provenance(directory).get("corpus_fingerprint") != fingerprint:
        wanted["preparation.corpus_sha256"] = corpus_sha256()
        there["preparation.corpus_sha256"] = preparation.get("corpus_sha256")
    different = [key for key in wanted if wanted[key] != there[key]]
    if not different:
        _check_whole(directory, raw)
        return summary_of(directory, already_there=True)
    lines = "\n".join(f"  {key}: there {there[key]}, asked for {wanted[key]}" for key in different)
    raise UserError(
        f"{directory} already holds another set:\n{lines}\nIt is never replaced unasked: checkpoints name "
        "its digest. Use another data.path= (or data.root=), or replace it with prepare.overwrite=true"
    )


def _check_whole(directory: Path, raw: dict[str, Any]) -> None:
    """Every shard is there with its header and size, and the tokenizer's files are the recorded ones."""
    try:
        if raw["storage"].get("layout", "stream") == "stream":
            for split in SPLITS:
                open_store(directory, split)
        tokenizer_files(directory, raw["tokenizer"])
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
    padding = sum(split.cells - split.tokens for split in splits.values())
    if manifest.storage.layout != "rows":  # prompts of pairs are no targets either
        padding = documents.get("padding", 0)
    return Summary(
        directory=directory,
        digest=manifest.metadata_sha256,
        splits=splits,
        truncated_documents=documents.get("truncated", 0),
        empty_documents=documents.get("empty", 0),
        skipped_windows=documents.get("skipped_windows", 0),
        padding=padding,
        bad_documents=documents.get("bad", 0),
        places=documents.get("bad_places", []),
        seconds=seconds,
        already_there=already_there,
    )
