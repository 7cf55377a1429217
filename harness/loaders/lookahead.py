"""Batches begun before they are asked for, where storage was seen to be slow. It changes no batch."""

from __future__ import annotations

import time
from collections import deque
from typing import Generic, NamedTuple, Protocol, TypeVar

from harness.errors import UserError
from harness.loaders.slow_storage import SlowStorage, Way, quick_seconds
from harness.storage import forks
from harness.storage.reading import Reading

T = TypeVar("T")

# Measured on a cold local disk: 1 batch ahead halves the wait, 8 quarter it; slower storage needs more.
_DEPTH = 8
# Batches begun for each one that is handed out, until all are ahead: the first ones must not wait for eight.
_AT_ONCE = 2


class Source(Protocol[T]):
    """What is looked ahead in: batches of `rows` samples, `batch_tokens` tokens, `advance` places apart."""

    @property
    def advance(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def batch_tokens(self) -> int: ...

    def batches_from(self, place: int) -> int:
        """Whole batches from there to the end."""

    def read_at(self, place: int) -> T:
        """The batch at a place, in the fastest way for storage that is not slow."""

    def begin_at(self, place: int, *, readers: bool) -> Reading[T]:
        """The same batch, begun now: the system is told of it, or `readers` read it."""

    def probe_at(self, place: int, sample: int = 0) -> int:
        """Read one sample of that batch by itself, and give the number of its tokens."""


class _Begun(NamedTuple, Generic[T]):
    place: int
    reading: Reading[T]


class LookAhead(Generic[T]):
    """The batches of a `Source` in order, read directly or, while storage is slow, begun 8 before their turn.

    Each must be asked for with its place; another place than the next drops what was begun. For one thread at
    a time; in a forked child, or unpickled, it begins anew.
    """

    def __init__(self) -> None:
        self._storage = SlowStorage(_DEPTH)
        self._begun: deque[_Begun[T]] = deque()
        self._pid: int | None = None  # the process that began; None before the first read
        self._quick = 0.0  # seconds of a batch that did not wait

    @property
    def active(self) -> bool:
        """Whether batches are begun ahead now, or were before."""
        return self._storage.way is not Way.DIRECT or bool(self._begun)

    def read(self, source: Source[T], place: int) -> T:
        """The batch at `place`."""
        if self._storage.way is Way.DIRECT and not self._begun and self._pid is not None:
            started = time.perf_counter()
            batch = source.read_at(place)
            seconds = time.perf_counter() - started
            if seconds <= self._quick and not self._storage.in_doubt:
                return batch  # what is usual, with nothing else to do
            self._storage.note(seconds, source.batch_tokens)
        else:
            batch = self._read_begun(source, place)
        if self._storage.way is not Way.DIRECT:
            self._begin_next(source, place + source.advance)
        return batch

    def drop(self) -> None:
        """Forget what was begun: another place is read next."""
        if self._pid == forks.pid:
            for begun in self._begun:
                begun.reading.drop()
        self._begun.clear()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_begun": deque(), "_pid": None}

    def _read_begun(self, source: Source[T], place: int) -> T:
        """As `read`, where the storage is slow or may be."""
        if self._pid != forks.pid:
            self._begun.clear()  # a parent's jobs are nobody's here
            if self._pid is None:
                self._probe_first(source, place)
            self._pid = forks.pid
        if self._begun and self._begun[0].place != place:
            self.drop()
        if self._begun:
            reading = self._begun.popleft().reading
        elif self._storage.way is Way.DIRECT:
            return source.read_at(place)
        else:
            reading = source.begin_at(place, readers=self._storage.way is Way.READERS)
        started = time.perf_counter()
        batch = reading.result()
        self._storage.note(time.perf_counter() - started, source.batch_tokens)
        return batch

    def _probe_first(self, source: Source[T], place: int) -> None:
        """Read a sample or two, to know what one costs. The first one may open a file, too."""
        self._quick = quick_seconds(source.batch_tokens)
        for sample in range(min(2, source.rows)):
            started = time.perf_counter()
            source.probe_at(place, sample)
            self._storage.note_first(time.perf_counter() - started, source.rows)
            if self._storage.way is Way.DIRECT:
                return

    def _begin_next(self, source: Source[T], place: int) -> None:
        """Begin the next batches that are not, up to `_DEPTH` from `place` on, a few at a time."""
        for _ in range(_AT_ONCE):
            ahead = place + len(self._begun) * source.advance
            if len(self._begun) == _DEPTH or source.batches_from(ahead) < 1:
                return
            try:
                if self._storage.wants_probe():
                    started = time.perf_counter()
                    tokens = source.probe_at(ahead)
                    self._storage.note_probe(time.perf_counter() - started, tokens)
                readers = self._storage.way is Way.READERS
                self._begun.append(_Begun(ahead, source.begin_at(ahead, readers=readers)))
            except UserError:
                return  # it is raised when that batch's turn comes
