"""One reader for every storage: a split as a flat stream of tokens over extents of files."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.errors import UserError
from harness.storage import forks
from harness.storage.extents import Extent, OpenReader, Piece, Positional, Reader, TokenArray
from harness.storage.manifest import Manifest
from harness.storage.mapped import Mapped
from harness.storage.windows import WindowPlan

if TYPE_CHECKING:
    import torch

# Longer reads go piece by piece: a piece stays in the cache between the vocabulary check and the conversion,
# and bounds the buffer of a positional read.
_PIECE = 1 << 16


class _Run(NamedTuple):
    """An extent that lies in memory: the tokens `[first, last)` of the stream."""

    first: int
    last: int
    tokens: TokenArray


class _Opened:
    """What one process has open, and the extent in memory that was read last: the next batch is there."""

    def __init__(self, reader: Reader) -> None:
        self.pid = forks.pid
        self.reader = reader
        self.run = _Run(0, 0, np.empty(0, reader.dtype))


class TokenStore:
    """One split of a prepared set as a flat stream of tokens in the manifest's order.

    `paths` are the shards, `offsets` the prefix sums of their tokens (`[0, 4, 7]` for shards of 4 and 3).
    Files are opened on the first read, once in each process: a store may be used, then forked or pickled, and
    used again on either side. Each opening compares the file with the one whose header was checked, so that
    a set prepared anew under a running training is an error and never mixed into it. Reads are thread-safe.
    With `mmap=False` files are only read at positions: slower, but a file cut short while in use is an error,
    where touching its mapping ends the process. `open_reader` reads extents that are not plain tokens in
    their files; it gets those that hold tokens, in order.
    """

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        extents: Sequence[Extent],
        *,
        mmap: bool = True,
        open_reader: OpenReader | None = None,
    ) -> None:
        shards = manifest.splits[split].shards
        assert sum(extent.tokens for extent in extents) == manifest.splits[split].total_tokens
        self.manifest = manifest
        self.split = split
        self.dtype = manifest.storage.dtype
        self.vocab_size = manifest.tokenizer.vocab_size
        self.metadata_sha256 = manifest.metadata_sha256
        self.offsets = [0, *accumulate(shard.tokens for shard in shards)]
        self.total_tokens = self.offsets[-1]
        self._extents = tuple(extent for extent in extents if extent.tokens)
        self._starts = [0, *accumulate(extent.tokens for extent in self._extents)]
        self._open_reader: OpenReader = open_reader or (Mapped if mmap else Positional)
        # Where the stored dtype cannot hold an id beyond the vocabulary there is nothing to check.
        self._check_ids = self.vocab_size < 1 << 8 * self.dtype.itemsize
        self._opened: _Opened | None = None

    @cached_property
    def paths(self) -> list[Path]:
        """The shards' files."""
        return [self.manifest.directory / shard.file for shard in self.manifest.splits[self.split].shards]

    @property
    def content_sha256(self) -> str | None:
        """As `Manifest.content_sha256`."""
        return self.manifest.content_sha256

    def read_tokens(self, start: int, count: int) -> TokenArray:
        """Tokens `[start, start+count)` as an owned array `(count,)` of the stored dtype.

        Any range inside the stream, also across shards and empty; `UserError` (a ValueError) outside of it.
        """
        start, count = self._checked_range(start, count)
        tokens = np.empty(count, self.dtype)
        self._read_into(start, tokens)
        return tokens

    def read_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, one row of the stored dtype, with the tokens `[start, start+len(out))`.

        `UserError` outside of the stream and for an array of another shape or dtype; then nothing is written.
        """
        if out.ndim != 1 or out.dtype != self.dtype:
            raise UserError(
                f"tokens of {self.split} are read into one row of {self.dtype.name}, not into {out.dtype} of "
                f"shape {out.shape}"
            )
        start, _ = self._checked_range(start, len(out))
        self._read_into(start, out)

    def read_windows(self, starts: Sequence[int] | TokenArray, length: int) -> TokenArray:
        """The windows `[start, start+length)` as an owned array `(len(starts), length)` of the stored dtype.

        Windows may overlap, repeat, come in any order and cross shards; `UserError` outside of the stream.
        """
        positions, length = self._checked_windows(starts, length)
        if not len(positions) or not length:
            return np.empty((len(positions), length), self.dtype)
        windows, left = self.reader().gather(positions, length)
        for row in left:
            self._read_into(int(positions[row]), windows[row])
        return windows

    def get_windows(
        self, starts: Sequence[int] | TokenArray, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `(len(starts), seq_len)`: windows of `seq_len + 1` tokens at `starts`.

        `starts` as in `read_windows`, all else as in `get_batch`.
        """
        seq_len = _count(seq_len, "seq_len", 1)
        return self.split_windows(self.read_windows(starts, seq_len + 1), starts)

    def plan(self, starts: Sequence[int] | TokenArray, seq_len: int) -> WindowPlan:
        """`get_windows` for many windows that are read bit by bit, in this order; checked here, at once."""
        seq_len = _count(seq_len, "seq_len", 1)
        positions, _ = self._checked_windows(starts, seq_len + 1)
        return WindowPlan(self, positions, seq_len)

    def split_windows(
        self, windows: TokenArray, starts: Sequence[int] | TokenArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `(n, T)`, of windows `(n, T + 1)` that were read at `starts`.

        `UserError` for a token id that is not in the vocabulary.
        """
        import torch

        if self._check_ids and windows.size and windows.item(windows.argmax()) >= self.vocab_size:
            row = int(np.argmax(windows.max(axis=1) >= self.vocab_size))
            self._refuse_id(windows[row], int(starts[row]))
        tokens = windows.astype(np.int64)
        return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])

    def get_batch(self, start: int, batch_size: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `(batch_size, seq_len)`, from the `B * T + 1` tokens at `start`.

        Rows follow one another in the stream, and `targets` is `inputs` one token later. Both are views of
        one fresh buffer, so take them as read-only. `UserError` outside of the stream and for a token id
        that is not in the vocabulary.
        """
        import torch

        shape = batch_size, seq_len
        if not (type(batch_size) is type(seq_len) is int and batch_size > 0 < seq_len):
            shape = _count(batch_size, "batch_size", 1), _count(seq_len, "seq_len", 1)
        tokens = self._int64(start, shape[0] * shape[1] + 1)
        return torch.from_numpy(tokens[:-1].reshape(shape)), torch.from_numpy(tokens[1:].reshape(shape))

    def get_sequence(self, start: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One row: inputs and targets, int64 `(seq_len,)`; else as `get_batch`."""
        inputs, targets = self.get_batch(start, 1, seq_len)
        return inputs[0], targets[0]

    def prefetch(self, starts: Sequence[int] | TokenArray, length: int) -> None:
        """Hint that these windows are read soon, so that slow storage starts now. Changes no result."""
        positions, length = self._checked_windows(starts, length)
        reader = self.reader()
        for start in sorted(positions.tolist()):
            for index, local, take, _ in self._parts(start, length):
                reader.will_need(index, local, take)

    def positional(self) -> TokenStore:
        """The same tokens, with nothing mapped; the store itself where nothing of it is."""
        if self._open_reader is not Mapped:
            return self
        store = type(self).__new__(type(self))
        store.__dict__.update(self.__dict__)
        store._opened, store._open_reader = None, Positional
        return store

    def locate(self, start: int, count: int) -> list[Piece]:
        """The parts of shards that hold the tokens `[start, start+count)`; `UserError` outside the stream."""
        start, count = self._checked_range(start, count)
        pieces = []
        shard = bisect_right(self.offsets, start) - 1
        while count:
            take = min(count, self.offsets[shard + 1] - start)
            if take:
                pieces.append(Piece(self.paths[shard], start - self.offsets[shard], take))
            start, count, shard = start + take, count - take, shard + 1
        return pieces

    def close(self) -> None:
        """Let go of mappings and descriptors; a later read opens them again."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def reader(self) -> Reader:
        """What this process reads the extents through, opened by the first call."""
        opened = self._opened
        if opened is None or opened.pid != forks.pid:
            opened = self._opened = _Opened(self._open_reader(self._extents, self.dtype))
        return opened.reader

    def _parts(self, start: int, count: int) -> list[tuple[int, int, int, int]]:
        """(extent, first token in it, tokens, place in the result) for each piece of a range."""
        parts = []
        index = bisect_right(self._starts, start) - 1
        done = 0
        while done < count:
            local = start + done - self._starts[index]
            left = self._extents[index].tokens - local
            take = min(count - done, left, _PIECE)
            parts.append((index, local, take, done))
            done += take
            index += take == left
        return parts

    def _read_into(self, start: int, out: TokenArray) -> None:
        reader = self.reader()
        for index, local, take, at in self._parts(start, len(out)):
            out[at : at + take] = reader.slice(index, local, take)

    def _int64(self, start: int, count: int) -> TokenArray:
        start, count = self._checked_range(start, count)
        opened = self._opened
        if opened is not None and opened.pid == forks.pid and count <= _PIECE:
            first, last, run = opened.run
            if first <= start and start + count <= last:
                return self._checked(run[start - first : start + count - first], start).astype(np.int64)
        reader = self.reader()
        tokens = np.empty(count, np.int64)
        for index, local, take, at in self._parts(start, count):
            tokens[at : at + take] = self._checked(reader.slice(index, local, take), start + at)
            self._keep_run(index)
        return tokens

    def _keep_run(self, index: int) -> None:
        opened = self._opened
        if opened is not None and (extent := opened.reader.in_memory(index)) is not None:
            opened.run = _Run(self._starts[index], self._starts[index + 1], extent)

    def _checked(self, part: TokenArray, start: int) -> TokenArray:
        # Before the conversion: the check waits for memory, and the conversion finds the part in the cache.
        # `argmax` takes half as long as `max`, whose reduction has a price a call.
        if self._check_ids and part.item(part.argmax()) >= self.vocab_size:
            self._refuse_id(part, start)
        return part

    def _refuse_id(self, part: TokenArray, start: int) -> None:
        first = int(np.argmax(part >= self.vocab_size))
        position = start + first
        shard = bisect_right(self.offsets, position) - 1
        raise UserError(
            f"{self.paths[shard]} holds token id {int(part[first])} at position {position} of {self.split} "
            f"(token {position - self.offsets[shard]} of the file), but the vocabulary has {self.vocab_size} "
            "ids: the shard is damaged or was written with another tokenizer, and a model has no embedding "
            "for it. Restore the file or prepare the set again with prepare.overwrite=true"
        )

    def _checked_range(self, start: int, count: int) -> tuple[int, int]:
        if type(start) is type(count) is int and 0 <= start <= start + count <= self.total_tokens:
            return start, count
        start, count = _count(start, "start", 0), _count(count, "count", 0)
        if start + count > self.total_tokens:
            raise self._outside(start, count)
        return start, count

    def _checked_windows(
        self, starts: Sequence[int] | TokenArray, length: int
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
        length = _count(length, "length", 0)
        positions = np.asarray(starts)
        if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
            raise UserError(
                f"starts must be one row of integers, not {positions.dtype} of shape {positions.shape}"
            )
        if positions.size:
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high + length > self.total_tokens:
                raise self._outside(low if low < 0 else high, length)
        return positions.astype(np.int64, copy=False), length

    def _outside(self, start: int, count: int) -> UserError:
        return UserError(
            f"tokens [{start}, {start + count}) were asked for, but {self.split} has {self.total_tokens} "
            f"tokens ({self.manifest.path}): reading stops at the end of the stream and never wraps"
        )


def _count(value: int, name: str, low: int) -> int:
    if type(value) is int and value >= low:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool | np.bool_) or number < low:
        raise UserError(f"{name}={value!r} must be an integer of at least {low}")
    return number
