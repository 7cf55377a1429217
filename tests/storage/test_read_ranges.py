"""Parts of a row copied side by side: exactly those, or an error before anything is copied."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.storage import read_ranges
from harness.storage.pool import READERS, WORKERS, _Pool, run_all


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_ranges_are_filled_and_all_else_stays(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["<u2", "<u4", ">i8", "?", "<f4"])))
    length = data.draw(st.integers(0, 60))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=24)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    ranges = [slice(*pair) for pair in data.draw(st.permutations(pairs))]
    source = np.random.default_rng(0).integers(0, 100, length).astype(dtype)
    destination = np.ones(length, dtype)
    expected = destination.copy()
    for item in ranges:
        expected[item] = source[item]
    read_ranges(source, destination, ranges)
    assert destination.tobytes() == expected.tobytes()


def test_offsets_count_elements_of_a_mapping_that_begins_within_a_file(tmp_path: Any) -> None:
    (tmp_path / "tokens").write_bytes(b"odd" + np.arange(100, dtype=np.uint32).tobytes())
    source = np.memmap(tmp_path / "tokens", np.uint32, "r", offset=3, shape=(100,))[10:90]
    destination = np.zeros(80, np.uint32)
    read_ranges(source, destination, [slice(70, 80), slice(5, 7)])
    assert destination[70:].tolist() == list(range(80, 90))
    assert destination[5:7].tolist() == [15, 16]
    assert np.count_nonzero(destination) == 12


def test_a_destination_within_a_larger_buffer_leaves_the_rest_of_it() -> None:
    buffer = np.full(12, 9, np.uint16)
    read_ranges(np.arange(8, dtype=np.uint16), buffer[2:10], [slice(0, 1), slice(7, None), slice(3, 3)])
    assert buffer.tolist() == [9, 9, 0, 9, 9, 9, 9, 9, 9, 7, 9, 9]
    read_ranges(np.arange(8, dtype=np.uint16), buffer[2:10], [slice(None)])
    assert buffer.tolist() == [9, 9, *range(8), 9, 9]


def test_no_ranges_change_nothing() -> None:
    destination = np.full(3, 7)
    read_ranges(np.arange(3), destination, [])
    assert destination.tolist() == [7, 7, 7]


def _read_only(length: int) -> np.ndarray[Any, Any]:
    array = np.zeros(length, np.uint16)
    array.setflags(write=False)
    return array


SOURCE = np.arange(10, dtype=np.uint16)
REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "narrower dtype": (SOURCE.astype(np.uint32), np.zeros(10, np.uint16), [], "holds uint32 and .* uint16"),
    "wider dtype": (SOURCE, np.zeros(10, np.uint32), [], "holds uint16 and the destination uint32"),
    "other byte order": (SOURCE, np.zeros(10, ">u2"), [], "holds uint16 and the destination >u2"),
    "shorter destination": (SOURCE, np.zeros(9, np.uint16), [], "has 10 elements and the destination 9"),
    "longer destination": (SOURCE, np.zeros(11, np.uint16), [], "has 10 elements and the destination 11"),
    "two dimensions": (
        SOURCE,
        np.zeros((2, 5), np.uint16),
        [],
        r"one dimension, not uint16 of shape \(2, 5\)",
    ),
    "source of two": (SOURCE.reshape(2, 5), np.zeros(2, np.uint16), [], "source must be .* one dimension"),
    "a list": (SOURCE, [0] * 10, [], "one dimension, not list"),
    "a list as source": ([0] * 10, np.zeros(10, np.uint16), [], "source must be .* not list"),
    "no list of ranges": (SOURCE, np.zeros(10, np.uint16), None, "ranges must be a list of slices, not None"),
    "read-only": (SOURCE, _read_only(10), [], "must be contiguous and writable"),
    "every second element": (SOURCE, np.zeros(20, np.uint16)[::2], [], "must be contiguous and writable"),
    "backwards": (SOURCE, np.zeros(10, np.uint16)[::-1], [], "must be contiguous and writable"),
    "itself": (SOURCE[:5], SOURCE[3:8], [], "lie in the same memory"),
    "overlap": (SOURCE, None, [slice(4, 8), slice(0, 5)], r"\[0, 5\) and \[4, 8\) overlap"),
    "the same twice": (SOURCE, None, [slice(4, 8), slice(4, 8)], r"\[4, 8\) and \[4, 8\) overlap"),
    "one within another": (SOURCE, None, [slice(0, 9), slice(2, 3)], r"\[0, 9\) and \[2, 3\) overlap"),
    "a step": (SOURCE, None, [slice(0, 4), slice(4, 8, 2)], r"slice\(4, 8, 2\) is no range of adjacent"),
    "beyond the end": (
        SOURCE,
        None,
        [slice(0, 4), slice(4, 11)],
        r"slice\(4, 11, None\) is not inside \[0, 10\)",
    ),
    "negative": (SOURCE, None, [slice(-2, None)], r"is not inside \[0, 10\)"),
    "reversed": (SOURCE, None, [slice(5, 4)], r"is not inside \[0, 10\)"),
    "no integers": (SOURCE, None, [slice(0.0, 4)], r"is not inside \[0, 10\)"),
    "true": (SOURCE, None, [slice(True, 4)], r"is not inside \[0, 10\)"),
    "a tuple": (SOURCE, None, [(0, 4)], r"\(0, 4\) is no range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_exactly_is_refused_before_anything_is(name: str) -> None:
    source, destination, ranges, expected = REFUSED[name]
    untouched = destination is None
    if untouched:
        destination = np.full(10, 7, np.uint16)
    with pytest.raises(UserError, match=expected):
        read_ranges(source, destination, [slice(9, 10), *ranges] if name == "negative" else ranges)
    if untouched:
        assert destination.tolist() == [7] * 10


class _Source:
    """Elements `0..n-1` that cost a moment each time, with bad ranges."""

    dtype = np.dtype(np.int64)

    def __init__(self, length: int, bad: tuple[int, ...] = ()) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def read_into(self, start: int, out: np.ndarray[Any, Any]) -> None:
        time.sleep(0.02 if start in self.bad else 0.04)
        if start in self.bad:
            raise OSError(f"bad sector at {start}")
        out[:] = np.arange(start, start + len(out))


def test_a_source_that_is_not_in_memory_fills_the_ranges() -> None:
    destination = np.full(40, -1)
    read_ranges(_Source(40), destination, [slice(30, 33), slice(0, 4)])
    expected = np.full(40, -1)
    expected[30:33], expected[:4] = range(30, 33), range(4)
    np.testing.assert_array_equal(destination, expected)
    with pytest.raises(UserError, match="holds int64 and the destination uint16"):
        read_ranges(_Source(40), np.zeros(40, np.uint16), [slice(0, 4)])


def test_the_first_cause_is_reported_when_all_copies_have_ended() -> None:
    destination = np.full(40, -1)
    ranges = [slice(start, start + 2) for start in range(0, 40, 2)]
    with pytest.raises(OSError, match="bad sector at 4") as caught:
        read_ranges(_Source(40, bad=(4, 10, 22)), destination, ranges)
    assert caught.value.__notes__ == ["3 of 20 reads failed; this is the first"]
    for item in ranges:
        expected = [-1, -1] if item.start in (4, 10, 22) else [item.start, item.start + 1]
        assert destination[item].tolist() == expected
    before = destination.copy()
    time.sleep(0.1)
    np.testing.assert_array_equal(destination, before)


def test_copies_run_eight_at_once_in_one_pool() -> None:
    """Eight jobs that wait for one another end only if all eight run at once; a second pool never is."""
    barrier = threading.Barrier(WORKERS)
    for _ in range(2):
        names: list[str] = []

        def job(names: list[str] = names) -> None:
            barrier.wait(timeout=30)
            names.append(threading.current_thread().name)

        run_all([job] * WORKERS)
        assert len(set(names)) == WORKERS == 8
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("read-")]
    assert WORKERS <= len(threads) <= READERS  # more than eight only where reads were begun ahead, too


def test_an_interrupt_leaves_no_copy_under_way() -> None:
    begun: list[int] = []
    ended: list[int] = []

    def job(index: int) -> None:
        begun.append(index)
        if index == 20:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        ended.append(index)

    with pytest.raises(KeyboardInterrupt):
        run_all([partial(job, index) for index in range(100)])
    assert sorted(begun) == sorted(ended), "a job was still running"
    assert len(begun) < 100, "jobs that had not begun were dropped"


def test_a_thread_that_could_not_be_started_is_started_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fresh, done = _Pool(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            fresh.grow(1)
    fresh.grow(1)
    fresh.queue.put(done.set)
    assert done.wait(10)


def test_use_fork_and_use_again_in_the_child() -> None:
    source, destination = np.arange(1000), np.zeros(1000, np.int64)
    ranges = [slice(start, start + 10) for start in range(0, 1000, 10)]
    read_ranges(source, destination, ranges)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        signal.alarm(5)
        destination[:] = 0
        read_ranges(source, destination, ranges)
        theirs.send(bool((destination == source).all()))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    assert ours.recv()
    process.join(10)
    assert process.exitcode == 0
    destination[:] = 0
    read_ranges(source, destination, ranges)
    np.testing.assert_array_equal(destination, source)
