"""Which samples a stretch of steps drew, and how often, by the loaders' own orders and without a read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from harness.loaders import BlockShuffleLoader, SeekableLoader, SlidingWindowLoader
from harness.loaders.permutation import Ids
from harness.loaders.sampled import SampledLoader

Counts = np.ndarray[Any, np.dtype[np.int32]]

# Places of an order looked at together: the arrays in between stay small.
_BLOCK = 1 << 20
# With a count for every sample nothing is sorted; it takes at most this many counts a drawn sample.
_SPARSE = 4


class Drawn(NamedTuple):
    """Sample numbers that were drawn, distinct and ascending, int64 `(n,)`, and how often each, `(n,)`."""

    ids: Ids
    counts: Counts


class Part(NamedTuple):
    """Of one epoch, `batches` from `position` on."""

    epoch: int
    position: int
    batches: int


def parts(loader: SeekableLoader, epoch: int, position: int, batches: int) -> Iterator[Part]:
    """The epochs that the next `batches` from a place on lie in, in order; at least one batch each."""
    while batches:
        if (here := min(batches, loader.batches_from(position))) > 0:
            yield Part(epoch, position, here)
        batches, epoch, position = batches - here, epoch + 1, 0


def is_with_replacement(loader: SampledLoader) -> bool:
    """Whether a sample may be drawn twice in an epoch."""
    return isinstance(loader, SlidingWindowLoader) and loader.sampling == "uniform"


def drawn(loader: SampledLoader, of: list[Part], *, counted: bool = True) -> Drawn:
    """The samples of some parts of epochs. Memory: 20 to 40 bytes a sample; time: a second or two for 10^7.

    An epoch of which more than half is drawn costs what is left out of it. `counted` False is for those who
    only ask which: counts are then too low, and epochs after the one that completes them cost nothing.
    """
    numbers = _numbers(loader)
    total = loader.batch_size * sum(part.batches for part in of)
    if _SPARSE * total < numbers:
        return _sorted(total, (block for part in of for block in _blocks(loader, part)))
    dense: Counts = np.zeros(numbers, np.int32)
    for part in of:
        _add(dense, loader, part)
        if not counted and dense.all():
            break
    ids = np.flatnonzero(dense)
    return Drawn(ids, dense if len(ids) == numbers else dense[ids])


def _sorted(total: int, blocks: Iterator[Ids]) -> Drawn:
    """The numbers in the blocks, `total` of them, counted by sorting them."""
    ids = np.empty(total, np.int64)
    at = 0
    for block in blocks:
        ids[at : at + len(block)] = block
        at += len(block)
    ids.sort()
    is_first = np.ones(total, np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    if is_first.all():
        return Drawn(ids, np.ones(total, np.int32))
    firsts = np.flatnonzero(is_first)
    return Drawn(ids[firsts], np.diff(firsts, append=total).astype(np.int32))


def _numbers(loader: SampledLoader) -> int:
    """How many samples there are to draw from; an epoch with replacement draws another number of them."""
    if is_with_replacement(loader):
        assert isinstance(loader, SlidingWindowLoader)
        return loader.windows
    return loader.samples


def _add(counts: Counts, loader: SampledLoader, part: Part) -> None:
    """Count the samples of a part; of the epoch's others, where those are fewer."""
    if is_with_replacement(loader):
        for ids in _blocks(loader, part):
            np.add.at(counts, ids, 1)
        return
    taken = part.batches * loader.batch_size
    if 2 * taken <= loader.samples:
        for ids in _blocks(loader, part):
            counts[ids] += 1
        return
    counts += 1
    loader.start_epoch(part.epoch)
    for start, end in ((0, part.position), (part.position + taken, loader.samples)):
        for ids in _order(loader, start, end):
            counts[ids] -= 1


def _blocks(loader: SampledLoader, part: Part) -> Iterator[Ids]:
    loader.start_epoch(part.epoch)
    yield from _order(loader, part.position, part.position + part.batches * loader.batch_size)


def _order(loader: SampledLoader, start: int, end: int) -> Iterator[Ids]:
    """The samples at the places `[start, end)` of the loader's epoch, each once, in any order."""
    if isinstance(loader, BlockShuffleLoader):
        # A window is shuffled in itself: of one that is read whole, the order does not matter.
        rows = loader.window_rows
        first = -(-start // rows) * rows
        last = end if end == loader.samples else end // rows * rows
        if first < last:
            yield from _order(loader, start, first)
            yield np.arange(first, last)
            start = last
    for at in range(start, end, _BLOCK):
        yield loader.order(at, min(_BLOCK, end - at))
