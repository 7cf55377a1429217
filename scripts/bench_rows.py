"""How fast scattered rows are read: RowReader's two ways, its own choice, and indexing an np.memmap.

    python scripts/bench_rows.py [--rows 100000] [--batches 8,64,512] [--reads 30] [--folder FOLDER]

Two raw files, uint32 tokens and a bool mask of 1,025 columns (5 KB a row), are read at seeded random rows.
Warm: all in the page cache, and the ways take turns, read by read. Cold: before each read both files are
dropped from it (`posix_fadvise(DONTNEED)`), so every read of every way waits for the disk; `adaptive` has
read nothing before its first cold read, so its first reads show how it learns. Linux only. The files are
deleted at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from harness.files import write_json
from harness.storage import RowReader

COLUMNS = 1025
FILES = {"tokens": np.dtype(np.uint32), "mask": np.dtype(np.bool_)}
WAYS = {"direct": False, "parallel": True, "adaptive": None}
BASELINE = "np.memmap"

# Seconds after which the disk no longer reads ahead for the read before.
_READ_AHEAD_ENDS = 0.1

Array = np.ndarray[Any, Any]


def write_files(folder: Path, rows: int) -> None:
    """Random tokens and masks, on the disk and not only in the page cache."""
    rng = np.random.default_rng(0)
    for name, dtype in FILES.items():
        with open(folder / name, "wb") as file:
            for start in range(0, rows, 10_000):
                shape = (min(10_000, rows - start), COLUMNS)
                file.write(rng.integers(0, 2, shape).astype(dtype).tobytes())
            os.fsync(file.fileno())


class Way(NamedTuple):
    """One way of reading tokens and mask, and what it reads through."""

    read: Callable[[Array], list[Array]]
    mappings: list[Array]


def open_way(name: str, folder: Path, rows: int) -> Way:
    """The way `name`, with mappings of its own."""
    shape = (rows, COLUMNS)
    if name == BASELINE:
        memmaps: list[Array] = [
            np.memmap(folder / file, dtype, "r", shape=shape) for file, dtype in FILES.items()
        ]
        return Way(lambda ids: [source[ids] for source in memmaps], memmaps)
    reader = RowReader(WAYS[name])
    mappings = [reader.map(folder / file, dtype, shape) for file, dtype in FILES.items()]
    return Way(lambda ids: reader.read(mappings, ids), mappings)


def drop_from_cache(folder: Path, mappings: list[Array]) -> None:
    """Take both files out of the page cache; mapped pages would stay, so they are let go of first."""
    libc = ctypes.CDLL(None, use_errno=True)
    for mapping in mappings:
        address = mapping.__array_interface__["data"][0]
        begin = address - address % mmap.PAGESIZE
        length = address + mapping.nbytes - begin
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")
    for file in FILES:
        fd = os.open(folder / file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure(folder: Path, rows: int, batch: int, reads: int, cold: bool) -> dict[str, list[float]]:
    """Seconds of each read of each way; all ways read the same rows."""
    ways = {name: open_way(name, folder, rows) for name in (BASELINE, *WAYS)}
    ids = np.random.default_rng(batch).integers(0, rows, (reads, batch))
    if cold:
        # One way after the other: the disk still reads ahead for a mapping when the next way's turn comes.
        return {name: [timed(way, part, folder) for part in ids] for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for part in ids:
        expected = ways[BASELINE].read(part)
        for name, way in ways.items():
            found = way.read(part)
            assert all(np.array_equal(ours, right) for ours, right in zip(found, expected, strict=True))
            times[name].append(timed(way, part))
    return times


def timed(way: Way, ids: Array, cold_folder: Path | None = None) -> float:
    """Seconds of one read, from a cold cache if the files' folder is given."""
    if cold_folder is not None:
        time.sleep(_READ_AHEAD_ENDS)
        drop_from_cache(cold_folder, way.mappings)
    start = time.perf_counter()
    way.read(ids)
    return time.perf_counter() - start


def summary(seconds: list[float]) -> dict[str, float]:
    """Milliseconds a read: median, its quartiles, and the mean of the first five and of all reads."""
    low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4, method="inclusive"))
    first, mean = 1e3 * statistics.mean(seconds[:5]), 1e3 * statistics.mean(seconds)
    return {"median": middle, "low": low, "high": high, "first_five": first, "mean": mean}


def read_ahead(folder: Path) -> str:
    """The read-ahead of the folder's device in KiB, on which mapped cold reads depend most."""
    device = folder.stat().st_dev
    path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (path, path.resolve().parent):
        if (place / "queue/read_ahead_kb").exists():
            return (place / "queue/read_ahead_kb").read_text().strip()
    return "unknown"


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the files (100 000, 512 MB)")
    parser.add_argument("--batches", default="8,64,512", help="rows a read (8,64,512)")
    parser.add_argument("--reads", type=int, default=30, help="reads of each way, warm and cold (30)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the files are made")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.reads < 5 or options.rows < 1:
        parser.error(f"--reads={options.reads} must be at least 5 and --rows={options.rows} at least 1")
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_files(folder, options.rows)
        print(f"{options.rows} rows, read-ahead {read_ahead(folder)} KiB, {options.reads} reads; ms a read\n")
        print(f"{'rows':>5} {'cache':<6}{'way':<10}{'median':>9}{'first 5':>9}{'mean':>9}  quartiles")
        for batch in map(int, options.batches.split(",")):
            for cold in (False, True):
                times = measure(folder, options.rows, batch, options.reads, cold)
                for way, seconds in times.items():
                    row = summary(seconds)
                    results.append({"batch": batch, "cold": cold, "way": way, **row})
                    print(
                        f"{batch:>5} {'cold' if cold else 'warm':<6}{way:<10}{row['median']:>9.3f}"
                        f"{row['first_five']:>9.3f}{row['mean']:>9.3f}  {row['low']:.3f} .. {row['high']:.3f}"
                    )
    if options.json:
        write_json(options.json, {"rows": options.rows, "reads": options.reads, "results": results})


if __name__ == "__main__":
    main()
