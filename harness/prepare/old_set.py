"""A whole set that is there, as far as another one takes over its shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.files import sha256_file
from harness.prepare.workplace import provenance
from harness.storage.manifest import load_manifest


@dataclass(frozen=True)
class OldSet:
    """`raw` is the parsed manifest, `provenance` the facts of its making (empty where none can be read)."""

    folder: Path
    digest: str
    raw: dict[str, Any]
    provenance: dict[str, Any]

    @cached_property
    def shards(self) -> dict[str, dict[str, Any]]:
        """Every shard's entry in the manifest by its name, as `train_00000`."""
        splits = list(self.raw["splits"].values())
        if self.raw["storage"].get("layout") == "contrastive":
            splits = [side for split in splits for side in split.values()]
        return {shard["file"].split(".")[0]: shard for split in splits for shard in split["shards"]}

    @property
    def files(self) -> dict[str, str]:
        """The SHA-256s of the files' whole content, by name, as they were recorded."""
        return self.provenance.get("files_sha256", {})

    def files_of(self, shard: str) -> list[str]:
        """The files that hold a shard."""
        entry = self.shards[shard]
        return [entry[key] for key in ("file", "mask_file") if key in entry]

    def changed(self, names: Iterable[str]) -> str | None:
        """The first of these files that is not what was recorded. Reads them."""
        for name in names:
            path = self.folder / name
            if not path.is_file() or sha256_file(path) != self.files.get(name):
                return name
        return None


def read_old_set(folder: Path) -> OldSet:
    """The set in `folder`; `UserError` where its manifest is damaged."""
    manifest = load_manifest(folder)
    return OldSet(folder, manifest.metadata_sha256, manifest.raw, provenance(folder))
