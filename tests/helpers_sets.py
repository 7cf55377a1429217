"""Tiny prepared sets, written by hand so that tests do not depend on the preparation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from harness.prepare.hdf5_writer import write_hdf5_shard
from harness.storage.manifest import FORMATS, write_manifest


def write_set(directory: Path | str, splits: dict[str, list[list[int]]], **manifest_overrides: Any) -> Path:
    """Write a valid set and return its folder; `splits` maps train and val to their shards' tokens.

    A split that is not given is empty. A dict in `manifest_overrides` is merged into the manifest's own
    (`tokenizer={"vocab_size": 100}`), anything else replaces it. `storage={"format": "hdf5"}` writes an hdf5
    set, with its `chunk_tokens` and `compression` where they are given.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    raw: dict[str, Any] = {
        "format_version": 2,
        "storage": {"format": "npy", "dtype": "uint16", "layout": "stream"},
        "tokenizer": {"name": "byte", "vocab_size": 257, "boundary_token_id": 0, "sha256": None},
        "preparation": {"corpus": "test"},
    }
    for key, value in manifest_overrides.items():
        raw[key] = raw[key] | value if isinstance(value, dict) and key in raw else value
    raw["splits"] = {
        name: _write_split(directory, name, splits.get(name, []), raw["storage"]) for name in ("train", "val")
    }
    write_manifest(directory, raw)
    return directory


def _write_split(
    directory: Path, name: str, shards: list[list[int]], storage: dict[str, Any]
) -> dict[str, Any]:
    hdf5 = {key: storage[key] for key in ("chunk_tokens", "compression") if key in storage}
    entries = []
    for index, tokens in enumerate(shards):
        array = np.array(tokens, dtype=np.dtype(storage["dtype"]).newbyteorder("<"))
        file = f"{name}_{index:05d}.{FORMATS[storage['format']][1]}"
        if storage["format"] == "npy":
            np.save(directory / file, array)
        else:
            write_hdf5_shard(directory / file, array, documents=1, **hdf5)
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        entries.append({"file": file, "tokens": len(tokens), "documents": 1, "sha256": digest})
    total = sum(len(tokens) for tokens in shards)
    return {"total_tokens": total, "documents": len(shards), "bytes": total, "shards": entries}
