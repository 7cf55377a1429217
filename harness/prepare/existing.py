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


def accept_existing(
    directory: Path,
    settings: dict[str, Any],
    tokenizer: dict[str, Any],
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
    if wanted == there and provenance(directory).get("corpus_fingerprint") != fingerprint:
        wanted["preparation.corpus_sha256"] = corpus_sha256()
        there["preparation.corpus_sha256"] = preparation.get("corpus_sha256")
    different = [key for key in wanted if wanted[key] != there[key]]
    if not different:
        _check_whole(directory, raw["tokenizer"])
        return summary_of(directory, already_there=True)
    lines = "\n".join(f"  {key}: there {there[key]}, asked for {wanted[key]}" for key in different)
    raise UserError(
        f"{directory} already holds another set:\n{lines}\nIt is never replaced unasked: checkpoints name "
        "its digest. Use another data.path= (or data.root=), or replace it with prepare.overwrite=true"
    )


def _check_whole(directory: Path, tokenizer: dict[str, Any]) -> None:
    """Every shard is there with its header and size, and the tokenizer's files are the recorded ones."""
    try:
        for split in SPLITS:
            open_store(directory, split)
        tokenizer_files(directory, tokenizer)
    except UserError as error:
        raise UserError(f"{directory} is the set that was asked for, but it is not whole: {error}") from error


def summary_of(directory: Path, *, already_there: bool, seconds: float = 0.0) -> Summary:
    """What the manifest and the provenance of a set say."""
    manifest = load_manifest(directory)
    splits = {
        name: SplitSummary(split.documents or 0, split.total_tokens, split.bytes or 0, len(split.shards))
        for name, split in manifest.splits.items()
    }
    documents = provenance(directory).get("documents", {})
    return Summary(
        directory=directory,
        digest=manifest.metadata_sha256,
        splits=splits,
        truncated_documents=documents.get("truncated", 0),
        empty_documents=documents.get("empty", 0),
        bad_documents=documents.get("bad", 0),
        places=documents.get("bad_places", []),
        seconds=seconds,
        already_there=already_there,
    )
