"""How batches are read, by what reads have cost: slow storage is helped, quick storage is left alone."""

from __future__ import annotations

import pytest

from harness.loaders.slow_storage import SlowStorage, Way

QUICK, WAITS = 100e-6, 160e-3
DEPTH, ROWS, TOKENS = 8, 32, 32_768
PROBE = 5e-3


def _ways(storage: SlowStorage, seconds: dict[Way, float], reads: int, probe: float = PROBE) -> list[Way]:
    """The ways in which so many batches were read, each taking the seconds of its way."""
    ways = []
    for _ in range(reads):
        ways.append(storage.way)
        storage.note(seconds[storage.way], TOKENS)
        if storage.wants_probe():
            storage.note_probe(probe, 1024)
    return ways


def _every(seconds: float) -> dict[Way, float]:
    return dict.fromkeys(Way, seconds)


def test_reads_from_memory_stay_direct_however_busy_the_machine() -> None:
    storage = SlowStorage(DEPTH)
    storage.note_first(QUICK, ROWS)
    assert set(_ways(storage, _every(QUICK), 1000)) == {Way.DIRECT}
    for _ in range(50):
        assert set(_ways(storage, _every(WAITS), 2) + _ways(storage, _every(QUICK), 1)) == {Way.DIRECT}
    for _ in range(10):
        storage.note(3 * WAITS, 10**8)  # many tokens may take long
    assert storage.way is Way.DIRECT


def test_a_first_sample_that_waits_asks_for_hints_before_the_first_batch() -> None:
    storage = SlowStorage(DEPTH)
    storage.note_first(PROBE, ROWS)
    assert storage.way is Way.HINTS


def test_a_first_sample_that_waited_only_for_its_file_to_be_opened_asks_for_nothing() -> None:
    storage = SlowStorage(DEPTH)
    storage.note_first(PROBE, ROWS)
    storage.note_first(QUICK, ROWS)
    assert storage.way is Way.DIRECT


def test_three_reads_that_wait_ask_for_hints_which_go_on_while_they_help() -> None:
    storage = SlowStorage(DEPTH)
    seconds = {Way.DIRECT: WAITS, Way.HINTS: QUICK}
    assert _ways(storage, seconds, 3) == [Way.DIRECT] * 3
    assert set(_ways(storage, seconds, 10_000)) == {Way.HINTS}


@pytest.mark.parametrize("noticed", ["at the first sample", "after three reads"])
def test_hints_that_do_nothing_are_noticed_at_the_second_read_with_them(noticed: str) -> None:
    storage = SlowStorage(DEPTH)
    seconds = {Way.DIRECT: WAITS, Way.HINTS: WAITS, Way.READERS: QUICK}
    storage.note_first(PROBE if noticed == "at the first sample" else QUICK, ROWS)
    if noticed == "after three reads":
        _ways(storage, seconds, 3)
    assert _ways(storage, seconds, 3) == [Way.HINTS, Way.HINTS, Way.READERS]
    assert set(_ways(storage, seconds, 10_000)) == {Way.READERS}


def test_batches_of_one_sample_tell_of_hints_only_once_they_were_begun_long_before() -> None:
    storage = SlowStorage(DEPTH)
    storage.note_first(PROBE, 1)
    seconds = {Way.HINTS: PROBE, Way.READERS: QUICK}
    assert _ways(storage, seconds, DEPTH + 3) == [Way.HINTS] * (DEPTH + 3)
    assert set(_ways(storage, seconds, 100)[1:]) == {Way.READERS}


def test_hints_that_help_too_little_are_compared_with_readers_and_the_cheaper_one_stays() -> None:
    for readers, stays in ((2e-3, Way.READERS), (19e-3, Way.HINTS)):
        storage = SlowStorage(DEPTH)
        storage.note_first(PROBE, ROWS)
        seconds = {Way.HINTS: 20e-3, Way.READERS: readers}
        ways = _ways(storage, seconds, 60)
        assert ways.count(Way.READERS) >= DEPTH + 3
        assert set(ways[30:]) == {stays}
        assert set(_ways(storage, seconds, 4000)) == {stays}


def test_hints_that_were_dropped_for_want_of_memory_give_way_to_readers() -> None:
    storage = SlowStorage(DEPTH)
    storage.note_first(PROBE, ROWS)
    _ways(storage, _every(QUICK), 500)
    assert storage.way is Way.HINTS
    _ways(storage, {Way.HINTS: WAITS, Way.READERS: QUICK}, 100)
    assert storage.way is Way.READERS


@pytest.mark.parametrize("hinted", [QUICK, WAITS], ids=["hints", "readers"])
def test_storage_that_has_become_quick_is_read_directly_again(hinted: float) -> None:
    storage = SlowStorage(DEPTH)
    storage.note_first(PROBE, ROWS)
    helped = {Way.DIRECT: QUICK, Way.HINTS: hinted, Way.READERS: QUICK}
    assert Way.DIRECT not in _ways(storage, helped, 500)
    assert Way.DIRECT not in _ways(storage, helped, 96, probe=QUICK)
    _ways(storage, helped, 96, probe=QUICK)
    assert storage.way is Way.DIRECT
    assert set(_ways(storage, _every(QUICK), 1000)) == {Way.DIRECT}
    _ways(storage, {Way.DIRECT: WAITS, Way.HINTS: QUICK}, 4)
    assert storage.way is Way.HINTS
