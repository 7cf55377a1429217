"""What makes a fork like a new process to whoever measures it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def own_pages() -> None:
    """Copy the memory that this process still shares with the one it was forked from.

    Otherwise each first touch of a Python object, if only to count a reference, copies a page within what is
    measured. A new process shares none.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for start, stop in _writable():
            entries = os.pread(
                pagemap.fileno(), (stop - start) // mmap.PAGESIZE * 8, start // mmap.PAGESIZE * 8
            )
            present = np.frombuffer(entries, np.int64) < 0  # its highest bit
            borders = np.flatnonzero(np.diff(present, prepend=False, append=False)).reshape(-1, 2)
            for first, last in (borders * mmap.PAGESIZE).tolist():
                if madvise(start + first, last - first, _POPULATE_WRITE):
                    raise OSError(ctypes.get_errno(), "pages cannot be made this process's own")


def _writable() -> list[tuple[int, int]]:
    """Where private memory that may be written lies, the stack apart, which grows."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_, name = line.split(maxsplit=5)
        if permissions.startswith("rw") and permissions.endswith("p") and name != "[stack]":
            start, stop = (int(bound, 16) for bound in span.split("-"))
            found.append((start, stop))
    return found
