"""Files opened for reading once and kept: a bounded set of descriptors, read at positions."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import UserError
from harness.files import irregular

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

# Descriptors one store keeps where the process may have few: `ulimit -n 64` must do for two stores and
# everything else of a run. With more allowed it keeps an eighth of them, and this many at most.
MAX_DESCRIPTORS, _EVEN_SO = 16, 256


# A FIFO that takes a shard's place between two looks at it must not make its opening wait.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))


class FileIdentity(NamedTuple):
    """Which file it is and when it was last written: what `fstat` says of it."""

    device: int
    inode: int
    size: int
    mtime_ns: int


def identity_of(status: os.stat_result) -> FileIdentity:
    """The identity of a file from its `os.stat`."""
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Irregular(OSError):
    """What is to be read is no regular file, but a `kind` of its own: "a FIFO"."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"it is {kind}, not a regular file")
        self.kind = kind


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """A descriptor for reading and what it is of; OSError, `Irregular` where it is no regular file."""
    kind = irregular(os.stat(path).st_mode)
    if kind is None:
        fd = os.open(path, _FLAGS)
        status = os.fstat(fd)
        kind = irregular(status.st_mode)
        if kind is None:
            return fd, status
        os.close(fd)
    raise Irregular(kind)


class Descriptor:
    """A descriptor of a regular file, closed when its last user lets go of it: eviction cuts off no read.

    `expected` is what the file was when its header was checked; raises `UserError` where it no longer is.
    """

    def __init__(self, path: Path, expected: FileIdentity | None = None) -> None:
        self.fd = -1
        try:
            self.fd, status = open_regular(path)
        except OSError as error:
            raise unreadable(path, error) from error
        self.identity = identity_of(status)
        if expected is not None and self.identity != expected:
            raise replaced(path, expected, self.identity)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)


def descriptors_kept() -> int:
    """Descriptors one store keeps at most: opening a file again costs slow storage more than a read of it."""
    if resource is None:
        return MAX_DESCRIPTORS
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _EVEN_SO
    return max(MAX_DESCRIPTORS, min(allowed // 8, _EVEN_SO))


class Descriptors:
    """The most recently used descriptors by path, `descriptors_kept()` at most. Thread-safe."""

    def __init__(self) -> None:
        self._kept = MAX_DESCRIPTORS
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, expected: FileIdentity) -> Descriptor:
        """An open descriptor of `path`; raises `UserError` where it is not the `expected` file any more."""
        name = str(path)  # its hash is at hand, a Path's is not
        with self._lock:
            descriptor = self._open.pop(name, None) or Descriptor(path, expected)
            self._open[name] = descriptor
            if len(self._open) > self._kept:
                self._kept = descriptors_kept()
                if len(self._open) > self._kept:
                    self._open.popitem(last=False)
            return descriptor


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a shard that the manifest names and the system does not give us."""
    return UserError(
        f"{path} cannot be read: {error.strerror or error}. The manifest beside it names this shard. "
        "Restore the file or prepare the set again with prepare.overwrite=true"
    )


def failed(path: Path, error: OSError, offset: int, size: int) -> UserError:
    """The error for a read of an open file that the storage does not answer."""
    return UserError(
        f"{path} cannot be read at bytes {offset} to {offset + size}: {error.strerror or error}. The file is "
        "open, so the fault is the storage's or lies on the way to it (disk, network, mount): the system's "
        "log (dmesg) may say more. Without these tokens there is no batch. Once they can be read again, or "
        "the file is restored, resume= goes on with the same batches"
    )


def replaced(path: Path, then: FileIdentity, now: FileIdentity) -> UserError:
    """The error for a file that took the place of the one whose header was checked."""
    differing = ", ".join(
        f"{name} {was} then, {found} now"
        for name, was, found in zip(FileIdentity._fields, then, now, strict=True)
        if was != found
    )
    return UserError(
        f"{path} is not the file that was checked when this set was opened: {differing}. It was replaced or "
        "written to since, and its tokens need not be those that the set's digest names. If the set was "
        "prepared again (prepare.overwrite=true), start a new run on the new set; to go on with this one, "
        "put the old set back and resume"
    )


def truncated(path: Path, size: int, needed: int) -> UserError:
    """The error for a file that has become shorter than the manifest says."""
    return UserError(
        f"{path} is {size} bytes long, but its tokens reach to byte {needed}: it was cut short after it was "
        "prepared. Restore the file or prepare the set again with prepare.overwrite=true"
    )


def read_exactly(path: Path, descriptor: Descriptor, out: np.ndarray[Any, Any], offset: int) -> None:
    """Fill the contiguous array `out` from byte `offset`; raise `UserError` where the file ends before."""
    view = memoryview(out.data).cast("B")
    done = 0
    while done < len(view):
        try:
            read = _read_at(descriptor.fd, view[done:], offset + done)
        except OSError as error:
            raise failed(path, error, offset + done, len(view) - done) from error
        if read == 0:
            raise truncated(path, offset + done, offset + len(view))
        done += read


if hasattr(os, "preadv"):

    def _read_at(fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, (view,), offset)

elif hasattr(os, "pread"):

    def _read_at(fd: int, view: memoryview, offset: int) -> int:
        data = os.pread(fd, len(view), offset)
        view[: len(data)] = data
        return len(data)

else:
    _seek_lock = threading.Lock()

    def _read_at(fd: int, view: memoryview, offset: int) -> int:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(view))
        view[: len(data)] = data
        return len(data)


def will_need(fd: int, offset: int, size: int) -> None:
    """Ask the system to read a range ahead; does nothing where it or the file system takes no such hints."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
