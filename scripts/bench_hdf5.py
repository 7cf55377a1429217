"""What an HDF5 chunk's size and compression cost: writing, size, and reading against npy and h5py slices.

    python scripts/bench_hdf5.py [--tokens 100000000] [--seconds 1] [--json PATH]

Tokens with the frequencies of text (Zipf, 50 257 ids, uint16) are written as one shard for each line of the
table. Random windows and consecutive batches of 32 x 1024 are then read through our store and as slices of
h5py, with the file in the page cache and after the system was asked to drop it. npy has a turn right before
each of them in the same process; a ratio is tokens per second over npy's, the median of the rounds. The
decoded-chunk cache is held to a 32nd of the shard, as if the set were 32 times larger than the cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import numpy as np

from harness.files import write_json
from harness.prepare.seal import file_names, storage_section, write_stream_shard
from harness.storage import TokenStore, chunk_cache, open_store
from harness.storage.manifest import write_manifest
from harness.storage.manifest_schema import StorageInfo

B, T = 32, 1024
VOCAB_SIZE = 50_257
ROUNDS = 5
CHUNKS = (T // 2, T, 2 * T, 8192, 65_536, 1 << 20)
COMPRESSED_CHUNKS = (T, 8192, 65_536)
NPY = StorageInfo("npy", np.dtype("<u2"), "stream")

Read = Callable[[np.ndarray], object]


class Reads(NamedTuple):
    """How a file is read: windows of `T + 1` tokens at some places, or `B * T + 1` tokens from one."""

    windows: Read
    batch: Read


def storages() -> Iterator[StorageInfo]:
    """The lines of the table."""
    for chunk in CHUNKS:
        yield StorageInfo("hdf5", NPY.dtype, "stream", chunk)
    for compression in ("lzf", "gzip"):
        for chunk in COMPRESSED_CHUNKS:
            yield StorageInfo("hdf5", NPY.dtype, "stream", chunk, compression)


def zipf_tokens(count: int) -> np.ndarray:
    """Independent tokens `(count,)` whose frequencies fall as those of words do."""
    shares = 1 / np.arange(2.7, VOCAB_SIZE + 2.7)
    edges = np.cumsum(shares / shares.sum())[:-1]
    rng = np.random.default_rng(0)
    tokens = np.empty(count, NPY.dtype)
    for start in range(0, count, 1 << 22):
        part = tokens[start : start + (1 << 22)]
        part[:] = np.searchsorted(edges, rng.random(len(part)))
    return tokens


def write_set(folder: Path, tokens: np.ndarray, storage: StorageInfo) -> tuple[Path, float]:
    """A set of one shard in `folder`; its file and the seconds that writing took."""
    folder.mkdir()
    start = time.perf_counter()
    written = write_stream_shard(folder, "train_00000", tokens, storage)
    seconds = time.perf_counter() - start
    raw: dict[str, Any] = {
        "format_version": 2,
        "storage": storage_section(storage, None),
        "tokenizer": {"name": "zipf", "vocab_size": VOCAB_SIZE},
        "splits": {
            "train": {"total_tokens": len(tokens), "shards": [written | {"tokens": len(tokens)}]},
            "val": {"total_tokens": 0, "shards": []},
        },
    }
    write_manifest(folder, raw)
    return folder / file_names("train_00000", storage)["file"], seconds


@contextmanager
def our_store(folder: Path) -> Iterator[Reads]:
    """The harness's own way."""
    store: TokenStore = open_store(folder, "train")
    try:
        yield Reads(
            lambda starts: store.read_windows(starts, T + 1),
            lambda starts: store.read_tokens(int(starts[0]), B * T + 1),
        )
    finally:
        store.close()


@contextmanager
def h5py_slices(folder: Path) -> Iterator[Reads]:
    """A file kept open and sliced, with the settings of h5py."""
    with h5py.File(folder / "train_00000.h5") as file:
        tokens = file["tokens"]

        def windows(starts: np.ndarray) -> None:
            out = np.empty((len(starts), T + 1), NPY.dtype)
            for row, start in zip(out, starts.tolist(), strict=True):
                row[:] = tokens[start : start + T + 1]

        yield Reads(windows, lambda starts: tokens[int(starts[0]) : int(starts[0]) + B * T + 1])


def tokens_per_second(read: Read, batches: np.ndarray, seconds: float) -> float:
    """Read batch after batch until they are all read or the time is over."""
    start = time.perf_counter()
    done = 0
    while done < len(batches) and (not done or time.perf_counter() - start < seconds):
        read(batches[done])
        done += 1
    return done * B * T / (time.perf_counter() - start)


def drop_cached(path: Path) -> None:
    """Ask the system to forget the file's pages; nothing may have it mapped."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def starts_of(kind: str, tokens: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Places `(count, B)` of batches: anywhere, or one after another from anywhere."""
    if kind == "windows":
        return rng.integers(0, tokens - T, (count, B))
    places = (rng.integers(0, tokens) + np.arange(count * B) * T) % (tokens - B * T)
    return places.reshape(count, B)


def measure(npy: Path, hdf5: Path, seconds: float, tokens: int) -> dict[str, Any]:
    """Ratios to npy of every way of reading one file, npy's own speed and h5py's ratio for comparison."""
    rng, rows = np.random.default_rng(0), {}
    ways = {"npy": (our_store, npy), "ours": (our_store, hdf5), "h5py": (h5py_slices, hdf5)}
    for warm in (True, False):
        for kind in Reads._fields:
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                starts = starts_of(kind, tokens, 4000 if warm else 50, rng)
                for name, (way, path) in ways.items():
                    if not warm:
                        drop_cached(path)
                    with way(path.parent) as reads:
                        if warm:
                            tokens_per_second(getattr(reads, kind), starts, seconds / 4)
                        found[name].append(tokens_per_second(getattr(reads, kind), starts, seconds))
            key = f"{'warm' if warm else 'cold'} {kind}"
            rows[key] = {
                "npy_tokens_per_s": statistics.median(found["npy"]),
                "ours": ratio(found["ours"], found["npy"]),
                "h5py": ratio(found["h5py"], found["npy"]),
            }
    return rows


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def opening(folder: Path) -> float:
    """Seconds until a store is open: header, chunk table, extents."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        open_store(folder, "train")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Measure line by line, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of the shard (100 000 000)")
    parser.add_argument("--seconds", type=float, default=1.0, help="each reading, at most (1)")
    parser.add_argument("--folder", type=Path, help="where the files go, then are removed (a temporary one)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.tokens <= 2 * B * T:
        parser.error(f"--tokens={options.tokens} must be more than two batches, {2 * B * T} tokens")
    chunk_cache.CACHE_BYTES = options.tokens * 2 // 32
    tokens, results = zipf_tokens(options.tokens), []
    print("warm/cold, windows/batches: ours and h5py slices, in npy's tokens per second\n")
    head = ["chunk", "filter", "write Mtok/s", "size", "open ms", "warm windows", "h5py"]
    head += ["warm batches", "h5py", "cold windows", "h5py", "cold batches", "h5py"]
    print("|".join(["", *head, ""]) + "\n" + "|".join(["", *["---"] * len(head), ""]), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        npy, seconds = write_set(Path(place) / "npy", tokens, NPY)
        rates = {"npy_write_tokens_per_s": len(tokens) / seconds}
        for storage in storages():
            results.append(result_of(storage, npy, tokens, options.seconds))
            print(table_line(results[-1]), flush=True)
    print(f"\nnpy: writing {rates['npy_write_tokens_per_s'] / 1e6:.0f} Mtok/s; reading, median of the lines:")
    for key in results[0]["reading"]:
        rates[key] = statistics.median(result["reading"][key]["npy_tokens_per_s"] for result in results)
        print(f"  {key} {rates[key] / 1e6:.0f} Mtok/s")
    if options.json:
        write_json(options.json, {"tokens": options.tokens, "npy": rates, "lines": results})


def result_of(storage: StorageInfo, npy: Path, tokens: np.ndarray, seconds: float) -> dict[str, Any]:
    """Write the tokens beside the npy set, measure, remove."""
    with tempfile.TemporaryDirectory(dir=npy.parents[1]) as place:
        file, writing = write_set(Path(place) / "hdf5", tokens, storage)
        return {
            "chunk_tokens": storage.chunk_tokens,
            "compression": storage.compression,
            "write_tokens_per_s": len(tokens) / writing,
            "size": file.stat().st_size / (2 * len(tokens)),
            "open_s": opening(file.parent),
            "reading": measure(npy, file, seconds, len(tokens)),
        }


def table_line(result: dict[str, Any]) -> str:
    """One line of the table in Markdown."""
    cells = [
        f"{result['chunk_tokens']:,}",
        result["compression"],
        f"{result['write_tokens_per_s'] / 1e6:.0f}",
        f"{result['size']:.2f}",
        f"{1000 * result['open_s']:.1f}",
    ]
    for row in result["reading"].values():
        cells += [f"{row['ours']:.3g}", f"{row['h5py']:.2g}"]
    return "|".join(["", *cells, ""])


if __name__ == "__main__":
    main()
