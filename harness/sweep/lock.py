"""Who works on a job: one owner at a time, among all processes that share the sweep's folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.run_dir import now


@dataclass(frozen=True)
class Owner:
    """The process that works on a job, `started` and last heard of (`updated`) at these times."""

    pid: int
    host: str
    started: str
    updated: str


@contextlib.contextmanager
def claimed(folder: Path, sha256: str) -> Iterator[Owner | None]:
    """Work on a job of the sweep in `folder` alone: None. Where another process does: its owner."""
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(locks / sha256[:8], os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield Owner(**json.loads(os.pread(descriptor, 4096, 0)))
            return
        owner = Owner(os.getpid(), socket.gethostname(), now(), now())
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(vars(owner)).encode(), 0)
        yield None
    finally:
        os.close(descriptor)
