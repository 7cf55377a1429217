"""One writer a split, as the set's layout asks: of a stream, of rows, or of pairs of rows in step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.prepare.job import Job
from harness.prepare.old_set import OldSet
from harness.prepare.pairs import PairPart
from harness.prepare.rows import DocumentRowWriter, Rows, RowWriter
from harness.prepare.shards import StreamWriter
from harness.storage.manifest_schema import SIDES, SPLITS, StorageInfo


class Writer(Protocol):
    """What the pipeline asks of a split's writer; see `SplitWriter` for what each does."""

    @property
    def tokens(self) -> int: ...

    documents: int

    @property
    def files(self) -> dict[str, str]: ...
    def add(self, part: Any) -> None: ...
    def end_source(self) -> dict[str, Any]: ...
    def adopt(self, source: dict[str, Any], old: OldSet) -> dict[str, Any]: ...
    def sync(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def closed_state(self, split: dict[str, Any], files: dict[str, str]) -> dict[str, Any]: ...
    def can_restore(self, state: dict[str, Any]) -> bool: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def finish(self) -> dict[str, Any]: ...
    def release(self) -> None: ...
    def abandon(self) -> None: ...


def make_writers(job: Job, folder: Path) -> dict[str, Writer]:
    """A writer for `train` and one for `val`, which write into `folder`."""
    return {split: _make_writer(job, folder, split) for split in SPLITS}


def _make_writer(job: Job, folder: Path, split: str) -> Writer:
    storage, width = job.storage, job.row_width
    limit = None if job.by_source else job.config.prepare.shard_tokens
    if width is None:
        return StreamWriter(folder, split, storage, limit)
    if storage.layout == "contrastive":
        return PairWriter(folder, split, storage, limit, width)
    return DocumentRowWriter(folder, split, storage, limit, width, job.tokenizer.boundary_token_id)


class PairWriter:
    """The two sides of a split, row for row: shards of one index hold the same number of rows."""

    def __init__(
        self, folder: Path, split: str, storage: StorageInfo, shard_tokens: int | None, width: int
    ) -> None:
        self.documents = 0
        self._source_documents = 0  # of the sources that have ended
        self._sides = {
            side: RowWriter(folder, f"{split}_{side}", storage, shard_tokens, width) for side in SIDES
        }

    @property
    def tokens(self) -> int:
        return sum(side.tokens for side in self._sides.values())

    @property
    def files(self) -> dict[str, str]:
        return {name: sha256 for side in self._sides.values() for name, sha256 in side.files.items()}

    def add(self, part: PairPart) -> None:
        """Append a chunk's pairs."""
        self.documents += part.documents
        for pos, pos_mask, neg, neg_mask in part.blocks():
            for side, rows, mask in (("pos", pos, pos_mask), ("neg", neg, neg_mask)):
                self._sides[side].add_rows(Rows(rows, mask, np.zeros(len(rows), np.int64)))

    def end_source(self) -> dict[str, Any]:
        documents, self._source_documents = self.documents - self._source_documents, self.documents
        return {"documents": documents} | {name: side.end_source() for name, side in self._sides.items()}

    def adopt(self, source: dict[str, Any], old: OldSet) -> dict[str, Any]:
        self.documents += source["documents"]
        self._source_documents = self.documents
        sides = {name: side.adopt(source[name], old) for name, side in self._sides.items()}
        return {"documents": source["documents"]} | sides

    def sync(self) -> None:
        for side in self._sides.values():
            side.sync()

    def state(self) -> dict[str, Any]:
        counts = {"documents": self.documents, "source_documents": self._source_documents}
        return counts | {name: side.state() for name, side in self._sides.items()}

    def closed_state(self, split: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
        documents = split["pos"]["documents"]
        sides = {name: side.closed_state(split[name], files) for name, side in self._sides.items()}
        return {"documents": documents, "source_documents": documents} | sides

    def can_restore(self, state: dict[str, Any]) -> bool:
        return all(side.can_restore(state[name]) for name, side in self._sides.items())

    def restore(self, state: dict[str, Any]) -> None:
        self.documents, self._source_documents = state["documents"], state["source_documents"]
        for name, side in self._sides.items():
            side.restore(state[name])

    def finish(self) -> dict[str, Any]:
        """The two sides; neither a shard's documents are counted nor the bytes of their text."""
        sides = {name: side.finish() for name, side in self._sides.items()}
        return {
            name: {
                "total_tokens": side["total_tokens"],
                "documents": self.documents,
                "shards": [{k: v for k, v in shard.items() if k != "documents"} for shard in side["shards"]],
            }
            for name, side in sides.items()
        }

    def release(self) -> None:
        for side in self._sides.values():
            side.release()

    def abandon(self) -> None:
        for side in self._sides.values():
            side.abandon()
