"""Where the memory of batches comes from: each gets its own, from what the last ones have left."""

from __future__ import annotations

from functools import cache

from harness.storage.addresses import C_LIBRARY

# Just below the size from which the GNU C library never keeps what is freed.
_LARGEST = 31 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@cache
def keep_freed_memory() -> None:
    """Let the C library hand freed memory out again rather than give it back to the system, up to 62 MB.

    Once a process. Memory that comes from the system costs a page fault for each 4 KiB, which took as long as
    reading itself where a batch is made of several arrays. The GNU C library would keep as much by itself
    once a block of `_LARGEST` was freed, and is told to (mallopt(3)). Elsewhere nothing happens. What is
    handed out again is free by the library's own account, so no batch that anybody holds.
    """
    if hasattr(C_LIBRARY, "mallopt"):
        C_LIBRARY.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        C_LIBRARY.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST)
