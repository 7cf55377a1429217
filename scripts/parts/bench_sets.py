"""Temporary sets for the loader benchmark: the same tokens in every storage, as a stream, rows and pairs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from harness.prepare.hdf5_writer import CHUNK_TOKENS, write_hdf5_rows, write_hdf5_shard
from harness.storage.manifest import write_manifest

SHARDS = 4
VOCAB_SIZE = 50_257
STORAGES = ("npy", "hdf5", "hdf5 gzip")
LAYOUTS = ("stream", "rows", "contrastive")

# The folder of each (storage, layout).
Folders = dict[tuple[str, str], Path]

# (the shard's path without its extension, its tokens or rows, the mask) -> what the manifest says of it
_Writer = Callable[[Path, np.ndarray, np.ndarray], dict[str, Any]]


def random_tokens(count: int) -> np.ndarray:
    """`count` ids of a vocabulary of GPT-2's size, frequent ones as much more often as in text."""
    return ((np.random.default_rng(0).zipf(1.2, count) - 1) % VOCAB_SIZE).astype(np.uint16)


def write_sets(
    directory: Path,
    tokens: np.ndarray,
    row_width: int,
    storages: Iterable[str] = STORAGES,
    layouts: Iterable[str] = LAYOUTS,
) -> Folders:
    """Write `tokens` in each of the storages and layouts; the sets' folders by (storage, layout).

    Rows are `row_width` tokens one after another, the last tenth of every row is padding. Pairs are the first
    half of the rows against the second. `train.bin` in the folder of `("bin", "stream")` is the plain tokens.
    """
    rows = tokens[: len(tokens) // row_width * row_width].reshape(-1, row_width)
    mask = np.broadcast_to(np.arange(row_width) < row_width - row_width // 10, rows.shape)
    tokens.tofile(directory / "train.bin")
    half = len(rows) // 2
    sides = {"pos": rows[:half], "neg": rows[half : 2 * half]}
    folders = {("bin", "stream"): directory}
    for storage, layout in itertools.product(storages, layouts):
        folder = directory / f"{storage}-{layout}".replace(" ", "-")
        folder.mkdir()
        folders[storage, layout] = folder
        stream, write_rows = _WRITERS[storage]
        width: Any = None
        if layout == "stream":
            train: Any = _split(folder / "train", tokens, mask, stream)
            val: Any = _NOTHING
        elif layout == "rows":
            width = row_width
            train, val = _split(folder / "train", rows, mask, write_rows), _NOTHING
        else:
            width = dict.fromkeys(sides, row_width)
            train = {
                side: _split(folder / f"train_{side}", part, mask, write_rows) for side, part in sides.items()
            }
            val = dict.fromkeys(sides, _NOTHING)
        _write_manifest(folder, storage, layout, width, {"train": train, "val": val})
    return folders


_NOTHING = {"total_tokens": 0, "shards": []}


def _split(prefix: Path, tokens: np.ndarray, mask: np.ndarray, write: _Writer) -> dict[str, Any]:
    parts = np.array_split(tokens, SHARDS)
    shards = [
        write(prefix.with_name(f"{prefix.name}_{index:05d}"), part, mask[: len(part)])
        for index, part in enumerate(parts)
    ]
    return {"total_tokens": sum(shard["tokens"] for shard in shards), "shards": shards}


def _write_manifest(folder: Path, storage: str, layout: str, width: Any, splits: dict[str, Any]) -> None:
    name, _, compression = storage.partition(" ")
    section: dict[str, Any] = {"format": name, "dtype": "uint16", "layout": layout}
    if name == "hdf5":
        section |= {"chunk_tokens": CHUNK_TOKENS, "compression": compression or "none"}
    if width is not None:
        section["row_width"] = width
    write_manifest(
        folder,
        {
            "format_version": 2,
            "storage": section,
            "tokenizer": {"name": "random", "vocab_size": VOCAB_SIZE},
            "splits": splits,
        },
    )


def _npy_stream(path: Path, tokens: np.ndarray, _: np.ndarray) -> dict[str, Any]:
    file = path.with_suffix(".npy")
    np.save(file, tokens)
    return {"file": file.name, "tokens": len(tokens), "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}


def _npy_rows(path: Path, rows: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
    file, mask_file = path.with_suffix(".npy"), path.with_suffix(".mask.npy")
    np.save(file, rows)
    np.save(mask_file, mask)
    return {
        "file": file.name,
        "mask_file": mask_file.name,
        "rows": len(rows),
        "tokens": int(np.count_nonzero(mask)),
        "sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
        "mask_sha256": hashlib.sha256(mask.tobytes()).hexdigest(),
    }


def _hdf5_stream(compression: str) -> _Writer:
    def write(path: Path, tokens: np.ndarray, _: np.ndarray) -> dict[str, Any]:
        file = path.with_suffix(".h5")
        digest = write_hdf5_shard(file, tokens, compression=compression)
        return {"file": file.name, "tokens": len(tokens), "sha256": digest}

    return write


def _hdf5_rows(compression: str) -> _Writer:
    def write(path: Path, rows: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
        file = path.with_suffix(".h5")
        digest, mask_digest = write_hdf5_rows(file, rows, mask, compression=compression)
        return {
            "file": file.name,
            "rows": len(rows),
            "tokens": int(np.count_nonzero(mask)),
            "sha256": digest,
            "mask_sha256": mask_digest,
        }

    return write


_WRITERS: dict[str, tuple[_Writer, _Writer]] = {
    "npy": (_npy_stream, _npy_rows),
    "hdf5": (_hdf5_stream("none"), _hdf5_rows("none")),
    "hdf5 gzip": (_hdf5_stream("gzip"), _hdf5_rows("gzip")),
}
