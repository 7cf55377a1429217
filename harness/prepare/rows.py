"""Documents as padded rows: every token is a target exactly once.

A row's first column is context only: the boundary before a document, or the token before the row. The
others hold the document's next tokens, its closing boundary included; the last row is padded with boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.prepare.documents import Part
from harness.prepare.shards import SplitWriter
from harness.storage.manifest_schema import StorageInfo

_BLOCK_CELLS = 1 << 20


class Rows(NamedTuple):
    """Rows `(n, W)` of tokens, their mask, bool (true: a target), and how many documents end in each."""

    tokens: np.ndarray
    mask: np.ndarray
    ends: np.ndarray


class RowCutter:
    """Cuts documents, also such as come in pieces, into rows of `width` columns."""

    def __init__(self, width: int, boundary: int, dtype: np.dtype[Any]) -> None:
        self.width, self.boundary = width, boundary
        self._pending = np.zeros(0, dtype)  # of an unfinished document: what fills no row yet
        self._context = boundary  # the token before it

    def state(self) -> dict[str, Any]:
        return {"pending": self._pending.tolist(), "context": self._context}

    def restore(self, state: dict[str, Any]) -> None:
        self._pending = np.array(state["pending"], self._pending.dtype)
        self._context = state["context"]

    def cut(self, tokens: np.ndarray, ends: np.ndarray) -> Iterator[Rows]:
        """The rows of `tokens` `(n,)`, in blocks; `ends` are the positions after each document's end.

        What fills no row and belongs to a document that has not ended is kept for the next call.
        """
        columns = self.width - 1
        ends = ends + len(self._pending)
        tokens = np.concatenate([self._pending, tokens])
        closed = int(ends[-1]) if len(ends) else 0
        kept = closed + (len(tokens) - closed) // columns * columns  # whole rows of the document at the end
        stops = np.append(ends, kept) if kept > closed else ends
        lengths: np.ndarray = np.diff(stops, prepend=0)
        counts = -(-lengths // columns)  # rows a document
        firsts = np.cumsum(counts) - counts
        part = np.arange(counts.sum()) - np.repeat(firsts, counts)  # of its document
        filled = np.minimum(columns, np.repeat(lengths, counts) - part * columns)  # target columns
        starts = np.cumsum(filled) - filled
        context = np.where(part == 0, self.boundary, tokens[starts - 1]) if len(starts) else tokens[:0]
        context[:1] = self._context
        last = np.zeros(len(filled), np.int64)
        last[(firsts + counts - 1)[: len(ends)]] = 1

        if kept:
            self._context = self.boundary if kept == closed else int(tokens[kept - 1])
        self._pending = tokens[kept:].copy()
        step = max(1, _BLOCK_CELLS // self.width)
        for row in range(0, len(filled), step):
            block = slice(row, row + step)
            count = int(filled[block].sum())
            yield self._block(tokens[starts[row] :][:count], filled[block], context[block], last[block])

    def _block(self, tokens: np.ndarray, filled: np.ndarray, context: np.ndarray, last: np.ndarray) -> Rows:
        mask = np.arange(self.width) <= filled[:, None]
        mask[:, 0] = False
        rows = np.full(mask.shape, self.boundary, tokens.dtype)
        rows[mask] = tokens  # in order: rows come one after another, as their tokens do
        rows[:, 0] = context
        return Rows(rows, mask, last)


class RowWriter(SplitWriter):
    """Rows in shards of at least `shard_tokens` cells, whole rows each; null: only `close_shard` ends one."""

    def __init__(
        self, folder: Path, prefix: str, storage: StorageInfo, shard_tokens: int | None, width: int
    ) -> None:
        super().__init__(folder, prefix, storage, width)
        self.shard_rows = None if shard_tokens is None else -(-shard_tokens // width)

    def add_rows(self, rows: Rows) -> None:
        """Append whole rows; a shard that is full is closed and the next begun."""
        start = 0
        while start < len(rows.tokens):
            stop = len(rows.tokens)
            if self.shard_rows is not None:
                stop = min(stop, start + self.shard_rows - self._open[0].length)
            self._check_index()
            mask = rows.mask[start:stop]
            self._open[0].append(rows.tokens[start:stop])
            self._open[1].append(mask)
            self._count(int(np.count_nonzero(mask)), int(rows.ends[start:stop].sum()))
            if self._open[0].length == self.shard_rows:
                self.close_shard()
            start = stop


class DocumentRowWriter(RowWriter):
    """Documents as rows; `boundary` is the tokenizer's."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        storage: StorageInfo,
        shard_tokens: int | None,
        width: int,
        boundary: int,
    ) -> None:
        super().__init__(folder, prefix, storage, shard_tokens, width)
        self._cutter = RowCutter(width, boundary, storage.dtype)

    def add(self, part: Part) -> None:
        """Append whole documents, or a piece of one."""
        self.bytes += part.bytes
        for rows in self._cutter.cut(part.tokens, part.ends):
            self.add_rows(rows)

    def state(self) -> dict[str, Any]:
        return super().state() | {"cutter": self._cutter.state()}

    def closed_state(self, split: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
        return super().closed_state(split, files) | {"cutter": self._cutter.state()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._cutter.restore(state["cutter"])
