"""Chunks to tokens in order, in this process or in several, with a bounded number under way."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import preemption
from harness.errors import UserError
from harness.prepare.chunks import Chunk
from harness.prepare.documents import Encoded, Rules, encode_chunk
from harness.prepare.tokenizers import Tokenizer, load_tokenizer

PENDING_PER_WORKER = 2

_worker_tokenizer: Tokenizer | None = None
_worker_rules: Rules | None = None


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_all(
    chunks: Iterator[Chunk], tokenizer: Tokenizer | None, rules: Rules, workers: int, folder: Path
) -> Iterator[tuple[Chunk, Encoded]]:
    """Each chunk with its tokens, in the chunks' order, whatever the number of `workers`.

    Worker processes load the tokenizer from the set in `folder`; at most `PENDING_PER_WORKER`
    chunks a worker are under way, so memory is bounded.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk, tokenizer, rules)
        return
    section = {"tokenizer": tokenizer.manifest_section()} if tokenizer is not None else None
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(str(folder), section, rules),
    )
    pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            # The first submit starts the workers; one that is told its work by half ends in a traceback.
            with preemption.holding(), _interrupts_held():
                pending.append((chunk, pool.submit(_encode_in_worker, chunk)))
            if len(pending) >= PENDING_PER_WORKER * workers:
                yield _first(pending)
        while pending:
            yield _first(pending)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process ended before its work was done, most often because memory ran out. What is "
            f"written stays: run the same command again, with fewer processes: prepare.workers={workers // 2}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _first(pending: deque[tuple[Chunk, Future[Encoded]]]) -> tuple[Chunk, Encoded]:
    chunk, future = pending.popleft()
    return chunk, future.result()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, not even before `_start_worker` runs in them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker(folder: str, section: dict[str, Any] | None, rules: Rules) -> None:
    """Runs once in each worker: the parent alone answers Ctrl-C, and no worker outlives it."""
    global _worker_tokenizer, _worker_rules
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer(folder, section) if section is not None else None
    _worker_rules = rules


def _end_with_parent() -> None:
    parent = multiprocessing.process.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    assert _worker_rules is not None
    return encode_chunk(chunk, _worker_tokenizer, _worker_rules)
