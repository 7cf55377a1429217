"""Targets counted where the data itself says which tokens are some: read in blocks, never as batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from harness.auditing.coverage_samples import Counts, Drawn
from harness.loaders.masking import BoundaryMask
from harness.loaders.permutation import Ids
from harness.storage import RowStore, TokenStore

_Array = np.ndarray[Any, Any]

# Places of targets looked at together.
_BLOCK = 1 << 20


class StreamUse(NamedTuple):
    """Targets `[start, start + length)` for each of `starts`, distinct and ascending, `counts` times each.

    `mask`: which of them do not count after all.
    """

    starts: Ids
    length: int
    counts: Counts
    mask: BoundaryMask


class RowUse(NamedTuple):
    """Rows of which the first `columns` targets were used, and which of those do not count after all."""

    samples: Drawn
    columns: int
    mask: BoundaryMask


def count_stream(store: TokenStore, uses: list[StreamUse]) -> tuple[int, int]:
    """The distinct tokens of a stream that were targets, and the targets. Reads each of its tokens once."""
    first = min(int(use.starts[0]) for use in uses)
    end = max(int(use.starts[-1]) + use.length for use in uses)
    unique = targets = 0
    for start in range(first, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        counts = [_counts_in(use, start, stop) for use in uses]
        if not any(count.any() for count in counts):
            continue
        tokens = store.read_tokens(start - 1, stop - start + 1)
        was_target = np.zeros(stop - start, np.bool_)
        for use, count in zip(uses, counts, strict=True):
            count[use.mask.ignored(tokens[:-1], tokens[1:])] = 0
            targets += int(count.sum())
            was_target |= count > 0
        unique += int(np.count_nonzero(was_target))
    return unique, targets


def _counts_in(use: StreamUse, start: int, stop: int) -> _Array:
    """How often each position of `[start, stop)` is in a range: int64 `(stop - start,)`."""
    first, last = np.searchsorted(use.starts, [start - use.length + 1, stop])
    starts, counts = use.starts[first:last], use.counts[first:last]
    changes = np.zeros(stop - start + 1, np.int64)
    np.add.at(changes, np.maximum(starts, start) - start, counts)
    np.subtract.at(changes, np.minimum(starts + use.length, stop) - start, counts)
    return changes[:-1].cumsum()


def count_rows(store: RowStore, uses: list[RowUse]) -> tuple[int, int]:
    """The distinct tokens of rows that were targets, and the targets. Reads each row's mask once or twice."""
    ids = uses[0].samples.ids
    for use in uses[1:]:
        ids = np.union1d(ids, use.samples.ids)
    widest = max(use.columns for use in uses)
    unique = targets = 0
    size = max(1, _BLOCK // widest)
    for at in range(0, len(ids), size):
        block = ids[at : at + size]
        was_target = np.zeros((len(block), widest), np.bool_)
        for use in uses:
            first, last = np.searchsorted(use.samples.ids, [block[0], block[-1] + 1])
            rows, counts = use.samples.ids[first:last], use.samples.counts[first:last]
            places = _targets(store, rows, use)
            targets += int((np.count_nonzero(places, axis=1) * counts.astype(np.int64)).sum())
            was_target[np.searchsorted(block, rows), : use.columns] |= places
        unique += int(np.count_nonzero(was_target))
    return unique, targets


def _targets(store: RowStore, rows: Ids, use: RowUse) -> _Array:
    """Which places of these rows are targets, bool `(n, columns)`; without a mask of tokens none is read."""
    if use.mask.ignores_nothing:
        return store.target_mask(rows, use.columns + 1)
    tokens, mask = store.get_rows(rows, use.columns + 1)
    return mask[:, 1:] & ~use.mask.ignored(tokens[:, :-1], tokens[:, 1:])
