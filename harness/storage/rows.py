"""Rows of one width with masks as a store: rows by number, whatever the storage and the number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import UserError
from harness.storage import forks
from harness.storage.extents import Piece
from harness.storage.manifest import Manifest
from harness.storage.opening import open_manifest, wrong_layout
from harness.storage.reading import Reading
from harness.storage.row_files import RowShard, row_shards
from harness.storage.row_readers import DecodedRows, PlainRows, RowsReader

Array = np.ndarray[Any, Any]

# Mask entries looked at at once where a whole split is counted.
_BLOCK = 1 << 22


class _Opened(NamedTuple):
    """What one process has open."""

    pid: int
    reader: RowsReader


class RowStore:
    """One split of a set of padded rows: rows by number in the manifest's order, each with its mask.

    `split` is `train` or `val`, of contrastive rows `train.pos`, `train.neg` and so on. `paths` are the
    shards, `offsets` the prefix sums of their rows, `total_tokens` counts the true mask entries. Headers and
    sizes of all files are checked here, contents are not read; `UserError` where they and the manifest do not
    agree. Files are opened on the first read, once in each process, so a store may be used, then forked or
    pickled, and used again on either side; nothing but the files that were checked is read. Reads are
    thread-safe. With `mmap=False` files are only read at positions.
    """

    def __init__(
        self, directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
    ) -> None:
        with open_manifest(directory, prepare_command) as manifest:
            if manifest.storage.layout == "stream":
                raise wrong_layout(manifest, "a row store", "rows")
            if split not in manifest.splits:
                known = ", ".join(manifest.splits)
                raise UserError(f"split={split!r} must be one of {known}: {manifest.path} has no other")
            shards = row_shards(manifest, split)
        self._set_up(manifest, split, shards, mmap)

    @classmethod
    def of(cls, manifest: Manifest, split: str, *, mmap: bool = True) -> RowStore:
        """The split of a manifest that is loaded already; else as the constructor."""
        store = cls.__new__(cls)
        store._set_up(manifest, split, row_shards(manifest, split), mmap)
        return store

    def _set_up(self, manifest: Manifest, split: str, shards: list[RowShard], mmap: bool) -> None:
        entry = manifest.splits[split]
        assert entry.row_width is not None
        self._shards = shards
        self.manifest = manifest
        self.split = split
        self.dtype = manifest.storage.dtype
        self.vocab_size = manifest.tokenizer.vocab_size
        self.metadata_sha256 = manifest.metadata_sha256
        self.content_sha256 = manifest.content_sha256
        self.row_width = entry.row_width
        self.total_rows = entry.total_rows
        self.total_tokens = entry.total_tokens
        self.paths = [shard.rows.path for shard in shards]
        self.mask_paths = [shard.mask.path for shard in shards]
        self.offsets = [0, *accumulate(shard.rows.tokens // self.row_width for shard in shards)]
        self._ends = np.array(self.offsets[1:], np.int64)
        self._mmap = mmap
        self._opened: _Opened | None = None

    def read_rows(self, row_ids: Sequence[int] | Array) -> tuple[Array, Array]:
        """The rows `row_ids` `(n,)` and their mask: `(n, W)` of the stored dtype and `(n, W)` of bool, owned.

        Ids in any order, also repeated and across shards. `UserError` for an id that is no row, and for a
        mask byte that is neither 0 nor 1.
        """
        return self._read(self._checked_ids(row_ids), self.row_width)

    def get_rows(self, row_ids: Sequence[int] | Array, width: int) -> tuple[Array, Array]:
        """The first `width` columns of rows and mask: int64 `(n, width)` and bool `(n, width)`, owned.

        As `read_rows`; also `UserError` for a token id, padding included, that is not in the vocabulary.
        """
        assert 1 <= width <= self.row_width
        ids = self._checked_ids(row_ids)
        return self._as_int64(ids, *self._read(ids, width))

    def begin_rows(
        self, row_ids: Sequence[int] | Array, width: int, *, readers: bool
    ) -> Reading[tuple[Array, Array]]:
        """As `get_rows`, at least one row, begun now: the system is told of the rows, or `readers` read them.

        Plain rows are then read at positions, so that an error of the storage is an error.
        """
        assert 1 <= width <= self.row_width
        ids = self._checked_ids(row_ids)
        reading = self._open().begin(ids, width, readers=readers)
        return reading.then(lambda found: self._as_int64(ids, *self._checked(ids, *found)))

    def target_mask(self, row_ids: Sequence[int] | Array, width: int) -> Array:
        """The mask of the columns `[1, width)` of these rows, bool `(n, width - 1)`: which are targets.

        As `read_rows`, but no row is read.
        """
        assert 1 <= width <= self.row_width
        ids = self._checked_ids(row_ids)
        if not len(ids) or width == 1:
            return np.zeros((len(ids), width - 1), np.bool_)
        mask = self._open().mask(ids, 1)
        if np.maximum.reduce(mask, axis=None) > 1:
            self._refuse_mask(ids, mask, first_column=1)
        return mask[:, : width - 1].view(np.bool_)

    def count_tokens(self, first_column: int) -> int:
        """True mask entries of the whole split from `first_column` on. Reads those columns of all masks."""
        width = self.row_width - first_column
        if width < 1:
            return 0
        reader, found = self._open(), 0
        step = max(1, _BLOCK // width)
        for start in range(0, self.total_rows, step):
            ids = np.arange(start, min(start + step, self.total_rows))
            found += int(np.count_nonzero(reader.mask(ids, first_column)))
        return found

    def locate(self, row: int) -> Piece:
        """The shard of a row and the row's number in it; `UserError` for a number that is no row."""
        self._checked_ids([row])
        shard = int(self._ends.searchsorted(row, "right"))
        return Piece(self.paths[shard], row - self.offsets[shard], 1)

    def close(self) -> None:
        """Let go of files and mappings; a later read opens them again."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _open(self) -> RowsReader:
        opened = self._opened
        if opened is None or opened.pid != forks.pid:
            reader: RowsReader
            if all(shard.plain for shard in self._shards):
                reader = PlainRows(self._shards, self.row_width, self.dtype, self._mmap)
            else:
                reader = DecodedRows(self._shards, self.row_width, self.dtype)
            opened = self._opened = _Opened(forks.pid, reader)
        return opened.reader

    def _read(self, ids: Array, width: int) -> tuple[Array, Array]:
        if not len(ids):
            return np.empty((0, width), self.dtype), np.empty((0, width), np.bool_)
        return self._checked(ids, *self._open().read(ids, width))

    def _checked(self, ids: Array, rows: Array, mask: Array) -> tuple[Array, Array]:
        """Rows as they are and their mask as bool; `mask` is as stored."""
        if np.maximum.reduce(mask, axis=None) > 1:
            self._refuse_mask(ids, mask)
        return rows, mask.view(np.bool_)

    def _as_int64(self, ids: Array, rows: Array, mask: Array) -> tuple[Array, Array]:
        if rows.size and np.maximum.reduce(rows, axis=None) >= self.vocab_size:
            self._refuse_id(ids, rows)
        return rows.astype(np.int64), mask

    def _checked_ids(self, row_ids: Sequence[int] | Array) -> Array:
        ids = np.asarray(row_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UserError(f"row ids must be one row of integers, not {ids.dtype} of shape {ids.shape}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.total_rows):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise UserError(
                f"row {wrong} was asked for, but {self.split} has {self.total_rows} rows "
                f"({self.manifest.path}): rows count from 0 and never wrap"
            )
        return ids.astype(np.int64, copy=False)

    def _refuse_id(self, ids: Array, rows: Array) -> None:
        place, column = np.argwhere(rows >= self.vocab_size)[0].tolist()
        raise UserError(
            f"{self._where(self.paths, int(ids[place]))} holds token id {int(rows[place, column])} in column "
            f"{column}, but the vocabulary has {self.vocab_size} ids: the shard is damaged or was written "
            "with another tokenizer, and a model has no embedding for it. Restore the file or prepare the "
            "set again with prepare.overwrite=true"
        )

    def _refuse_mask(self, ids: Array, mask: Array, first_column: int = 0) -> None:
        place, column = np.argwhere(mask > 1)[0].tolist()
        where = self._where(self.mask_paths, int(ids[place]))
        raise UserError(
            f"{where} holds the mask byte {int(mask[place, column])} in column {first_column + column}, "
            "but a mask is of 0 and 1: the file is damaged, and nothing says whether that token "
            "is a target. Restore the file or prepare the set again with prepare.overwrite=true"
        )

    def _where(self, paths: list[Path], row: int) -> str:
        shard = int(self._ends.searchsorted(row, "right"))
        return f"{paths[shard]}, row {row - self.offsets[shard]} (row {row} of {self.split}),"


class PairStore:
    """One split of contrastive rows: row i of `pos` is preferred to row i of `neg`.

    `total_rows` counts pairs, `total_tokens` the true mask entries of both sides, whose widths may differ.
    Raises `UserError` where the two are not sides of one split.
    """

    def __init__(self, pos: RowStore, neg: RowStore) -> None:
        split, _, side = pos.split.rpartition(".")
        if (side, neg.split) != ("pos", f"{split}.neg") or pos.metadata_sha256 != neg.metadata_sha256:
            raise UserError(
                f"{pos.split} of {pos.manifest.path} ({pos.metadata_sha256}) and {neg.split} of "
                f"{neg.manifest.path} ({neg.metadata_sha256}) are not pos and neg of one split, so rows of "
                "one number would be no pairs. Open both sides of the same set"
            )
        assert pos.total_rows == neg.total_rows  # the manifest's own check
        self.pos = pos
        self.neg = neg
        self.manifest = pos.manifest
        self.split = split
        self.dtype = pos.dtype
        self.vocab_size = pos.vocab_size
        self.metadata_sha256 = pos.metadata_sha256
        self.content_sha256 = pos.content_sha256
        self.row_width = max(pos.row_width, neg.row_width)
        self.total_rows = pos.total_rows
        self.total_tokens = pos.total_tokens + neg.total_tokens
        self.paths = [*pos.paths, *neg.paths]

    def close(self) -> None:
        """As `RowStore.close`, of both sides."""
        self.pos.close()
        self.neg.close()
