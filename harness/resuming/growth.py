"""A prepared set that grew: the same shards first, and new ones after them.

`prepare.append=true` makes such a set under the same name; its digest is another one. A run that reads in
file order can go on with it (`resume_accept=[data]`): all that it read is where it was.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.files import write_json
from harness.storage.manifest import manifest_digest

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint
    from harness.resuming.lineage import Segment
    from harness.storage.manifest import Manifest

COPY = "manifest.json"


def recorded_manifest(run_dir: Path, metadata_sha256: str) -> dict[str, Any]:
    """The manifest with this digest among a run's copies; {} where there is none that can be read."""
    for path in sorted(run_dir.glob("manifest*.json")):
        try:
            raw = json.loads(path.read_text())
            if manifest_digest(raw) == metadata_sha256:
                return dict(raw)
        except (OSError, ValueError, TypeError):
            continue
    return {}


def keep_manifests(run_dir: Path, segments: list[Segment]) -> None:
    """Copy the manifests of what a branch inherited, so that its directory alone says what its steps read."""
    for segment in segments:
        digest = segment.metadata_sha256
        if not recorded_manifest(run_dir, digest) and (raw := recorded_manifest(Path(segment.path), digest)):
            write_json(run_dir / kept_name(digest), raw)


def kept_name(metadata_sha256: str) -> str:
    """What a run's copy of a manifest is called once another one has taken its place."""
    return f"manifest-{metadata_sha256[:16]}.json"


def added_shards(old: dict[str, Any], new: dict[str, Any]) -> int | None:
    """How many train shards `new` has after those of `old`; None where it is not `old` and more.

    Tokenizer, storage and each old shard with its hash must be the same, of both splits; the validation split
    may have grown too.
    """
    try:
        if any(old[key] != new[key] for key in ("format_version", "storage", "tokenizer")):
            return None
        before, after = _shards(old), _shards(new)
        if not all(after[name][: len(shards)] == shards for name, shards in before.items()):
            return None
        if not all(shard.get("sha256") for shards in before.values() for shard in shards):
            return None  # nothing says that the old tokens are still there
        name = "train" if "train" in before else "train.pos"
        return len(after[name]) - len(before[name]) or None
    except (KeyError, TypeError, AttributeError):
        return None


def _shards(raw: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The entries of each split's shards, of a contrastive split's as those of two."""
    result: dict[str, list[dict[str, Any]]] = {}
    for name, split in raw["splits"].items():
        sides = {name: split} if "shards" in split else {f"{name}.{side}": split[side] for side in split}
        result |= {key: side["shards"] for key, side in sides.items()}
    return result


def taken_over(saved: Checkpoint, manifest: Manifest) -> Checkpoint:
    """The checkpoint with the cursor and the record of one that was saved on the set as it is now."""
    old = {"step": saved.step, "metadata_sha256": saved.trainer["metadata_sha256"]}
    trainer = saved.trainer | {"data_changes": [*saved.trainer.get("data_changes", []), old]}
    loader = saved.loader | {"metadata_sha256": manifest.metadata_sha256}
    return dataclasses.replace(saved, trainer=trainer, loader=loader)


def in_words(added: int) -> str:
    return f"same prefix, {added} shard{'s' if added > 1 else ''} added"


def refusal(loader: str | None, added: int) -> str:
    """Why a grown set is not simply read on, and what can be done.

    `loader`: the one whose order is not the file's, None where there is none.
    """
    shards = in_words(added)
    if loader is None:
        return f"{shards}: resume_accept=[data] goes on into them"
    return (
        f"{shards}: the order of loader={loader} depends on the number of samples, so the same position "
        "would be another place. Only a loader that reads in file order can go on; start a new run with "
        "these weights instead: init_from=RUN"
    )
