"""The manifest of a set that is being opened: the right kind of set, and the same one all the while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import UserError
from harness.storage.io import FileIdentity, identity_of
from harness.storage.manifest import FORMATS, SPLITS, Manifest, load_manifest


@contextmanager
def stream_manifest(
    directory: Path | str, split: str, storage_format: str, prepare_command: str | None
) -> Iterator[Manifest]:
    """The manifest of a token stream of this format; inside, its shards are checked.

    Raises `UserError` for another split, format or layout, and at the end where the manifest was replaced in
    the meantime: then the shards that were looked at may be another set's.
    """
    if split not in SPLITS:
        raise UserError(f"split={split!r} must be one of {', '.join(SPLITS)}: a set has no other")
    before = _identity(Path(directory) / FORMATS[storage_format][0])
    manifest = load_manifest(directory, prepare_command=prepare_command)
    storage = manifest.storage
    if storage.format != storage_format:
        raise UserError(
            f"{manifest.path} is a set of the format {storage.format}, expected {storage_format}: its shards "
            f"are other files. Use data={storage.format}, or harness.storage.open_store, which reads both"
        )
    if storage.layout != "stream":
        raise UserError(
            f"{manifest.path} has the layout {storage.layout!r}, expected 'stream': padded rows are no "
            "stream of tokens. Use loader=padded_rows or contrastive_rows, or set data.path to a stream"
        )
    yield manifest
    if _identity(manifest.path) != before:
        raise UserError(
            f"{manifest.path} was replaced while the set was being opened: the shards may be another set's "
            "than the digest names. Wait until the preparation has ended, then run the same command again"
        )


def _identity(path: Path) -> FileIdentity | None:
    try:
        return identity_of(os.stat(path))
    except OSError:
        return None
