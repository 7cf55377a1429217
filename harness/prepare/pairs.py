"""Contrastive pairs: two rows with the same prompt, one with the true continuation, one with a false one.

A row is the boundary token, the prompt, the continuation, and then boundary tokens as padding; its targets
are the continuation alone. What makes a pair depends on nothing outside one chunk of the corpus, so pairs
are the same whatever the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

_BLOCK_ENTRIES = 1 << 20


@dataclass(frozen=True)
class RowSet:
    """Rows of different lengths one behind the other, without their padding.

    `tokens` is `(n,)` of the tokenizer's dtype; `ends` `(rows,)` int64, the position after each row;
    `first_targets` `(rows,)` int64, the column where each row's continuation begins.
    """

    tokens: np.ndarray
    ends: np.ndarray
    first_targets: np.ndarray

    def padded(self, start: int, stop: int, width: int, boundary: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows `[start, stop)`, `(stop - start, width)` of the tokenizer's dtype, and their mask, bool."""
        first = int(self.ends[start - 1]) if start else 0
        ends = self.ends[start:stop]
        lengths = np.diff(ends, prepend=first)[:, None]
        columns = np.arange(width)
        rows = np.full((len(ends), width), boundary, self.tokens.dtype)
        rows[columns < lengths] = self.tokens[first : ends[-1] if len(ends) else first]
        return rows, (columns < lengths) & (columns >= self.first_targets[start:stop, None])


@dataclass(frozen=True)
class PairPart:
    """One split's pairs of a chunk: row i of `pos` and row i of `neg` begin with the same prompt.

    `documents` gave at least one pair; `truncated` pairs did not fit into the width; `skipped` counts what
    gave no pair: a window without a false continuation, or a pair whose two rows would be equal.
    """

    pos: RowSet
    neg: RowSet
    width: int
    boundary: int
    documents: int
    truncated: int
    skipped: int

    @property
    def pairs(self) -> int:
        return len(self.pos.ends)

    @property
    def padding(self) -> int:
        """Entries behind the rows' ends, in both arrays together."""
        return 2 * self.pairs * self.width - len(self.pos.tokens) - len(self.neg.tokens)

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """`pos_rows, pos_mask, neg_rows, neg_mask`, a bounded number of pairs at a time.

        Rows are `(n, width)` of the tokenizer's dtype, masks bool of the same shape: true on the
        continuation, false on the first column, the prompt and the padding.
        """
        step = max(1, _BLOCK_ENTRIES // self.width)
        for start in range(0, self.pairs, step):
            stop = min(start + step, self.pairs)
            pos = self.pos.padded(start, stop, self.width, self.boundary)
            neg = self.neg.padded(start, stop, self.width, self.boundary)
            yield *pos, *neg


def text_pairs(
    triples: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], width: int, boundary: int, dtype: np.dtype
) -> PairPart:
    """Pairs from the tokens of `(prompt, chosen, rejected)`; a continuation ends with a boundary token.

    What does not fit loses the prompt's first tokens, in both rows the same, and where no prompt is left
    the continuation's last ones.
    """
    made = _Pairs(width, boundary, dtype)
    closing = np.array([boundary], dtype)
    room = width - 1
    for prompt, chosen, rejected in triples:
        chosen, rejected = np.append(chosen, closing), np.append(rejected, closing)
        longest = max(len(chosen), len(rejected))
        kept = max(0, min(len(prompt), room - longest))
        made.truncated += len(prompt) + longest > room
        made.documents += made.add(
            prompt[len(prompt) - kept :], chosen[: room - kept], rejected[: room - kept]
        )
    return made.part()


def window_pairs(tokens: np.ndarray, ends: np.ndarray, width: int, boundary: int) -> PairPart:
    """Pairs from documents, each followed by its boundary token: `ends` are the positions after it.

    A document is cut into windows of `width - 1` tokens, and a rest of two tokens or more is one too. The
    first half of a window is the prompt and the second the true continuation. The false one has its length
    and is from the next document that is long enough, at the same place modulo what fits there; behind the
    last document comes the first. Neither has a closing boundary: a window is no whole document.
    """
    made = _Pairs(width, boundary, tokens.dtype)
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
    lengths = ends - 1 - starts
    others = _Others(lengths)
    for document in range(len(ends)):
        text = tokens[starts[document] : starts[document] + lengths[document]]
        before = made.pairs
        for begin in range(0, len(text), width - 1):
            window = text[begin : begin + width - 1]
            half = len(window) // 2
            other = others.after(document, len(window) - half) if half else None
            if other is None:
                made.skipped += 1
                continue
            count = len(window) - half
            place = starts[other] + (begin + half) % (lengths[other] - count + 1)
            made.add(window[:half], window[half:], tokens[place : place + count])
        made.documents += made.pairs > before
    return made.part()


class _Others:
    """For each document the next one of at least a given length, cyclically."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._long_enough: dict[int, np.ndarray] = {}

    def after(self, document: int, length: int) -> int | None:
        following = (document + 1) % len(self._lengths)
        if self._lengths[following] < length:
            if length not in self._long_enough:
                self._long_enough[length] = np.flatnonzero(self._lengths >= length)
            found = self._long_enough[length]
            following = int(found[np.searchsorted(found, document, side="right") % len(found)])
        return None if following == document else following


@dataclass
class _Pairs:
    width: int
    boundary: int
    dtype: np.dtype
    documents: int = 0
    truncated: int = 0
    skipped: int = 0
    _tokens: tuple[list[np.ndarray], list[np.ndarray]] = field(default_factory=lambda: ([], []))
    _lengths: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    _first_targets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.width >= 2
        self._head = np.array([self.boundary], self.dtype)

    @property
    def pairs(self) -> int:
        return len(self._first_targets)

    def add(self, prompt: np.ndarray, true: np.ndarray, false: np.ndarray) -> bool:
        """Whether the two continuations differ: equal rows teach nothing and are left out."""
        if np.array_equal(true, false):
            self.skipped += 1
            return False
        for side, continuation in enumerate((true, false)):
            self._tokens[side].extend((self._head, prompt, continuation))
            self._lengths[side].append(1 + len(prompt) + len(continuation))
        self._first_targets.append(1 + len(prompt))
        return True

    def part(self) -> PairPart:
        pos, neg = (self._row_set(side) for side in (0, 1))
        return PairPart(pos, neg, self.width, self.boundary, self.documents, self.truncated, self.skipped)

    def _row_set(self, side: int) -> RowSet:
        tokens = np.concatenate([np.zeros(0, self.dtype), *self._tokens[side]])
        ends = np.cumsum(self._lengths[side], dtype=np.int64)
        return RowSet(tokens, ends, np.array(self._first_targets, np.int64))
