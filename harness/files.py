"""Files that are either whole or absent: temp name, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20


def fsync_dir(path: Path) -> None:
    """Make renames and new names inside `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under; afterwards it is `path`, durably. A failure leaves the old file alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`; a reader sees the old content or the new, never a part."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON atomically. NaN is refused: other parsers could not read it."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that is never written again a second name; a durable copy where it cannot have two."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
            raise
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def irregular(mode: int) -> str | None:
    """What a file of this `st_mode` is where it is no regular file ("a FIFO"), else None.

    Such a file may have no end, wait for ever when it is opened, or do something else when it is read.
    """
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def sha256_file(path: Path) -> str:
    """SHA-256 of a whole file as hex, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
