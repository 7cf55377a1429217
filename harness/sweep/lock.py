"""Who trains a job: one process at a time, of however many launches on however many machines.

A lock is a file `.locks/<identity>.json` in the sweep's folder that names its owner's process. The file is
written whole and linked into place, and its modification time is the owner's heartbeat, by the clock of the
file system. A dead owner's lock is taken over: at once where its process is seen to be gone, and where that
cannot be seen (another machine, a damaged file) once it was silent for a minute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.errors import EXIT_STOPPED
from harness.sweep.processes import Process, process_of, this_process

try:
    import fcntl
except ImportError:  # no such locks here: two takeovers in one moment show at the first heartbeat
    fcntl = None  # type: ignore[assignment]

HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # of an owner that is taken for dead
_GUARD_SECONDS = 10.0  # to wait for another process that is looking at locks
_MOST_BYTES = 65_536
_LAST_SECOND = 253_402_300_799.0  # of the year 9999
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock, as far as its file can be read; times are UTC, as in status.json."""

    pid: int | None
    host: str | None
    started: str | None
    updated: str


@dataclass(frozen=True)
class _Found:
    """A lock's file. `values` are empty where it cannot be read."""

    values: dict[str, Any]
    mtime: float

    @property
    def token(self) -> Any:
        return self.values.get("token")

    @property
    def process(self) -> Process | None:
        return process_of(self.values.get("process"))

    def is_alive(self, now: float) -> bool:
        """`now` by the clock of the file system. A time far in the future is as good as none."""
        gone = None if self.process is None else self.process.is_gone
        return abs(now - self.mtime) < SILENT_SECONDS if gone is None else not gone

    def owner(self) -> Owner:
        process, started = self.process, self.values.get("started")
        return Owner(
            pid=None if process is None else process.pid,
            host=None if process is None else process.host,
            started=started if isinstance(started, str) else None,
            updated=_iso(self.mtime),
        )


@contextlib.contextmanager
def claimed(folder: Path, sha256: str) -> Iterator[Owner | None]:
    """Hold the lock of the job `sha256` in the sweep's `folder`: None where it is ours now, else its owner.

    A thread keeps it alive until the block ends. Where it finds that another process has taken the lock over,
    because this one was frozen for more than a minute, or may have done so and given it back since, it ends
    this process at once: two would write into one directory. Raises `OSError` where the folder cannot be
    written to.
    """
    place = folder / ".locks"
    place.mkdir(parents=True, exist_ok=True)
    lock = _Lock(place / f"{sha256}.json")
    owner = lock.take()
    if owner is not None:
        yield owner
        return
    try:
        with lock.beating():
            yield None
    finally:
        lock.release()


def working(folder: Path) -> set[int]:
    """The pids of this machine's processes that hold the lock of a job in the sweep's `folder`."""
    found = filter(None, (_read(path) for path in (folder / ".locks").glob("*.json")))
    return {lock.process.pid for lock in found if lock.process is not None and lock.process.is_gone is False}


class _Lock:
    """One process's wish for one lock."""

    def __init__(self, path: Path) -> None:
        self.path, self.token = path, uuid.uuid4().hex
        self._values = {
            "process": dataclasses.asdict(this_process()), "started": _iso(time.time()), "token": self.token,
        }  # fmt: skip

    def take(self) -> Owner | None:
        """Take the lock where it is free or its owner is dead; else say who has it."""
        while True:
            with self._written() as mine, alone(self.path.parent):
                os.utime(mine)
                now = mine.stat().st_mtime
                try:
                    _link(mine, self.path)
                except FileExistsError:
                    found = _read(self.path)
                    # Our own where a network file system has lost the answer to the first attempt.
                    if found is not None and found.token != self.token:
                        if found.is_alive(now):
                            return found.owner()
                        _replace(mine, self.path)
            if self._is_ours():
                return None

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(HEARTBEAT_SECONDS)  # a disk that hangs keeps nobody here

    def release(self) -> None:
        with contextlib.suppress(OSError), alone(self.path.parent):
            if self._is_ours():
                self.path.unlink()

    def _beat(self, ended: threading.Event) -> None:
        beaten = time.time()
        while not ended.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # the next one may be written
                found = _read(self.path)
                if found is None:  # somebody removed it; after a silence perhaps one who had taken it over
                    if time.time() - beaten > SILENT_SECONDS:
                        _leave(f"another process may have taken over, and ended, the job of {self.path}")
                    with self._written() as mine, contextlib.suppress(FileExistsError):
                        _link(mine, self.path)
                elif found.token not in (self.token, None):
                    owner = found.owner()
                    _leave(f"pid {owner.pid} on {owner.host} has taken over the job of {self.path}")
                else:
                    os.utime(self.path)
                beaten = time.time()

    def _is_ours(self) -> bool:
        found = _read(self.path)
        return found is not None and found.token == self.token

    @contextlib.contextmanager
    def _written(self) -> Iterator[Path]:
        """The lock's content under another name."""
        mine = self.path.with_name(f".{self.path.name}.{self.token}.tmp")
        try:
            mine.write_text(json.dumps(self._values))
            yield mine
        finally:
            mine.unlink(missing_ok=True)


def _read(path: Path) -> _Found | None:
    """A lock's file, None where there is none. Opening it makes a network file system look again."""
    try:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError:  # a link to elsewhere, or not ours to read
            return _Found({}, path.lstat().st_mtime)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        text = os.read(descriptor, _MOST_BYTES) if stat.S_ISREG(status.st_mode) else b""
        values = json.loads(text)
    except (OSError, ValueError, RecursionError):
        values = None
    finally:
        os.close(descriptor)
    return _Found(values if isinstance(values, dict) else {}, status.st_mtime)


def _link(mine: Path, path: Path) -> None:
    """Give `mine` the name `path`. Raises `FileExistsError` where something has it."""
    try:
        os.link(mine, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with open(path, "xb") as file:
            file.write(mine.read_bytes())


def _replace(mine: Path, path: Path) -> None:
    """As `_link`, whatever has the name; a folder is moved aside."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}"))
    os.replace(mine, path)


@contextlib.contextmanager
def alone(place: Path) -> Iterator[None]:
    """Nobody else looks at what is locked in this folder, where the file system can say so."""
    descriptor = None
    if fcntl is not None:
        with contextlib.suppress(OSError):  # open for writing: over NFS only such a file can be locked
            descriptor = os.open(place / "guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if descriptor is None:
        yield
        return
    try:
        _wait_for(descriptor)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
        os.close(descriptor)


def _wait_for(descriptor: int) -> None:
    """Lock a file; go on without after a while: who holds it was frozen, and may stay so."""
    deadline = time.monotonic() + _GUARD_SECONDS
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:
            return None  # no such locks on this file system
    return None


def _leave(why: str) -> None:
    text = (
        f"{why}: this process, which gave no sign for {SILENT_SECONDS:g} s, ends without writing anything "
        "more\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    os._exit(EXIT_STOPPED)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECOND), UTC).isoformat(timespec="seconds")
