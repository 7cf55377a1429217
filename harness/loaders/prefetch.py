"""A loader read ahead by one thread, with nothing else changed: same batches, same cursors, same errors."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.loaders.batch import Batch, Loader
from harness.storage import forks

# Seconds to wait for a read in progress before a daemon thread is left to the end of the process.
_CLOSE_TIMEOUT = 10.0

# A step that takes longer is worth waking the thread for. Handing a batch from thread to thread was measured
# at 35 us, more than reading it from the page cache; so a loop that only reads is better off without.
_STEP = 200e-6

# So is a first read that takes longer, before any step: it waited for storage, and the second would. From the
# page cache it takes 1 to 3 ms, files opened and mapped.
_WAITED = 5e-3


class _Raised(NamedTuple):
    """What the loader raised, to be raised where a batch is asked for."""

    error: BaseException
    traceback: TracebackType | None


class _Shared:
    """What the thread shares with whoever asks; after a restart there is another, unknown to it."""

    def __init__(self) -> None:
        self.reading = threading.RLock()  # which knows its owner
        self.ready: SimpleQueue[Batch | _Raised] = SimpleQueue()
        self.wanted: SimpleQueue[None] = SimpleQueue()
        self.stopped = False  # no `Event`: an interrupt can leave one locked


class _ReadAhead:
    """The batches of `read` in order: up to `depth` of them read by a thread, the others when asked for.

    Who reads holds `reading`, and a thread that holds it puts one item into `ready`. So whoever asks takes
    what is ready, waits for the read in progress, or reads by itself. It wakes the thread, which then reads
    until `depth` batches are ready, after a step that took long and after a first read that did: a training
    loop finds its batches ready, and a loop that only reads pays for no hand-over. The first exception is the
    last item.

    The thread knows nothing of the `Prefetcher`, so that one can be collected and stop it. So an exception is
    not kept once it was handed out: its traceback leads to whoever asked.
    """

    def __init__(self, read: Callable[[], Batch], depth: int) -> None:
        self._read = read
        self._depth = depth
        self._begin()

    def _begin(self) -> None:
        self._shared = _Shared()
        self._over = False  # the last item was read
        self._left = math.inf  # when the last batch was handed out
        self._thread: threading.Thread | None = None
        self.pid = forks.pid

    def get(self) -> Batch | _Raised:
        """The next batch in order, or the loader's exception; nothing may be asked for after that."""
        asked = perf_counter()
        if self._thread is None:
            item = self._next()
        elif self._shared.reading.acquire(blocking=False):
            try:
                item = self._next() if self._shared.ready.empty() else self._shared.ready.get()
            finally:
                _let_go(self._shared.reading)
        else:
            item = self._shared.ready.get()
        now = perf_counter()
        if asked - self._left > _STEP or (self._left == math.inf and now - asked > _WAITED):
            self._wake()
        self._left = now
        return item

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, after the read in progress; it waits for nothing else.

        In a forked child there is no thread to end, and a queue's lock may be held for ever.
        """
        if self._thread is None or self.pid != forks.pid:
            return
        reading = self._shared.reading
        self._shared.stopped = True
        self._shared.wanted.put(None)
        if self._thread is not threading.current_thread():
            _let_go(reading)
            # `join` alone would not do: one that was interrupted takes the thread for ended.
            if reading.acquire(timeout=-1 if timeout is None else timeout):
                reading.release()
            if self._thread.is_alive():
                self._thread.join(timeout)

    def restart(self) -> bool:
        """End the thread, forget what is ready or was raised; whether more may be read than handed out."""
        if self._thread is None and not self._over and self.pid == forks.pid:
            self._left = math.inf
            return False
        self.stop()
        self._begin()
        return True

    def _wake(self) -> None:
        if self._over:
            return
        self._shared.wanted.put(None)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._shared,), name="prefetch", daemon=True
            )
            self._thread.start()

    def _run(self, shared: _Shared) -> None:
        while not shared.stopped:
            shared.wanted.get()
            while not (shared.stopped or self._over) and shared.ready.qsize() < self._depth:
                with shared.reading:
                    if not (shared.stopped or self._over):
                        shared.ready.put(self._next())
        shared.ready.put(_Raised(_closed(), None))  # to whoever waits while another thread closes

    def _next(self) -> Batch | _Raised:
        try:
            return self._read()
        except BaseException as error:
            self._over = True
            return _Raised(error, error.__traceback__)


def _let_go(reading: threading.RLock) -> None:
    """Unlock what this thread still locks: a signal's handler may have raised right after, or closed."""
    with contextlib.suppress(RuntimeError):
        reading.release()


class Prefetcher:
    """`loader` read up to `depth` batches ahead by a daemon thread; depth 0 reads when asked, without one.

    The cursor is that of the last batch handed out, never of one read ahead. The thread starts with the first
    step that takes long, or with the first read where that does; a loop that only reads has none. An
    exception of the loader comes after the batches before it, as it is, and again at each further call until
    `reset`, `start_epoch` or `load_state_dict`. Nobody else may use `loader` meanwhile.

    `pin`: the batches lie in page-locked memory, for CUDA.
    """

    def __init__(self, loader: Loader, depth: int, *, pin: bool = False) -> None:
        if type(depth) is not int or depth < 0:
            raise UserError(f"loader.prefetch={depth!r} must be an integer of at least 0 (batches ahead)")
        self.batch_size = loader.batch_size
        self.seq_len = loader.seq_len
        self._loader = loader
        self._read = partial(_pinned, loader) if pin else loader.next_batch
        self._cursor = loader.state_dict()
        self._ahead = _ReadAhead(self._read, depth) if depth else None
        if self._ahead is not None:
            # Also at exit: a thread that is still copying while the interpreter goes down can crash it.
            weakref.finalize(self, self._ahead.stop, _CLOSE_TIMEOUT)
        self._raised: _Raised | None = None
        self._torn = False  # whether the loader may be at another place than the cursor and what is ready say
        self._closed = False

    @property
    def position(self) -> int:
        """The position after the last batch handed out."""
        position: int = self._cursor["position"]
        return position

    @property
    def batches_per_epoch(self) -> int:
        """As the loader's."""
        return self._loader.batches_per_epoch

    @property
    def dropped_tokens(self) -> int:
        """As the loader's."""
        return self._loader.dropped_tokens

    @property
    def skipped_tokens(self) -> int:
        """As the loader's."""
        return self._loader.skipped_tokens

    def next_batch(self) -> Batch:
        """The loader's next batch; StopIteration at the end of the epoch. Raises what the loader raises."""
        if self._closed:
            raise _closed()
        ahead = self._ahead
        if self._torn or (ahead is not None and ahead.pid != forks.pid):
            self._rewind()
        if self._raised is None:
            try:
                item = self._read() if ahead is None else ahead.get()
                if not isinstance(item, _Raised):
                    self._cursor = dict(item.cursor)
                    return item
                self._raised = item
            except BaseException:
                self._torn = True
                raise
        raised = self._raised
        # An interrupt may have come in the middle of anything; it was no error of the loader.
        self._torn = isinstance(raised.error, KeyboardInterrupt)
        raise raised.error.with_traceback(raised.traceback)

    def reset(self) -> None:
        """Back to position 0 of the same epoch."""
        self._move(self._loader.reset)

    def start_epoch(self, epoch: int) -> None:
        """To position 0 of `epoch`."""
        self._move(partial(self._loader.start_epoch, epoch))

    def state_dict(self) -> dict[str, Any]:
        """The cursor of the last batch handed out."""
        return dict(self._cursor)

    def validate_state_dict(self, state: dict[str, Any]) -> int:
        """As the loader's; what is read ahead stays."""
        return self._loader.validate_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`; what was read ahead is dropped."""
        self._move(partial(self._loader.load_state_dict, state))

    def close(self) -> None:
        """Stop the thread, whatever it waits for. The cursor can still be read, batches can not."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.stop(_CLOSE_TIMEOUT)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, go: Callable[[], None]) -> None:
        self._rewind()
        self._torn = True
        go()
        self._cursor = self._loader.state_dict()
        self._torn = False

    def _rewind(self) -> None:
        """Take the loader back to what was handed out: a refused or interrupted call skips nothing."""
        torn, self._torn = self._torn, True
        if (self._ahead is not None and self._ahead.restart()) or torn:
            self._loader.load_state_dict(self._cursor)
        self._raised = None
        self._torn = False


def _closed() -> RuntimeError:
    return RuntimeError("the loader is closed")


def _pinned(loader: Loader) -> Batch:
    """The next batch in page-locked memory, which a device copies from while the host goes on."""
    batch = loader.next_batch()
    return batch._replace(inputs=batch.inputs.pin_memory(), targets=batch.targets.pin_memory())
