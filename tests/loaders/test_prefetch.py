"""Reading ahead changes nothing that can be seen: batches, cursors, errors, and it always ends."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from harness.errors import UserError
from harness.loaders import Batch, Prefetcher, TokenDataLoader, prefetch
from harness.storage import TokenStore, open_store
from tests.helpers_sets import write_set

DEPTHS = [0, 1, 8]


@pytest.fixture(params=[0.0, None, math.inf], ids=["read ahead", "as it happens", "read when asked"])
def _any_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        _wake_after(request.param, monkeypatch)


@pytest.fixture
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    _wake_after(0.0, monkeypatch)


def _wake_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wake the thread after steps and a first read of so many seconds."""
    monkeypatch.setattr(prefetch, "_STEP", seconds)
    monkeypatch.setattr(prefetch, "_WAITED", seconds)


any_way = pytest.mark.usefixtures("_any_way")
read_ahead = pytest.mark.usefixtures("_ahead")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return open_store(write_set(tmp_path, {"train": [list(range(30)), list(range(30, 95))]}), "train")


def _drain(loader: TokenDataLoader | Prefetcher) -> list[Batch]:
    batches = []
    while True:
        try:
            batches.append(loader.next_batch())
        except StopIteration:
            return batches


def _same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) and a.cursor == b.cursor
        for a, b in zip(first, second, strict=True)
    )


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@any_way
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_depth_gives_the_same_batches_and_cursors(store: TokenStore, depth: int) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    with Prefetcher(TokenDataLoader(store, 2, 3), depth) as loader:
        for epoch in range(3):
            loader.start_epoch(epoch)
            assert _same(_drain(loader), plain)
            with pytest.raises(StopIteration):
                loader.next_batch()
            assert loader.position == 90


@read_ahead
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_cursor_is_that_of_the_last_batch_handed_out(store: TokenStore, depth: int) -> None:
    inner = TokenDataLoader(store, 2, 3)
    with Prefetcher(inner, depth) as loader:
        for step in range(1, 4):
            batch = loader.next_batch()
            _wait_until(lambda ahead=6 * (step + depth): inner.position >= min(ahead, 90))  # type: ignore[misc]
            assert loader.state_dict() == batch.cursor
            assert loader.position == 6 * step


@read_ahead
@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_batches_are_read_ahead(store: TokenStore, depth: int) -> None:
    inner = TokenDataLoader(store, 2, 3)
    with Prefetcher(inner, depth) as loader:
        loader.next_batch()
        _wait_until(lambda: inner.position == 6 * (1 + depth))
        time.sleep(0.05)
        assert inner.position == 6 * (1 + depth)


@any_way
@pytest.mark.parametrize("depth", DEPTHS)
def test_moving_with_batches_in_flight_skips_and_repeats_nothing(store: TokenStore, depth: int) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    with Prefetcher(TokenDataLoader(store, 2, 3), depth) as loader:
        taken = [loader.next_batch() for _ in range(5)]
        loader.reset()
        assert loader.position == 0
        assert _same([loader.next_batch() for _ in range(2)], plain[:2])
        loader.load_state_dict(taken[-1].cursor)
        assert loader.state_dict() == taken[-1].cursor
        assert _same([loader.next_batch()], plain[5:6])
        loader.start_epoch(1)
        assert _same(_drain(loader), plain)


@any_way
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_refused_call_skips_nothing(store: TokenStore, depth: int) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    with Prefetcher(TokenDataLoader(store, 2, 3), depth) as loader:
        loader.next_batch()
        with pytest.raises(UserError, match="seq_len: checkpoint 9, config 3"):
            loader.load_state_dict(loader.state_dict() | {"seq_len": 9})
        with pytest.raises(UserError, match="position: checkpoint 96"):
            loader.validate_state_dict(loader.state_dict() | {"position": 96})
        with pytest.raises(UserError, match="epoch=-1"):
            loader.start_epoch(-1)
        assert loader.position == 6
        assert _same(_drain(loader), plain[1:])


@any_way
@pytest.mark.parametrize("depth", DEPTHS)
def test_resume_from_any_cursor_gives_the_rest(store: TokenStore, depth: int) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    for step in (1, 7, 15):
        with Prefetcher(TokenDataLoader(store, 2, 3), depth) as loader:
            loader.load_state_dict(plain[step - 1].cursor)
            assert _same(_drain(loader), plain[step:])


@any_way
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_comes_in_its_place_as_it_is_and_stays(tmp_path: Path, depth: int) -> None:
    tokens = [*range(20), 99, *range(20)]
    write_set(tmp_path, {"train": [tokens]}, tokenizer={"vocab_size": 50})
    with Prefetcher(TokenDataLoader(open_store(tmp_path, "train"), 2, 3), depth) as loader:
        assert [loader.next_batch().cursor["position"] for _ in range(3)] == [6, 12, 18]
        for _ in range(3):
            with pytest.raises(UserError, match="token id 99 at position 20") as caught:
                loader.next_batch()
            assert "_refuse_id" in "".join(traceback.format_tb(caught.value.__traceback__))
            assert loader.position == 18
        loader.reset()
        assert loader.next_batch().inputs.tolist() == [[0, 1, 2], [3, 4, 5]]


@read_ahead
def test_close_ends_a_thread_that_waits_for_room(store: TokenStore) -> None:
    before = _threads()
    inner = TokenDataLoader(store, 2, 3)
    loader = Prefetcher(inner, 2)
    batch = loader.next_batch()
    _wait_until(lambda: inner.position == 18)
    assert len(_threads()) == len(before) + 1
    loader.close()
    loader.close()
    assert _threads() == before
    assert loader.state_dict() == batch.cursor
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_batch()


@read_ahead
def test_each_epoch_leaves_no_thread_behind(store: TokenStore) -> None:
    before = len(_threads())
    with Prefetcher(TokenDataLoader(store, 2, 3), 4) as loader:
        for epoch in range(5):
            loader.start_epoch(epoch)
            loader.next_batch()
            assert len(_threads()) == before + 1
    assert len(_threads()) == before


@read_ahead
def test_a_loader_that_is_dropped_without_close_takes_its_thread_along(store: TokenStore) -> None:
    before = len(_threads())
    loader = Prefetcher(TokenDataLoader(store, 2, 3), 2)
    loader.next_batch()
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert len(_threads()) == before


@any_way
def test_one_that_is_dropped_after_the_end_does_so_too(store: TokenStore) -> None:
    before = len(_threads())
    loader = Prefetcher(TokenDataLoader(store, 2, 3), 2)
    _drain(loader)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert len(_threads()) == before


@read_ahead
def test_nothing_is_read_and_no_thread_started_before_the_first_batch(store: TokenStore) -> None:
    before = len(_threads())
    inner = TokenDataLoader(store, 2, 3)
    with Prefetcher(inner, 4):
        assert len(_threads()) == before
        assert inner.position == 0
    with Prefetcher(inner, 0) as synchronous:
        synchronous.next_batch()
        assert len(_threads()) == before
        assert inner.position == 6


class _Reading(TokenDataLoader):
    """One whose reads take `seconds`, and are interrupted where they take longer than one can wait."""

    seconds = 0.0

    def next_batch(self) -> Batch:
        batch = super().next_batch()
        if self.seconds == math.inf:
            raise KeyboardInterrupt
        time.sleep(self.seconds)
        return batch


def test_a_loop_that_only_reads_has_no_thread(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _wake_after(10.0, monkeypatch)
    before = _threads()
    inner = TokenDataLoader(store, 2, 3)
    with Prefetcher(inner, 4) as loader:
        for _ in range(15):
            position = loader.next_batch().cursor["position"]
            assert inner.position == position
            assert _threads() == before


def test_a_first_read_or_a_step_that_takes_long_wakes_the_thread(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wake_after(0.05, monkeypatch)
    inner = _Reading(store, 2, 3)
    with Prefetcher(inner, 2) as loader:
        inner.seconds = 0.06
        loader.next_batch()
        _wait_until(lambda: inner.position == 18)
        inner.seconds = 0.0
        loader.reset()
        loader.next_batch()
        time.sleep(0.06)  # a step
        loader.next_batch()
        _wait_until(lambda: inner.position == 24)


@read_ahead
def test_a_read_in_progress_is_waited_for_and_not_done_twice(store: TokenStore) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    inner = _Reading(store, 2, 3)
    inner.seconds = 0.003
    for depth in (1, 2):
        with Prefetcher(inner, depth) as loader:
            loader.reset()
            assert _same(_drain(loader), plain)


class _SlowToLetGo:
    """A lock that the thread keeps a while longer than it means to."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        time.sleep(0.05)
        self._lock.release()


def _slow_to_let_go(loader: Prefetcher) -> None:
    ahead = loader._ahead
    assert ahead is not None
    ahead._shared.reading = _SlowToLetGo()  # type: ignore[assignment]


@read_ahead
def test_the_end_is_heard_again_while_the_thread_still_holds_its_lock(store: TokenStore) -> None:
    with Prefetcher(TokenDataLoader(store, 2, 3), 1) as loader:
        _slow_to_let_go(loader)
        _drain(loader)
        for _ in range(2):
            with pytest.raises(StopIteration):
                loader.next_batch()


@read_ahead
def test_one_who_waits_while_another_thread_closes_is_told(store: TokenStore) -> None:
    loader = Prefetcher(TokenDataLoader(store, 2, 3), 1)
    _slow_to_let_go(loader)
    loader.next_batch()
    ended: list[Exception] = []

    def ask() -> None:
        loader.next_batch()
        threading.Timer(0.01, loader.close).start()
        try:
            _drain(loader)
        except RuntimeError as error:
            ended.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(30)
    assert [str(error) for error in ended] == ["the loader is closed"]


@any_way
@pytest.mark.parametrize("move", [Prefetcher.next_batch, Prefetcher.reset])
def test_an_interrupt_skips_and_repeats_nothing_wherever_it_comes(
    store: TokenStore, move: Callable[[Prefetcher], object]
) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    before = sys.gettrace()
    for place in range(10_000):
        loader = Prefetcher(TokenDataLoader(store, 2, 3), 2)
        loader.next_batch()
        left = iter(range(place))

        def trace(frame: FrameType, event: str, _: object, left: Iterator[int] = left) -> Any:
            if frame.f_code.co_filename != prefetch.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and next(left, None) is None:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            move(loader)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.settrace(before)
        first = loader.position // 6
        assert first in (0, 1, 2)
        assert _same([loader.next_batch() for _ in range(4)], plain[first : first + 4]), place
        loader.close()
        if not interrupted:
            return


@any_way
def test_a_read_that_is_interrupted_is_done_again(store: TokenStore) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    inner = _Reading(store, 2, 3)
    with Prefetcher(inner, 2) as loader:
        inner.seconds = math.inf
        with pytest.raises(KeyboardInterrupt):
            loader.next_batch()
        inner.seconds = 0.0
        assert loader.position == 0
        assert _same(_drain(loader), plain)


@any_way
def test_a_forked_child_continues_where_the_parent_was(store: TokenStore) -> None:
    plain = _drain(TokenDataLoader(store, 2, 3))
    with Prefetcher(TokenDataLoader(store, 2, 3), 4) as loader:
        loader.next_batch()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()

        def child() -> None:
            theirs.send([batch.inputs.tolist() for batch in _drain(loader)])
            loader.close()

        process = context.Process(target=child)
        process.start()
        assert ours.poll(60)
        expected = [batch.inputs.tolist() for batch in plain[1:]]
        assert ours.recv() == expected
        process.join(60)
        assert process.exitcode == 0
        assert [batch.inputs.tolist() for batch in _drain(loader)] == expected


@pytest.mark.parametrize("depth", [-1, True, 2.0])
def test_a_depth_that_cannot_be_is_refused(store: TokenStore, depth: int) -> None:
    with pytest.raises(UserError, match=r"loader\.prefetch="):
        Prefetcher(TokenDataLoader(store, 2, 3), depth)


_END_IN_FLIGHT = """
import sys
from harness.loaders import Prefetcher, TokenDataLoader
from harness.storage import open_store
from harness.loaders import prefetch
prefetch._WAITED = 0
loader = Prefetcher(TokenDataLoader(open_store(sys.argv[1], "train"), 2, 3), 2)
loader.next_batch()
"""


def test_a_process_ends_cleanly_with_batches_in_flight(store: TokenStore) -> None:
    command = [sys.executable, "-c", _END_IN_FLIGHT, str(store.manifest.directory)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
