"""Which way a read goes: by what reads have cost, and never back and forth."""

from __future__ import annotations

from harness.storage.read_mode import ReadMode

ROWS = 64


class _Storage:
    """Reads at given costs: the part of a real one that `ReadMode` sees."""

    def __init__(self, direct: float, parallel: float) -> None:
        self.seconds = {False: direct, True: parallel}
        self.mode = ReadMode()
        self.ways: list[bool] = []

    def read(self, times: int = 1, extra: float = 0.0) -> list[bool]:
        """Seconds of every read are its way's and `extra`; returns the ways taken."""
        for _ in range(times):
            way = self.mode.choose(ROWS)
            self.mode.record(way, ROWS, self.seconds[way] + extra)
            self.ways.append(way)
        return self.ways[-times:]


def test_quick_reads_stay_direct() -> None:
    assert not any(_Storage(direct=50e-6, parallel=1e-6).read(1000))


def test_slow_reads_become_parallel_and_stay() -> None:
    storage = _Storage(direct=160e-3, parallel=20e-3)
    assert storage.read(3) == [False] * 3
    assert storage.read(200).count(False) <= 3


def test_slow_reads_that_threads_do_not_help_stay_direct() -> None:
    storage = _Storage(direct=10e-3, parallel=9e-3)
    assert storage.read(500).count(True) <= 3 + 500 * 0.06


def test_one_slow_read_changes_nothing() -> None:
    storage = _Storage(direct=50e-6, parallel=1e-6)
    storage.read(10)
    for _ in range(20):
        storage.read(extra=10.0)
        assert storage.read(9) == [False] * 9
    storage = _Storage(direct=160e-3, parallel=20e-3)
    storage.read(20)
    assert storage.mode.parallel
    storage.read(extra=10.0)
    storage.read(3)
    assert storage.mode.parallel


def test_trials_of_the_other_way_take_a_twentieth_of_the_time() -> None:
    storage = _Storage(direct=400e-3, parallel=3e-3)
    storage.read(10)
    ways = storage.read(20_000)
    trials = ways.count(False) * 400e-3
    assert 0 < trials <= 0.05 * ways.count(True) * 3e-3


def test_a_cache_that_has_become_warm_is_noticed() -> None:
    storage = _Storage(direct=40e-3, parallel=3e-3)
    storage.read(10)
    assert storage.mode.parallel
    storage.seconds = {False: 100e-6, True: 1e-3}
    storage.read(3000)
    assert storage.read(100) == [False] * 100


def test_a_cache_that_has_become_cold_is_noticed() -> None:
    storage = _Storage(direct=100e-6, parallel=1e-3)
    storage.read(100)
    storage.seconds = {False: 40e-3, True: 3e-3}
    storage.read(10)
    assert storage.mode.parallel
