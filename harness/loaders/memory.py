"""Where the memory of batches comes from: each gets its own, from what the last ones have left."""

from __future__ import annotations

import contextlib
from functools import cache

import numpy as np

# Just below the size from which the GNU C library never keeps what is freed.
_LARGEST = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Let the C library hand freed memory out again rather than give it back to the system, up to 62 MB.

    Once a process. Memory that comes from the system costs a page fault for each 4 KiB, which took as long as
    reading itself where a batch is made of several arrays. The GNU C library keeps as much as twice the
    largest block that was ever freed (mallopt(3), M_MMAP_THRESHOLD): so one is, untouched. Elsewhere nothing
    happens. What is handed out again is free by the library's own account, so no batch that anybody holds.
    """
    with contextlib.suppress(MemoryError):
        np.empty(_LARGEST, np.uint8)
