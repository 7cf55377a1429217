"""The manifest of a set that is being opened: the right kind of set, and the same one all the while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import UserError
from harness.storage.io import FileIdentity, identity_of
from harness.storage.manifest import FORMATS, SPLITS, Manifest, identified_manifest

# storage.layout -> (a loader that reads it, what it holds)
_LAYOUTS = {
    "stream": ("sequential", "a stream of tokens"),
    "rows": ("padded_rows", "padded rows"),
    "contrastive": ("contrastive_rows", "pairs of padded rows"),
}


@contextmanager
def open_manifest(directory: Path | str, prepare_command: str | None) -> Iterator[Manifest]:
    """The manifest of a set; inside, its shards are checked.

    Raises `UserError` at the end where the manifest was replaced in the meantime: then the shards that were
    looked at may be another set's.
    """
    manifest, identity = identified_manifest(directory, prepare_command)
    yield manifest
    if not _is_still(manifest.path, identity):
        raise UserError(
            f"{manifest.path} was replaced while the set was being opened: the shards may be another set's "
            "than the digest names. Wait until the preparation has ended, then run the same command again"
        )


@contextmanager
def stream_manifest(
    directory: Path | str, split: str, storage_format: str, prepare_command: str | None
) -> Iterator[Manifest]:
    """As `open_manifest`, of a token stream of this format: `UserError` for another format or layout."""
    check_split(split)
    with open_manifest(directory, prepare_command) as manifest:
        storage = manifest.storage
        if storage.format != storage_format:
            raise UserError(
                f"{manifest.path} is a set of the format {storage.format}, expected {storage_format}: its "
                f"shards are other files. Use data={storage.format}, or harness.storage.open_store, which "
                "reads both"
            )
        if storage.layout != "stream":
            raise wrong_layout(manifest, "a token store", "stream")
        yield manifest


def check_split(split: str) -> None:
    """`UserError` unless it is `train` or `val`."""
    if split not in SPLITS:
        raise UserError(f"split={split!r} must be one of {', '.join(SPLITS)}: a set has no other")


def wrong_layout(manifest: Manifest, asker: str, layout: str, loader: str | None = None) -> UserError:
    """The error where `asker` reads sets of another `layout` than this; `loader` as in `prepare_words`."""
    default, words = _LAYOUTS[layout]
    found = manifest.storage.layout
    return UserError(
        f"{asker} reads {words} (storage.layout={layout}), but {manifest.path} holds {_LAYOUTS[found][1]} "
        f"(storage.layout={found}), which are other files with other samples. Point data.path at a set of "
        f"that layout, or prepare one in a folder of its own: {prepare_words(manifest, loader or default)}"
    )


def prepare_words(manifest: Manifest, loader: str) -> str:
    """The command that prepares the same text for a `loader`, its name and further overrides if need be.

    It has what the manifest knows; a corpus of files must be told its path, too.
    """
    corpus = manifest.preparation.get("corpus", "...")
    return (
        f"python scripts/prepare_data.py data={manifest.storage.format} corpus={corpus} "
        f"tokenizer={manifest.tokenizer.name} loader={loader}"
    )


def _is_still(path: Path, identity: FileIdentity) -> bool:
    """Whether the manifest at `path` is the file that was read, and the folder's only one."""
    others = [name for name, _ in FORMATS.values() if name != path.name]
    try:
        now = identity_of(os.stat(path))
    except OSError:
        return False
    return now == identity and not any(os.path.exists(path.parent / name) for name in others)
