"""Tiny prepared sets, written by hand so that tests do not depend on the preparation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from harness.prepare.hdf5_writer import write_hdf5_shard
from harness.prepare.seal import write_row_shard
from harness.storage.manifest import FORMATS, write_manifest
from harness.storage.manifest_schema import SIDES, SPLITS, StorageInfo

# Rows and their mask, `(n, W)` each: one shard.
RowShard = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def write_set(directory: Path | str, splits: dict[str, list[list[int]]], **manifest_overrides: Any) -> Path:
    """Write a valid set and return its folder; `splits` maps train and val to their shards' tokens.

    A split that is not given is empty. A dict in `manifest_overrides` is merged into the manifest's own
    (`tokenizer={"vocab_size": 100}`), anything else replaces it. `storage={"format": "hdf5"}` writes an hdf5
    set, with its `chunk_tokens` and `compression` where they are given.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    raw = _raw_manifest({"format": "npy", "layout": "stream"}, manifest_overrides)
    raw["splits"] = {
        name: _write_split(directory, name, splits.get(name, []), raw["storage"]) for name in ("train", "val")
    }
    write_manifest(directory, raw)
    return directory


def write_rows(directory: Path | str, splits: dict[str, list[RowShard]], **manifest_overrides: Any) -> Path:
    """Write a valid set of padded rows, or of contrastive rows where `splits` names `train.pos` and the like.

    All rows of a side have one width; a split that is not given is empty. Else as `write_set`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    widths = {name.partition(".")[2]: shards[0][0].shape[1] for name, shards in splits.items() if shards}
    pairs = "" not in widths
    layout = (
        {"layout": "contrastive", "row_width": widths}
        if pairs
        else {"layout": "rows", "row_width": widths[""]}
    )
    raw = _raw_manifest({"format": "npy", **layout}, manifest_overrides)
    storage = raw["storage"]
    info = StorageInfo(
        storage["format"],
        np.dtype(storage["dtype"]).newbyteorder("<"),
        storage["layout"],
        compression=storage.get("compression", "none"),
    )

    def split(name: str) -> dict[str, Any]:
        return _write_row_split(directory, name, splits.get(name, []), info)

    raw["splits"] = {
        name: {side: split(f"{name}.{side}") for side in SIDES} if pairs else split(name) for name in SPLITS
    }
    write_manifest(directory, raw)
    return directory


def _raw_manifest(storage: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "format_version": 2,
        "storage": {"dtype": "uint16"} | storage,
        "tokenizer": {"name": "byte", "vocab_size": 257, "boundary_token_id": 0, "sha256": None},
        "preparation": {"corpus": "test"},
    }
    for key, value in overrides.items():
        raw[key] = raw[key] | value if isinstance(value, dict) and key in raw else value
    return raw


def _write_row_split(
    directory: Path, name: str, shards: list[RowShard], storage: StorageInfo
) -> dict[str, Any]:
    entries = []
    for index, (rows, mask) in enumerate(shards):
        stem = f"{name.replace('.', '_')}_{index:05d}"
        written = write_row_shard(directory, stem, rows, mask, storage)
        entries.append({**written, "rows": len(rows), "tokens": int(mask.sum())})
    return {"total_tokens": sum(entry["tokens"] for entry in entries), "shards": entries}


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


def random_rows(count: int, width: int, *, seed: int, vocab_size: int = 257) -> RowShard:
    """A shard of rows of different lengths, padded with 0 on the right; some are full, some all padding."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, width + 1, count)
    mask = np.arange(width) < lengths[:, None]
    return np.where(mask, random.integers(1, vocab_size, (count, width)), 0).astype("<u2"), mask
