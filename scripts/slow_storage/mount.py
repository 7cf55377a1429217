"""The file system of slow_fs.c: built, mounted, counted, and taken away again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("slow_fs.c")
_NEEDED = "apt-get install gcc pkg-config fuse3 libfuse3-dev, /dev/fuse, and the right to mount (root)"


class Kind(NamedTuple):
    """A mount: microseconds a read, the most reads the kernel has under way ahead, and whether it caches."""

    latency_us: int
    in_flight: int
    direct: bool = False


def build(folder: Path) -> Path:
    """Compile slow_fs.c into `folder`; ends the script where what that needs is missing."""
    program = folder / "slow_fs"
    try:
        flags = ["pkg-config", "fuse3", "--cflags", "--libs"]
        found = subprocess.run(flags, check=True, capture_output=True, text=True).stdout.split()
        subprocess.run(["cc", "-O2", str(SOURCE), "-o", str(program), *found], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"The file system cannot be built ({error}). It needs {_NEEDED}")
    return program


def fuse_version() -> str:
    """The version of libfuse."""
    command = ["pkg-config", "--modversion", "fuse3"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def mounted(program: Path, folder: Path, at: Path, kind: Kind) -> Iterator[Path]:
    """`folder` at the place `at`, with nothing of it in the page cache."""
    at.mkdir(exist_ok=True)
    words = [str(folder), str(at), str(kind.latency_us), str(kind.in_flight), *["direct"] * kind.direct]
    server = subprocess.Popen([str(program), *words])
    try:
        for _ in range(100):
            if os.path.ismount(at) or server.poll() is not None:
                break
            time.sleep(0.05)
        if not os.path.ismount(at):
            sys.exit(f"{at} cannot be mounted. It needs {_NEEDED}")
        yield at
    finally:
        _end(server, at)


def reads_and_bytes(at: Path) -> tuple[int, int]:
    """Reads that the mount has answered so far, and their bytes."""
    reads, size = (at / ".reads").read_text().split()
    return int(reads), int(size)


def _end(server: subprocess.Popen[bytes], at: Path) -> None:
    """A signal has libfuse take the mount away; where somebody still looks into it, by force."""
    server.terminate()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if os.path.ismount(at):
        subprocess.run(["umount", "-l", str(at)], check=False)
