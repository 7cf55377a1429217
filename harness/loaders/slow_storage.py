"""How to read next, judged by what reads have cost: as they come, told of ahead, or by threads ahead."""

from __future__ import annotations

import math
from enum import Enum

# A read from the page cache takes about 1 ns a token, one that waits for a local disk 50 and more.
_CALL_SECONDS = 300e-6
_TOKEN_SECONDS = 10e-9
# The first read of all opens files, too.
FIRST_SECONDS = 1.5e-3

_PROOF = 3  # slow reads in a row: a busy processor delays one now and then
_KEPT = 3  # reads whose median is the cost of a way

# Hints are ignored where the second read with them, of samples that were all asked for before the first was
# read, takes more than half of what it took without.
_IGNORED = 2
_HELPED = 0.5
_TELLING = 4  # samples of a batch; one by itself has nothing to be read beside

# Threads stay where they are this much cheaper than hints, which need none.
_CLEARLY = 0.8

# Hints that were as good as threads are not compared with them again for so many reads.
_SETTLED = 4096

_PROBE_EVERY = 32
_PROBES = 4  # quick ones in a row after which the storage is taken to be fast again


class Way(Enum):
    """How batches are read."""

    DIRECT = "as they come"
    HINTS = "the system is told of them ahead"
    READERS = "threads read them ahead"


class SlowStorage:
    """In which `way` to read batches, from how long reads took; `depth` of them are begun ahead.

    Slow reads ask for hints. Where hinted reads wait as long as reads without, the file system ignores hints,
    and threads read ahead; where they still wait, threads try, and stay if they are clearly cheaper. What was
    begun ahead says nothing about the storage, so single samples that nobody asked for before are read now
    and then: when those are quick, reads go direct again.
    """

    def __init__(self, depth: int) -> None:
        self.way = Way.DIRECT
        self._depth = depth
        self._reads = self._slow = self._quick_probes = 0  # in this way; those two: in a row
        self._costs: list[float] = []
        self._samples = 1
        self._unhelped = math.inf  # seconds a batch takes where nothing was begun ahead
        self._hints_cost: float | None = None
        self._settled = 0

    def note_first(self, seconds: float, samples: int) -> None:
        """The loader's first read, one of the `samples` of a batch, took so long; of two the quicker."""
        self._samples = samples
        if seconds > FIRST_SECONDS:
            self._unhelped = min(self._unhelped, seconds * samples)
            self._enter(Way.HINTS)
        else:
            self._enter(Way.DIRECT)

    @property
    def in_doubt(self) -> bool:
        """Whether the last read was slow."""
        return self._slow > 0

    def note(self, seconds: float, tokens: int) -> None:
        """A batch of `tokens` that was read in the present way took so long."""
        slow = seconds > quick_seconds(tokens)
        self._slow = self._slow + 1 if slow else 0
        if self.way is not Way.DIRECT:
            self._note_begun(seconds, quick_seconds(tokens))
        elif self._slow == _PROOF:
            self._unhelped = seconds
            self._enter(Way.HINTS)

    def wants_probe(self) -> bool:
        """Whether a sample that nobody has asked for should be read by itself now, for `note_probe`."""
        return self.way is not Way.DIRECT and self._reads % _PROBE_EVERY == _PROBE_EVERY - 1

    def note_probe(self, seconds: float, tokens: int) -> None:
        """Such a sample of `tokens` took so long."""
        self._quick_probes = self._quick_probes + 1 if seconds <= quick_seconds(tokens) else 0
        if self._quick_probes == _PROBES:
            self._enter(Way.DIRECT)

    def _note_begun(self, seconds: float, limit: float) -> None:
        self._reads += 1
        self._settled = max(0, self._settled - 1)
        if self.way is Way.HINTS and self._reads == self._slow == _IGNORED and not self._settled:
            if self._samples >= _TELLING and seconds > _HELPED * self._unhelped:
                self._enter(Way.READERS)
            return
        if self._reads <= self._depth:
            return  # begun in the way before, or too late
        self._costs = [*self._costs, seconds][-_KEPT:]
        if len(self._costs) < _KEPT:
            return
        cost = sorted(self._costs)[_KEPT // 2]
        if self.way is Way.HINTS and cost > limit and not self._settled:
            self._hints_cost = cost
            self._enter(Way.READERS)
        elif self.way is Way.READERS and self._hints_cost is not None:
            if cost > _CLEARLY * self._hints_cost:
                self._settled = _SETTLED
                self._enter(Way.HINTS)
            self._hints_cost = None

    def _enter(self, way: Way) -> None:
        self.way = way
        self._reads = self._slow = self._quick_probes = 0
        self._costs = []


def quick_seconds(tokens: int) -> float:
    """Seconds that a read of `tokens` takes at most if it waits for nothing."""
    return _CALL_SECONDS + _TOKEN_SECONDS * tokens
