"""Preparations and training runs in processes that end themselves with SIGKILL at a chosen moment.

The processes are forked from a server that has everything imported. Nothing is waited for to reach the disk:
the kernel keeps what a killed process wrote, and fsync would be most of the time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from harness.config import PrepareScriptConfig, TrainConfig
from harness.launch import launch
from harness.prepare import chunks, pipeline, prepare
from harness.storage.verify import verify_set
from tests.helpers_forks import CONTEXT


class Ended(NamedTuple):
    """A preparation that was not killed: how many moments it could have been killed at, and what it said."""

    moments: int
    digest: str
    said: list[str]


def prepare_killed(config: PrepareScriptConfig, moment: int) -> Ended | None:
    """Prepare in chunks of 2000 bytes, with a journal after each, until just before the `moment`-th fsync,
    rename, link or removal of a file; None where it came to that."""
    ended = _killed(partial(_prepare, config), moment)
    return Ended(ended[0], *ended[1]) if ended else None


def train_killed(config: TrainConfig, path: Path, moment: int) -> int | None:
    """Run `config` in `path` until just before the `moment`-th fsync, rename or removal of a file or folder;
    None where it came to that, else how many such moments there were."""
    ended = _killed(partial(_train, config, path), moment)
    return ended[0] if ended else None


def check_whole_or_absent(directory: Path) -> bool:
    """Whether there is a set of this name; all that its manifest names must be right."""
    if not directory.exists():
        return False
    found = verify_set(directory)
    assert found.ok, found.faults
    return True


def _killed(work: Callable[[], Any], moment: int) -> tuple[int, Any] | None:
    """What a process that did `work` to its end counted and returned; None where it was killed."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_count_moments, args=(work, moment, theirs))
    child.start()
    theirs.close()
    try:
        ended: tuple[int, Any] | None = ours.recv()
    except EOFError:
        ended = None
    child.join(60)
    assert child.exitcode == (0 if ended else -signal.SIGKILL)
    return ended


def _count_moments(work: Callable[[], Any], moment: int, result: Connection) -> None:
    moments = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object, **kwargs: object) -> object:
            nonlocal moments
            moments += 1
            if moments == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counting

    for name in ("replace", "rename", "unlink", "link", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    os.fsync = counted(lambda fd: None)  # type: ignore[assignment]
    returned = work()
    result.send((moments, returned))


def _prepare(config: PrepareScriptConfig) -> tuple[str, list[str]]:
    chunks.CHUNK_BYTES, pipeline.JOURNAL_SECONDS = 2000, 0.0
    said: list[str] = []
    return prepare(config, report=said.append).digest, said


def _train(config: TrainConfig, path: Path) -> None:
    launch(config, path)
