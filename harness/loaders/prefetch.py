"""A loader read ahead by one thread, with nothing else changed: same batches, same cursors, same errors."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.loaders.batch import Batch, Loader

# Seconds to wait for a read in progress before a daemon thread is left to the end of the process.
_CLOSE_TIMEOUT = 10.0


class _Raised(NamedTuple):
    """What ended the thread, to be raised where a batch is asked for."""

    error: BaseException
    traceback: TracebackType | None


class _ReadAhead:
    """One thread that keeps up to `depth` batches ready and ends at the first exception.

    Each of `depth` tickets allows one read; handing a batch out gives its ticket back. The thread knows
    nothing of the `Prefetcher`, so that one can be collected and stop it.
    """

    def __init__(self, read: Callable[[], Batch], depth: int) -> None:
        self.pid = os.getpid()
        self._read = read
        self._ready: SimpleQueue[Batch | _Raised] = SimpleQueue()
        self._tickets: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._tickets.put(None)
        self._raised: _Raised | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def get(self) -> Batch:
        """The next batch in order, or, when all before it are handed out, the loader's exception."""
        item = self._raised or self._ready.get()
        if isinstance(item, _Raised):
            self._raised = item
            raise item.error.with_traceback(item.traceback)
        self._tickets.put(None)
        return item

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, after the read in progress; it waits for nothing else.

        In a forked child there is no thread to end, and a queue's lock may be held for ever.
        """
        if self.pid != os.getpid():
            return
        self._stopped = True
        self._tickets.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self._tickets.get()
            if self._stopped:
                return
            try:
                self._ready.put(self._read())
            except BaseException as error:
                self._ready.put(_Raised(error, error.__traceback__))
                return


class Prefetcher:
    """`loader` read `depth` batches ahead by a daemon thread; depth 0 reads when asked, without a thread.

    The cursor is that of the last batch handed out, never of one read ahead. The thread starts with the
    first `next_batch` and stops at the epoch's end. An exception of the loader comes after the batches before
    it, as it is, and again at each further call until `reset`, `start_epoch` or `load_state_dict`. Nobody
    else may use `loader` meanwhile.

    `pin`: the batches lie in page-locked memory, for CUDA.
    """

    def __init__(self, loader: Loader, depth: int, *, pin: bool = False) -> None:
        if type(depth) is not int or depth < 0:
            raise UserError(f"loader.prefetch={depth!r} must be an integer of at least 0 (batches ahead)")
        self.batch_size = loader.batch_size
        self.seq_len = loader.seq_len
        self._loader = loader
        self._read = partial(_pinned, loader) if pin else loader.next_batch
        self._depth = depth
        self._cursor = loader.state_dict()
        self._ahead: _ReadAhead | None = None
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
            raise RuntimeError("the loader is closed")
        batch = self._read() if self._depth == 0 else self._thread().get()
        self._cursor = dict(batch.cursor)
        return batch

    def reset(self) -> None:
        """Back to position 0 of the same epoch."""
        self._rewind()
        self._loader.reset()
        self._cursor = self._loader.state_dict()

    def start_epoch(self, epoch: int) -> None:
        """To position 0 of `epoch`."""
        self._rewind()
        self._loader.start_epoch(epoch)
        self._cursor = self._loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The cursor of the last batch handed out."""
        return dict(self._cursor)

    def validate_state_dict(self, state: dict[str, Any]) -> int:
        """As the loader's; what is read ahead stays."""
        return self._loader.validate_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`; what was read ahead is dropped."""
        self._rewind()
        self._loader.load_state_dict(state)
        self._cursor = self._loader.state_dict()

    def close(self) -> None:
        """Stop the thread, whatever it waits for. The cursor can still be read, batches can not."""
        self._closed = True
        self._stop_thread(_CLOSE_TIMEOUT)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _thread(self) -> _ReadAhead:
        if self._ahead is not None and self._ahead.pid != os.getpid():
            self._rewind()
        if self._ahead is None:
            self._ahead = _ReadAhead(self._read, self._depth)
            # Also at exit: a thread that is still copying while the interpreter goes down can crash it.
            self._finalizer = weakref.finalize(self, self._ahead.stop, _CLOSE_TIMEOUT)
        return self._ahead

    def _rewind(self) -> None:
        """Take the loader back to what was handed out, so that a refused call skips nothing."""
        if self._ahead is not None:
            self._stop_thread(timeout=None)
            self._loader.load_state_dict(self._cursor)

    def _stop_thread(self, timeout: float | None) -> None:
        if self._ahead is not None:
            self._finalizer.detach()
            self._ahead.stop(timeout)
            self._ahead = None


def _pinned(loader: Loader) -> Batch:
    """The next batch in page-locked memory, which a device copies from while the host goes on."""
    batch = loader.next_batch()
    return batch._replace(inputs=batch.inputs.pin_memory(), targets=batch.targets.pin_memory())
