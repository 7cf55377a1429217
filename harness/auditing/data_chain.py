"""The data chain: one hash over all batches that a run has trained on, in order.

`chain_0` is the 32 bytes of the set's `metadata_sha256`; `chain_k` is the SHA-256 of `chain_(k-1)` and the 32
bytes of step k's batch hash. A change of the data that was accepted at a resume is one more link, of the 32
bytes of the new digest. A chain that cannot be continued, because steps were trained without it, is absent
from there on. Whoever has the data and the run directory can compute it again (`harness.auditing.audit`).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from queue import Full, Queue
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from harness.loaders import Batch

_WAITING = 2  # batches handed over and not hashed yet; one more waits, so that memory stays bounded
_CLOSE_TIMEOUT = 10.0  # seconds for the batch in progress, then the daemon thread is left behind


def batch_sha256(batch: Batch) -> str:
    """SHA-256 over the inputs' and then the targets' int64 little-endian bytes, row by row, as hex."""
    return batch_digest(batch).hex()


def batch_digest(batch: Batch) -> bytes:
    """`batch_sha256` as 32 bytes. The batch may lie on any device, and need not be contiguous."""
    digest = hashlib.sha256()
    for tensor in (batch.inputs, batch.targets):
        array = np.ascontiguousarray(tensor.cpu().numpy())
        # No copy where the machine is little-endian: what is hashed are the array's own bytes.
        digest.update(array.astype("<i8", copy=False).reshape(-1).data)
    return digest.digest()


def link(chain: bytes, digest: bytes) -> bytes:
    """The chain with one more link, 32 bytes each: a step's batch, or a set that was accepted."""
    return hashlib.sha256(chain + digest).digest()


def first_value(metadata_sha256: str, trainer: dict[str, Any] | None) -> str | None:
    """Where a run's chain begins, as hex: at its data, or where the checkpoint's trainer.json left it.

    None where the checkpoint has no chain: steps were trained without one. `metadata_sha256` is that of the
    set which the run reads now.
    """
    if trainer is None:
        return metadata_sha256
    value: str | None = trainer.get("data_chain")
    if value is None or trainer["metadata_sha256"] == metadata_sha256:
        return value
    return link(bytes.fromhex(value), bytes.fromhex(metadata_sha256)).hex()


class DataChain:
    """Hashes the batches of a run in a daemon thread, while their steps are computed.

    `start`: the chain's value before the first batch, hex. None: there is no chain, `value` is None, and
    batches are hashed for `last_sha256` alone, and only with `hash_batches`. An error of the thread is raised
    by the next call of any kind. To be closed in a `finally`, or used as a context manager.
    """

    def __init__(self, start: str | None, *, hash_batches: bool = False) -> None:
        self._idle = start is None and not hash_batches
        self._chain = None if start is None else bytes.fromhex(start)
        self._last: bytes | None = None
        self._error: BaseException | None = None
        self._queue: Queue[Batch | None] = Queue(maxsize=_WAITING)
        self._thread: threading.Thread | None = None

    def add(self, batch: Batch) -> None:
        """Take in the batch of the next step; waits while two others are not hashed yet."""
        self._raise()
        if self._idle:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="data-chain", daemon=True)
            self._thread.start()
        self._queue.put(batch)

    def last_sha256(self) -> str:
        """The `batch_sha256` of the batch that was added last; waits for it."""
        self._wait()
        assert self._last is not None, "no batch was added yet"
        return self._last.hex()

    def value(self) -> str | None:
        """The chain after the batch that was added last, as hex; waits for it. None: there is no chain."""
        self._wait()
        return None if self._chain is None else self._chain.hex()

    def close(self) -> None:
        """End the thread; raises nothing, so that it hides no error."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(Full):
                self._queue.put(None, timeout=_CLOSE_TIMEOUT)
                thread.join(_CLOSE_TIMEOUT)

    def __enter__(self) -> DataChain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        self._queue.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                if self._error is None:  # after one, batches are only taken, so that nobody waits for ever
                    self._last = batch_digest(batch)
                    if self._chain is not None:
                        self._chain = link(self._chain, self._last)
            except BaseException as error:
                self._error = error
            finally:
                del batch  # not kept until the next one comes
                self._queue.task_done()
