"""Seeded orders that are computed, not stored: any place of an epoch is reached at once, at any size."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from harness.errors import UserError

EPOCH_SEEDS = ("mixed", "additive")

# Up to here the order is an explicit one, 32 KiB at most: a Feistel network over a handful of values knows
# only some of their permutations.
_EXPLICIT = 4096
_MAX_SIZE = 1 << 62
_ROUNDS = 8

# David Stafford's "variant 13" multipliers of the 64-bit finalizer of MurmurHash3, and the odd constant
# (2^64 over the golden ratio) by which SplitMix64 counts.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Ids = np.ndarray[Any, np.dtype[np.int64]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]


def epoch_key(seed: int, epoch: int, epoch_seed: str = "mixed", purpose: str = "") -> int:
    """The key of one epoch's order, 64 bits; `purpose` keeps orders of different things apart.

    `mixed` hashes seed and epoch, so that no two pairs share an order. `additive` hashes their sum: seed 0 in
    epoch 1 repeats the order of seed 1 in epoch 0.
    """
    assert epoch_seed in EPOCH_SEEDS
    pair = f"{seed},{epoch}" if epoch_seed == "mixed" else f"{seed + epoch}"
    return int.from_bytes(hashlib.sha256(f"{purpose}:{pair}".encode()).digest()[:8], "little")


class Permutation:
    """The numbers from 0 to `size - 1`, each once, in an order that `key` (64 bits) alone decides.

    A Feistel network over the next power of two, as in Luby and Rackoff's construction, with its result put
    through it again until it lies below `size` (Black and Rogaway's cycle walking). It needs no memory, and
    each place costs the same.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 0 <= size <= _MAX_SIZE:
            raise UserError(f"a permutation of {size} numbers was asked for: it must be 0 to {_MAX_SIZE}")
        self.size = size
        self._keys = np.frombuffer(
            hashlib.sha512(struct.pack("<Q", key % 2**64)).digest(), dtype="<u8", count=_ROUNDS
        ).astype(np.uint64)
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._explicit = self._sorted_hashes() if size <= _EXPLICIT else None

    def take(self, start: int, count: int) -> Ids:
        """The numbers at the places `[start, start + count)`: int64 `(count,)`, freshly allocated."""
        if not 0 <= start <= start + count <= self.size:
            raise UserError(f"places [{start}, {start + count}) were asked for of an order of {self.size}")
        if self._explicit is not None:
            return self._explicit[start : start + count].copy()
        values = np.arange(start, start + count, dtype=np.uint64)
        self._network(values)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            walked = values[outside]
            self._network(walked)
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values.view(np.int64)

    def _network(self, values: _Words) -> None:
        """Permute the power of two in place; the high and the low bits mask each other in turn."""
        low = values & np.uint64((1 << self._low_bits) - 1)
        high = values >> np.uint64(self._low_bits)
        work = np.empty_like(values)
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= _round(low, key, self._high_bits, work)
            else:
                low ^= _round(high, key, self._low_bits, work)
        np.left_shift(high, np.uint64(self._low_bits), out=values)
        values |= low

    def _sorted_hashes(self) -> Ids:
        hashes = _mixed(np.arange(self.size, dtype=np.uint64) * _GOLDEN + self._keys[0])
        return np.argsort(hashes, kind="stable")


def uniform_draws(size: int, key: int, start: int, count: int) -> Ids:
    """Draws number `[start, start + count)` with replacement from the numbers below `size`: int64 `(count,)`.

    SplitMix64 by its counter, so that any draw is reached at once.
    """
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64) * _GOLDEN + np.uint64(key)
    return (_mixed(counters) % np.uint64(size)).view(np.int64)


def _round(half: _Words, key: np.uint64, bits: int, out: _Words) -> _Words:
    np.add(half, key, out=out)
    out *= _MIX_1
    out ^= out >> np.uint64(32)
    out *= _MIX_2
    out >>= np.uint64(64 - bits)
    return out


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
