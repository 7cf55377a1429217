"""A finished shard into the files of its storage: the one conversion, also between storages.

Each function writes files that are whole under their names or not there, and returns the shard's part of a
manifest's entry: the files' names and the hashes of what was written.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.files import replacing
from harness.storage.manifest_schema import FORMATS, SIDES, StorageInfo

HEADER_BYTES = 128
_BLOCK = 1 << 21  # elements copied at a time


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The 128 bytes before an array's data: the same with every NumPy version."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}"
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def storage_section(storage: StorageInfo, row_width: int | None) -> dict[str, Any]:
    """The `storage` section of the manifest of a set whose rows, if it holds any, are `row_width` wide."""
    section: dict[str, Any] = {
        "format": storage.format,
        "dtype": storage.dtype.name,
        "layout": storage.layout,
    }
    if row_width is not None:
        section["row_width"] = (
            dict.fromkeys(SIDES, row_width) if storage.layout == "contrastive" else row_width
        )
    if storage.chunk_tokens is not None:
        section["chunk_tokens"] = storage.chunk_tokens
    if storage.format == "hdf5":
        section["compression"] = storage.compression
    return section


def file_names(stem: str, storage: StorageInfo) -> dict[str, str]:
    """The files of the shard `stem` (`train_00000`), by their keys in a manifest's entry."""
    names = {"file": f"{stem}.{FORMATS[storage.format][1]}"}
    if storage.format == "npy" and storage.layout != "stream":
        names["mask_file"] = f"{stem}.mask.npy"
    return names


def write_stream_shard(
    folder: Path, stem: str, tokens: np.ndarray, storage: StorageInfo, documents: int | None = None
) -> dict[str, str]:
    """Write `tokens` `(n,)`, also a mapping larger than memory, as the shard `stem` in `folder`.

    Raises `UserError` where a file of that name exists.
    """
    names = file_names(stem, storage)
    path = folder / names["file"]
    if storage.format == "npy":
        return names | {"sha256": _write_npy(path, tokens, storage.dtype)}
    from harness.prepare.hdf5_writer import CHUNK_TOKENS, write_hdf5_shard

    sha256 = write_hdf5_shard(
        path,
        tokens,
        documents=documents,
        dtype=storage.dtype,
        chunk_tokens=min(storage.chunk_tokens or CHUNK_TOKENS, max(1, tokens.size)),  # no empty space
        compression=storage.compression,
    )
    return names | {"sha256": sha256}


def write_row_shard(
    folder: Path, stem: str, rows: np.ndarray, mask: np.ndarray, storage: StorageInfo
) -> dict[str, str]:
    """Write `rows` and their `mask`, both `(n, W)`, also mappings, as the shard `stem` in `folder`.

    Raises `UserError` where a file of that name exists.
    """
    names = file_names(stem, storage)
    if storage.format == "npy":
        sha256 = _write_npy(folder / names["file"], rows, storage.dtype)
        mask_sha256 = _write_npy(folder / names["mask_file"], mask, np.dtype(np.bool_))
    else:
        from harness.prepare.hdf5_writer import write_hdf5_rows

        sha256, mask_sha256 = write_hdf5_rows(
            folder / names["file"], rows, mask, compression=storage.compression
        )
    return names | {"sha256": sha256, "mask_sha256": mask_sha256}


def _write_npy(path: Path, array: np.ndarray, dtype: np.dtype[Any]) -> str:
    digest = hashlib.sha256()
    step = max(1, _BLOCK // max(1, array[:1].size))
    if os.path.lexists(path):
        raise UserError(
            f"{path} exists, and a shard is never written over: a run may be reading it. Remove it first, or "
            "write to another folder"
        )
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(npy_header(dtype, array.shape))
        for start in range(0, len(array), step):
            data = np.ascontiguousarray(array[start : start + step], dtype).data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()
