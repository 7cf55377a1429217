"""Preparations in processes that end themselves with SIGKILL at a chosen moment.

The processes are forked from a server that has everything imported. Nothing is waited for to reach the disk:
the kernel keeps what a killed process wrote, and fsync would be most of the time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import h5py  # noqa: F401  # so that the server has it

from harness.config import PrepareScriptConfig
from harness.prepare import chunks, pipeline, prepare
from harness.storage.verify import verify_set

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class Ended(NamedTuple):
    """A preparation that was not killed: how many moments it could have been killed at, and what it said."""

    moments: int
    digest: str
    said: list[str]


def prepare_killed(config: PrepareScriptConfig, moment: int) -> Ended | None:
    """Prepare in chunks of 2000 bytes, with a journal after each, until just before the `moment`-th fsync,
    rename, link or removal of a file; None where it came to that."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_prepare, args=(config, moment, theirs))
    child.start()
    theirs.close()
    try:
        ended: Ended | None = ours.recv()
    except EOFError:
        ended = None
    child.join(60)
    assert child.exitcode == (0 if ended else -signal.SIGKILL)
    return ended


def check_whole_or_absent(directory: Path) -> bool:
    """Whether there is a set of this name; all that its manifest names must be right."""
    if not directory.exists():
        return False
    found = verify_set(directory)
    assert found.ok, found.faults
    return True


def _prepare(config: PrepareScriptConfig, moment: int, result: Connection) -> None:
    chunks.CHUNK_BYTES, pipeline.JOURNAL_SECONDS = 2000, 0.0
    moments = 0
    said: list[str] = []

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object, **kwargs: object) -> object:
            nonlocal moments
            moments += 1
            if moments == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counting

    for name in ("replace", "rename", "unlink", "link"):
        setattr(os, name, counted(getattr(os, name)))
    os.fsync = counted(lambda fd: None)  # type: ignore[assignment]
    summary = prepare(config, report=said.append)
    result.send(Ended(moments, summary.digest, said))
