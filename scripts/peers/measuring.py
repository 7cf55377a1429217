"""What is measured of one way of reading, in forks of a process that has imported nothing but torch."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from peers import BATCH_SIZE, BATCH_TOKENS, SEQ_LEN, TOKENS_FILE, Pair, Reader, floor
from peers.forks import in_fork
from peers.own_pages import own_pages
from peers.table import IN_ORDER, Peer

STARTS = 9
RESUMES = 9  # as far as they fit into 5 s
WINDOWS = 5
COMPARED = 3  # batches behind a resume


class Task(NamedTuple):
    """A way of reading in one order, with `seconds` for each of its windows."""

    peer: Peer
    order: str
    folder: Path
    seconds: float
    log: Path


def measure(task: Task) -> dict[str, Any]:
    """Everything of one row. Runs in a fork of its own, and forks again once the library is imported."""
    before = anonymous_mb()
    module = task.peer.imported()
    for name in in_fork(_imported_late, task, log=task.log):
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # a full collection in one fork and not in another would be chance
    row: dict[str, Any] = {"how": " ".join(getattr(module, task.peer.reader).__doc__.split())}
    row["first_batch_ms"] = [in_fork(_first_batch, task, log=task.log) for _ in range(STARTS)]
    row |= in_fork(_memory, task, before, log=task.log)
    reading = in_fork(_read, task, log=task.log)
    saved = reading.pop("saved")
    return row | reading | (_resume(task, saved) if saved else {})


def _imported_late(task: Task) -> list[str]:
    """The modules that are imported when files are opened and read, in their order."""
    there = set(sys.modules)
    reader = _open(task)
    reader.next_batch()
    reader.close()
    return [name for name in sys.modules if name not in there]


def _open(task: Task) -> Reader:
    return task.peer.make(task.folder, task.order)


def _first_batch(task: Task) -> float:
    """Milliseconds from nothing open to a batch."""
    own_pages()
    start = time.perf_counter()
    reader = _open(task)
    batch = reader.next_batch()
    elapsed = time.perf_counter() - start
    _check(batch)
    reader.close()
    return 1000 * elapsed


def _check(batch: Pair) -> None:
    inputs, targets = batch
    for tensor in batch:
        assert tensor.dtype == torch.int64, tensor.dtype
        assert tensor.shape == (BATCH_SIZE, SEQ_LEN), tensor.shape
    assert torch.equal(inputs[:, 1:], targets[:, :-1]), "targets are not the tokens behind the inputs"


def _memory(task: Task, before: float) -> dict[str, Any]:
    """The most anonymous memory that the import and half a second of reading take; the workers' own."""
    imported = anonymous_mb() - before
    reader = _open(task)
    most, children = 0.0, []
    for _ in range(5):
        rate(reader.next_batch, min(0.1, task.seconds))
        most = max(most, anonymous_mb())
        children = _descendants(os.getpid())
    workers = sum(_rollup_mb(pid, "Private_Clean:", "Private_Dirty:") for pid in children)
    reader.close()
    return {
        "anonymous_mb": most - before,
        "imported_mb": imported,
        "children": len(children),
        "children_mb": workers,
    }


def anonymous_mb() -> float:
    """Of this process: memory that no file stands behind."""
    return _rollup_mb(os.getpid(), "Anonymous:")


def _rollup_mb(pid: int, *keys: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(keys)) / 1000


def _descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return children + [grandchild for child in children for grandchild in _descendants(child)]


def rate(next_batch: Callable[[], Any], seconds: float) -> float:
    """Tokens per second, over `seconds` and one batch at least."""
    batches, elapsed, start = 0, 0.0, time.perf_counter()
    while batches == 0 or elapsed < seconds:
        next_batch()
        batches += 1
        elapsed = time.perf_counter() - start
    return batches * BATCH_TOKENS / elapsed


def _read(task: Task) -> dict[str, Any]:
    """Speeds, each next to the floor's; and states with the batches that follow them."""
    tokens = np.fromfile(task.folder / "ours" / TOKENS_FILE, np.uint16)
    floor_of = floor.copying if task.order == IN_ORDER else floor.gathering
    floor_batch = floor_of(tokens, BATCH_SIZE, SEQ_LEN)
    epoch = len(tokens) // BATCH_TOKENS
    early, late = min(20, epoch // 2), epoch * 9 // 10
    reader = _open(task)
    saved = [_early_state(reader, early)]
    floors, speeds = [], []
    for _ in range(WINDOWS):
        floors.append(rate(floor_batch, task.seconds / 2))
        speeds.append(rate(reader.next_batch, task.seconds))
    reader.close()
    if saved[0] is None:
        return {"floor": floors, "tokens_per_s": speeds, "saved": None}
    saved.append(_late_state(task, late))
    return {"floor": floors, "tokens_per_s": speeds, "saved": saved}


def _early_state(reader: Reader, batches: int) -> tuple[bytes, list[str]] | None:
    """The state behind so many batches, and the digests of those that follow; None without a state."""
    for _ in range(batches):
        reader.next_batch()
    state = reader.state()
    return None if state is None else (state, [_digest(reader.next_batch()) for _ in range(COMPARED)])


def _late_state(task: Task, batches: int) -> tuple[bytes, list[str]]:
    """The same far into an epoch. Where the library tells a state without reading, nothing is compared."""
    reader = _open(task)
    reader.next_batch()
    state = reader.state_after(batches)
    digests: list[str] = []
    if state is None:
        for _ in range(batches - 1):
            reader.next_batch()
        state = reader.state()
        assert state is not None
        digests = [_digest(reader.next_batch())]
    reader.close()
    return state, digests


def _digest(batch: Pair) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in batch)).hexdigest()


def _resume(task: Task, saved: list[tuple[bytes, list[str]]]) -> dict[str, Any]:
    """Milliseconds to the batch at 90 % of an epoch, in new processes and on what is open; was it right?

    Where a seek on what is open comes to another batch than a new process does, it has no time.
    """
    (early, expected), (late, expected_late) = saved
    new: list[float] = []
    still_open: list[float] = []
    exact = in_fork(_digests_behind, task, early, log=task.log) == expected
    while len(new) < RESUMES and sum(new) < 5000:
        in_new, in_same, digests = in_fork(_resume_once, task, late, log=task.log)
        exact &= expected_late in ([], digests[:1])
        new.append(in_new)
        still_open += [in_same] if digests[0] == digests[1] else []
    return {
        "resume_ms": new,
        "seek_ms": still_open,
        "state_bytes": len(late),
        "exact": exact,
    }


def _digests_behind(task: Task, state: bytes) -> list[str]:
    reader = _open(task)
    reader.seek(state)
    digests = [_digest(reader.next_batch()) for _ in range(COMPARED)]
    reader.close()
    return digests


def _resume_once(task: Task, state: bytes) -> tuple[float, float, list[str]]:
    own_pages()
    start = time.perf_counter()
    reader = _open(task)
    reader.seek(state)
    batch = reader.next_batch()
    resumed = 1000 * (time.perf_counter() - start)
    digests = [_digest(batch)]
    start = time.perf_counter()
    reader.seek(state)
    batch = reader.next_batch()
    sought = 1000 * (time.perf_counter() - start)
    digests.append(_digest(batch))
    reader.close()
    return resumed, sought, digests
