"""Writes one split as `.npy` shards of a set number of tokens, and can go on after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.errors import UserError

HEADER_BYTES = 128
MAX_SHARD_INDEX = 99_999
_BLOCK = 1 << 20


def npy_header(dtype: np.dtype, tokens: int) -> bytes:
    """The 128 bytes before the data of a one-dimensional array: the same with every NumPy version."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({tokens},), }}"
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


class ShardWriter:
    """Appends tokens to `SPLIT_NNNNN.npy` in `folder`; a full shard is closed and the next begun.

    The folder is one that nothing reads before it is complete. `state()` after `sync()` is what a
    later process needs to go on; `restore` cuts what was written after that state.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.bytes = 0
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._tokens = 0
        self._documents = 0

    @property
    def tokens(self) -> int:
        return sum(int(shard["tokens"]) for shard in self.shards) + self._tokens

    @property
    def documents(self) -> int:
        return sum(int(shard["documents"]) for shard in self.shards) + self._documents

    def add(self, tokens: np.ndarray, ends: np.ndarray, text_bytes: int) -> None:
        """Append `tokens` `(n,)` of the set's dtype; `ends` are the positions after each boundary."""
        self.bytes += text_bytes
        start = 0
        while start < len(tokens):
            stop = min(len(tokens), start + self.shard_tokens - self._tokens)
            self._write(tokens[start:stop])
            first, last = np.searchsorted(ends, (start, stop), side="right")
            self._documents += int(last - first)
            if self._tokens == self.shard_tokens:
                self._close_shard()
            start = stop

    def sync(self) -> None:
        """Make everything written so far durable."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def state(self) -> dict[str, Any]:
        return {
            "shards": list(self.shards),
            "bytes": self.bytes,
            "partial_tokens": self._tokens,
            "partial_documents": self._documents,
        }

    def can_restore(self, state: dict[str, Any]) -> bool:
        """Whether the files on disk hold what `state` says: full shards by hash, the open one by size."""
        if not all(self._is_whole(shard) for shard in state["shards"]):
            return False
        path = self.folder / f"{self.split}_{len(state['shards']):05d}.npy"
        size = HEADER_BYTES + state["partial_tokens"] * self.dtype.itemsize
        return not state["partial_tokens"] or (path.is_file() and path.stat().st_size >= size)

    def _is_whole(self, shard: dict[str, Any]) -> bool:
        path = self.folder / shard["file"]
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):
                digest.update(block)
        return header == npy_header(self.dtype, shard["tokens"]) and digest.hexdigest() == shard["sha256"]

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the unfinished shard is cut to its length there, later ones are overwritten."""
        self.shards, self.bytes = list(state["shards"]), state["bytes"]
        self._tokens, self._documents = state["partial_tokens"], state["partial_documents"]
        if self._tokens:
            self._file = open(self._path(), "r+b")  # noqa: SIM115
            self._file.truncate(HEADER_BYTES + self._tokens * self.dtype.itemsize)
            self._file.seek(HEADER_BYTES)
            while block := self._file.read(_BLOCK):
                self._digest.update(block)

    def finish(self) -> dict[str, Any]:
        """Close the last shard; the manifest's entry of this split."""
        if self._tokens:
            self._close_shard()
        return {
            "total_tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self.shards,
        }

    def abandon(self) -> None:
        """Close the file after a failure; what was synced stays."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def _path(self) -> Path:
        return self.folder / f"{self.split}_{len(self.shards):05d}.npy"

    def _write(self, tokens: np.ndarray) -> None:
        if self._file is None:
            if len(self.shards) > MAX_SHARD_INDEX:
                raise UserError(
                    f"the {self.split} split needs more than {MAX_SHARD_INDEX + 1:,} shards of "
                    f"{self.shard_tokens:,} tokens, and names have five digits: use a larger "
                    "prepare.shard_tokens"
                )
            self._file = open(self._path(), "wb")  # noqa: SIM115
            self._file.write(bytes(HEADER_BYTES))
        data = np.ascontiguousarray(tokens).data
        self._file.write(data)
        self._digest.update(data)
        self._tokens += len(tokens)

    def _close_shard(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.write(npy_header(self.dtype, self._tokens))
        self.sync()
        self._file.close()
        self._file = None
        self.shards.append(
            {
                "file": self._path().name,
                "tokens": self._tokens,
                "documents": self._documents,
                "sha256": self._digest.hexdigest(),
            }
        )
        self._digest = hashlib.sha256()
        self._tokens = self._documents = 0
