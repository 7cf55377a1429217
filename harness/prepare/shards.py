"""Writes one split as shards, and can go on after a kill, whatever the storage.

Tokens are appended to an `.npy` file, so that an interrupted preparation goes on in the middle of a shard.
A full shard is sealed: left as it is in npy storage, else written anew in the set's own format.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.files import link_or_copy, sha256_file
from harness.prepare.documents import Part
from harness.prepare.growing import GrowingArray
from harness.prepare.old_set import OldSet
from harness.prepare.seal import file_names, write_row_shard, write_stream_shard
from harness.storage.manifest_schema import StorageInfo

MAX_SHARD_INDEX = 99_999


class SplitWriter:
    """What the writers of streams and of rows share: closed shards, the open one, and the journal.

    `folder` is one that nothing reads before it is complete; `prefix` begins the files' names. `state()`
    after `sync()` is what a later process needs to go on: `restore` cuts what was written after that state.
    Once the state is kept, `release` removes what only an earlier state needed.
    """

    def __init__(self, folder: Path, prefix: str, storage: StorageInfo, row_width: int | None = None) -> None:
        self.folder, self.prefix, self.storage, self.row_width = folder, prefix, storage, row_width
        self.shards: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}  # the closed shards' files and the SHA-256s of their whole content
        self.tokens = self.documents = self.bytes = 0
        self._tokens = self._documents = 0  # of the open shard
        self._source_bytes = 0  # of the sources that have ended
        self._open = self._arrays()
        self._spent: list[Path] = []

    def sync(self) -> None:
        """Make everything written so far durable."""
        for array in self._open:
            array.sync()

    def state(self) -> dict[str, Any]:
        return {
            "shards": list(self.shards),
            "files": dict(self.files),
            "bytes": self.bytes,
            "source_bytes": self._source_bytes,
            "partial_items": self._open[0].length,
            "partial_tokens": self._tokens,
            "partial_documents": self._documents,
        }

    def closed_state(self, split: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
        """The state of a writer that has written the shards of `split`, a manifest's entry, and no more.

        `files` are the SHA-256s of a set's files.
        """
        names = [shard[key] for shard in split["shards"] for key in ("file", "mask_file") if key in shard]
        text_bytes = split.get("bytes", 0)
        return {
            "shards": split["shards"],
            "files": {name: files[name] for name in names},
            "bytes": text_bytes,
            "source_bytes": text_bytes,
            "partial_items": 0,
            "partial_tokens": 0,
            "partial_documents": 0,
        }

    def can_restore(self, state: dict[str, Any]) -> bool:
        """Whether the files on disk hold what `state` says: closed shards by hash, the open one by size."""
        paths = {self.folder / name: sha256 for name, sha256 in state["files"].items()}
        if not all(path.is_file() and sha256_file(path) == sha256 for path, sha256 in paths.items()):
            return False
        items = state["partial_items"]
        return not items or all(array.holds(items) for array in self._arrays(len(state["shards"])))

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the open shard is cut to its length there, later files are removed."""
        self.shards, self.files, self.bytes = list(state["shards"]), dict(state["files"]), state["bytes"]
        self.tokens = sum(shard["tokens"] for shard in self.shards)
        self.documents = sum(shard.get("documents", 0) for shard in self.shards)
        self._source_bytes = state["source_bytes"]
        self._tokens = self._documents = 0
        self._count(state["partial_tokens"], state["partial_documents"])
        self._open = self._arrays()
        kept = set(self.files) | ({a.path.name for a in self._open} if state["partial_items"] else set())
        for path in self.folder.iterdir():
            if path.name not in kept and re.match(rf"{self.prefix}_\d", path.name):
                path.unlink()
        if state["partial_items"]:
            for array in self._open:
                array.restore(state["partial_items"])

    def close_shard(self) -> None:
        """End the open shard; does nothing to an empty one."""
        if not self._open[0].length:
            return
        digests = [array.close(durable=self.storage.format == "npy") for array in self._open]
        hashes = dict(zip(("sha256", "mask_sha256"), digests, strict=False))
        names = self._seal(hashes)
        counts = {"tokens": self._tokens, "documents": self._documents}
        if self.row_width is not None:
            counts = {"rows": self._open[0].length} | counts
        self.shards.append(names | counts | hashes)
        self.files |= {name: sha256_file(self.folder / name) for name in names.values()}
        self._spent += [array.path for array in self._open if array.path.name not in names.values()]
        self._tokens = self._documents = 0
        self._open = self._arrays()

    def end_source(self) -> dict[str, Any]:
        """Close the shard of a source file that ends here; its shard's name, if it has one, and its bytes."""
        before = len(self.shards)
        self.close_shard()
        text_bytes, self._source_bytes = self.bytes - self._source_bytes, self.bytes
        return {"shards": self._stems(before), "bytes": text_bytes}

    def adopt(self, source: dict[str, Any], old: OldSet) -> dict[str, Any]:
        """Take over what `end_source` said of a source of another set; what it would say of it here."""
        before = len(self.shards)
        for stem in source["shards"]:
            self._check_index()
            entry, names = old.shards[stem], file_names(self._stem(), self.storage)
            for key, name in names.items():
                link_or_copy(old.folder / entry[key], self.folder / name)
                self.files[name] = old.files[entry[key]]
            self.shards.append(entry | names)
            self.tokens += entry["tokens"]
            self.documents += entry.get("documents", 0)
            self._open = self._arrays()
        self.bytes += source["bytes"]
        self._source_bytes = self.bytes
        return {"shards": self._stems(before), "bytes": source["bytes"]}

    def finish(self) -> dict[str, Any]:
        """Close the last shard; the manifest's entry of this split."""
        self.close_shard()
        return {
            "total_tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self.shards,
        }

    def release(self) -> None:
        """Remove the arrays that were written anew in the set's own format."""
        while self._spent:
            self._spent.pop().unlink()

    def abandon(self) -> None:
        """Close the files after a failure; what was synced stays."""
        for array in self._open:
            array.abandon()

    def _arrays(self, index: int | None = None) -> list[GrowingArray]:
        """What the shard of this index, or the next one, grows in."""
        stem, dtype = self._stem(index), self.storage.dtype
        if self.row_width is None:
            return [GrowingArray(self.folder / f"{stem}.npy", dtype)]
        item = (self.row_width,)
        return [
            GrowingArray(self.folder / f"{stem}.npy", dtype, item),
            GrowingArray(self.folder / f"{stem}.mask.npy", np.dtype(np.bool_), item),
        ]

    def _stem(self, index: int | None = None) -> str:
        return f"{self.prefix}_{len(self.shards) if index is None else index:05d}"

    def _stems(self, first: int) -> list[str]:
        """The names of the closed shards from number `first` on, which are the same in every storage."""
        return [self._stem(index) for index in range(first, len(self.shards))]

    def _seal(self, hashes: dict[str, str]) -> dict[str, str]:
        """Write the shard in the set's own format, if it is not npy; the names of its files."""
        names = file_names(self._stem(), self.storage)
        if self.storage.format == "npy":
            return names
        arrays = [np.load(array.path, mmap_mode="r") for array in self._open]
        if self.row_width is None:
            made = write_stream_shard(self.folder, self._stem(), arrays[0], self.storage, self._documents)
        else:
            made = write_row_shard(self.folder, self._stem(), arrays[0], arrays[1], self.storage)
        for key, sha256 in hashes.items():
            if made[key] != sha256:
                raise UserError(
                    f"{self._open[0].path} was written with the {key} {sha256} and read back with {made[key]}"
                    ": the disk does not keep what is written. Check it, then run the same command again"
                )
        return names

    def _count(self, tokens: int, documents: int) -> None:
        """Count what was added to the open shard."""
        self.tokens += tokens
        self.documents += documents
        self._tokens += tokens
        self._documents += documents

    def _check_index(self) -> None:
        if len(self.shards) > MAX_SHARD_INDEX:
            raise UserError(
                f"the {self.prefix} split needs more than {MAX_SHARD_INDEX + 1:,} shards, and names have "
                "five digits: use a larger prepare.shard_tokens, or prepare.sharding=tokens"
            )


class StreamWriter(SplitWriter):
    """A stream of tokens in shards of `shard_tokens`; null for shards that only `close_shard` ends."""

    def __init__(self, folder: Path, prefix: str, storage: StorageInfo, shard_tokens: int | None) -> None:
        super().__init__(folder, prefix, storage)
        self.shard_tokens = shard_tokens

    def add(self, part: Part) -> None:
        """Append whole documents, or a piece of one."""
        self.bytes += part.bytes
        start = 0
        while start < len(part.tokens):
            stop = len(part.tokens)
            if self.shard_tokens is not None:
                stop = min(stop, start + self.shard_tokens - self._tokens)
            self._check_index()
            self._open[0].append(part.tokens[start:stop])
            first, last = np.searchsorted(part.ends, (start, stop), side="right")
            self._count(stop - start, int(last - first))
            if self._tokens == self.shard_tokens:
                self.close_shard()
            start = stop
