"""What is measured: this project's loaders, and what one would write without them."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.loaders import build_loader, make_loader
from harness.storage import RowReader, open_split, read_ranges
from slow_storage import BATCH_SIZE, SEQ_LEN
from slow_storage.mount import reads_and_bytes

Row = dict[str, Any]
_WIDTH = SEQ_LEN + 1
_SIZES: dict[str, Any] = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}
_WINDOW = 1 << 23  # of block_shuffle: 256 batches, so that windows change while it is measured

# name -> (layout of its set, its configuration)
LOADERS: dict[str, tuple[str, LoaderConfig]] = {
    "sequential": ("stream", LoaderConfig(name="sequential", **_SIZES)),
    **{
        f"sliding_window, {sampling}": (
            "stream",
            SlidingWindowConfig(name="sliding_window", sampling=sampling, **_SIZES),
        )
        for sampling in ("permutation", "uniform", "ordered")
    },
    "block_shuffle": (
        "stream",
        BlockShuffleConfig(name="block_shuffle", window_tokens=_WINDOW, **_SIZES),
    ),
    "padded_rows": ("rows", PaddedRowsConfig(name="padded_rows", **_SIZES)),
    "contrastive_rows": ("contrastive", ContrastiveRowsConfig(name="contrastive_rows", **_SIZES)),
}


def steps_of(name: str, steps: int) -> int:
    """Steps to measure: of block_shuffle two windows and more."""
    return max(steps, 2 * _WINDOW // (BATCH_SIZE * SEQ_LEN) + 50) if name == "block_shuffle" else steps


def loader(mount: Path, set_name: str, name: str, steps: int, compute: float) -> Row:
    """A loader as `train.py` has it, its prefetch included, behind an open store."""
    started = time.perf_counter()
    store = open_split(mount / set_name, "train")
    opened = time.perf_counter() - started
    with make_loader(LOADERS[name][1], store) as batches:
        return {"open_ms": 1e3 * opened} | timed(mount, batches.next_batch, steps, compute)


def check(mount: Path, folder: Path, set_name: str, name: str, count: int) -> None:
    """The loader's batches there are those of the same set on the disk itself."""
    config = LOADERS[name][1]
    ours, right = (build_loader(config, open_split(place / set_name, "train")) for place in (mount, folder))
    for _ in range(count):
        found, expected = ours.next_batch(), right.next_batch()
        assert found.cursor == expected.cursor
        assert found.inputs.equal(expected.inputs)
        assert found.targets.equal(expected.targets)


def timed(mount: Path, next_batch: Callable[[], Any], steps: int, compute: float) -> Row:
    """Steps that take a batch and then compute: `compute` seconds in which the processor is free."""
    waits, wholes = [], []
    reads, size = reads_and_bytes(mount)
    for _ in range(steps):
        started = time.perf_counter()
        next_batch()
        waited = time.perf_counter()
        time.sleep(compute)
        waits.append(waited - started)
        wholes.append(time.perf_counter() - started)
    more_reads, more = reads_and_bytes(mount)
    first, *rest = (1e3 * wait for wait in waits)
    computed = statistics.median(whole - wait for whole, wait in zip(wholes, waits, strict=True))
    return {
        "first_ms": first,
        "wait_ms": statistics.median(rest),
        "wait_mean_ms": statistics.mean(rest),
        "wait_max_ms": max(rest),
        "step_ms": 1e3 * statistics.median(wholes[1:]),
        "step_of_compute": statistics.median(wholes[1:]) / computed,
        "reads_a_batch": (more_reads - reads) / steps,
        "kib_a_batch": (more - size) / steps / 1024,
    }


# Rows and their mask for the plain ways: files without content, too large to be read by the way.
ROWS, MASK, _COUNT = "plain.rows", "plain.mask", 1_000_000


def write_plain(folder: Path) -> None:
    """3 GB of zeros that take no disk."""
    for name, item in ((ROWS, 2), (MASK, 1)):
        with open(folder / name, "wb") as file:
            file.truncate(item * _COUNT * _WIDTH)


def _memmaps(mount: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    shape = (_COUNT, _WIDTH)
    return np.memmap(mount / ROWS, np.uint16, "r", shape=shape), np.memmap(
        mount / MASK, bool, "r", shape=shape
    )


def _ids(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return rng.integers(0, _COUNT, BATCH_SIZE)


def mmap_windows(mount: Path) -> Callable[[np.random.Generator], Any]:
    """Rows alone, which windows at random starts cost as much as, out of a plain `np.memmap`."""
    rows, _ = _memmaps(mount)
    return lambda rng: rows[_ids(rng)].astype(np.int64)


def mmap_rows(mount: Path) -> Callable[[np.random.Generator], Any]:
    """Rows and their mask out of plain `np.memmap`s."""
    rows, mask = _memmaps(mount)

    def read(rng: np.random.Generator) -> Any:
        ids = _ids(rng)
        return rows[ids].astype(np.int64), mask[ids]

    return read


def row_reader_windows(mount: Path) -> Callable[[np.random.Generator], Any]:
    """Rows alone through a `RowReader` by itself."""
    reader = RowReader()
    rows = reader.map(mount / ROWS, np.uint16, (_COUNT, _WIDTH))
    return lambda rng: reader.read((rows,), _ids(rng))


def row_reader(mount: Path) -> Callable[[np.random.Generator], Any]:
    """Rows and their mask through a `RowReader` by itself."""
    reader = RowReader()
    shape = (_COUNT, _WIDTH)
    sources = reader.map(mount / ROWS, np.uint16, shape), reader.map(mount / MASK, np.bool_, shape)
    return lambda rng: reader.read(sources, _ids(rng))


def ranges(mount: Path) -> Callable[[np.random.Generator], Any]:
    """Rows alone out of a plain `np.memmap` through `read_ranges` by itself."""
    stream = _memmaps(mount)[0].reshape(-1)
    there = np.empty(len(stream), stream.dtype)  # takes no memory where nothing is copied to

    def read(rng: np.random.Generator) -> None:
        firsts = np.unique(_ids(rng)) * _WIDTH
        read_ranges(stream, there, [slice(first, first + _WIDTH) for first in firsts.tolist()])

    return read


PLAIN = {
    "np.memmap, windows": mmap_windows,
    "RowReader, windows": row_reader_windows,
    "read_ranges, windows": ranges,
    "np.memmap, rows and masks": mmap_rows,
    "RowReader, rows and masks": row_reader,
}


def plain(mount: Path, name: str, steps: int, compute: float) -> Row:
    """One of `PLAIN`, which reads when it is asked, as it does by itself."""
    read = PLAIN[name](mount)
    rng = np.random.default_rng(0)
    return timed(mount, lambda: read(rng), steps, compute)


def ceiling(mount: Path, threads: int) -> float:
    """Microseconds a read of 2 KiB that the mount takes at its best, asked by so many threads."""
    path = mount / ROWS
    pages = path.stat().st_size // 4096
    places = [4096 * page for page in random.Random(0).sample(range(pages), 2000)]
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: os.pread(fd, 2048, at), places))
    taken = time.perf_counter() - started
    os.close(fd)
    return 1e6 * taken / len(places)
