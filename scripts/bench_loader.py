"""How fast every loader reads every storage: against RAM, h5py, torch's DataLoader and nanoGPT's way.

    python scripts/bench_loader.py [--tokens 40000000] [--seconds 120] [--json PATH]

The same tokens are written in every storage, in four shards, and read warm in batches of 32 x 1024. All ways
take turns in one process. A turn opens its files anew, so it pays for its own page faults; right before it
the floor has a turn: tokens copied from RAM to int64, or, for all but sequential reading, windows gathered
there. A way's ratio is its tokens per second over its floor's, the median of the rounds. How long a first
batch takes and how much memory is needed is measured before, loader by loader. For Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from parts.bench_sets import SHARDS, STORAGES, Folders, random_tokens, write_sets
from parts.loader_goals import Rows, goals, print_tables
from peers import Reader, floor
from peers.forks import in_fork
from peers.h5py_slices import Slices
from peers.measuring import anonymous_mb
from peers.plain import NanoGPT, TorchLoader

from harness.config import layout
from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.files import write_json
from harness.loaders import make_loader
from harness.storage import open_split

B, T = 32, 1024
_SIZES: dict[str, Any] = {"batch_size": B, "seq_len": T, "prefetch": 0}
LOADERS: dict[str, LoaderConfig] = {
    "sequential": LoaderConfig(**_SIZES),
    "permutation": SlidingWindowConfig(**_SIZES),
    "ordered": SlidingWindowConfig(**_SIZES, sampling="ordered"),
    "uniform": SlidingWindowConfig(**_SIZES, sampling="uniform"),
    "padded_rows": PaddedRowsConfig(**_SIZES),
    "block_shuffle": BlockShuffleConfig(**_SIZES),
    "contrastive_rows": ContrastiveRowsConfig(**_SIZES),
}
TURN = 0.2  # seconds a way reads before the next one does

# Every way of reading is a context manager that gives a function for the next batch, int64 tensors.
NextBatch = Callable[[], Any]
Way = Callable[[], AbstractContextManager[NextBatch]]


def loader_way(folder: Path, config: LoaderConfig, *, mmap: bool = True) -> Way:
    """A loader of this project, epoch after epoch, over files opened for it."""

    @contextmanager
    def way() -> Iterator[NextBatch]:
        loader = make_loader(config, open_split(folder, "train", mmap=mmap))
        epochs = itertools.count(1)

        def next_batch() -> Any:
            try:
                return loader.next_batch()
            except StopIteration:
                loader.start_epoch(next(epochs))
                return loader.next_batch()

        yield next_batch
        loader.close()

    return way


def peer_way(reader: type[Reader], folder: Path, *, shuffle: bool, **options: int) -> Way:
    """Another way of reading, of those that scripts/bench_peers.py compares."""

    @contextmanager
    def way() -> Iterator[NextBatch]:
        made = reader(folder, shuffle=shuffle, **options)
        yield made.next_batch
        made.close()

    return way


def measure_all(folders: Folders, tokens: np.ndarray, seconds: float) -> Rows:
    """Everything of the loaders, and speeds of the peers. Forks come first, while there is one thread."""
    sets = {
        f"{storage} {name}": (storage, config) for storage in STORAGES for name, config in LOADERS.items()
    }
    pairs = {pair: (folders[storage, layout(config)], config) for pair, (storage, config) in sets.items()}
    ways = {pair: loader_way(*where) for pair, where in pairs.items()}
    others = other_ways(folders)
    one_turn = min(TURN, seconds / (len(ways) + len(others)))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that is left here would hide what a fork takes
    log = folders["bin", "stream"] / "log.txt"
    rows = {pair: in_fork(memory, way, one_turn / 10, log=log) for pair, way in ways.items()}
    for pair, where in pairs.items():
        rows[pair] |= first_batches(*where, times=min(7, math.ceil(seconds)))
    for name, speed in measure(ways | others, tokens, seconds, one_turn).items():
        rows[name] = rows.get(name, {}) | speed
    return rows


def other_ways(folders: Folders) -> dict[str, Way]:
    """Variants of the two usual loaders, and the peers."""
    ways = {}
    npy, plain = folders["npy", "stream"], folders["bin", "stream"]
    for name in ("sequential", "permutation"):
        config = LOADERS[name]
        ahead = type(config)(**vars(config) | {"prefetch": 2})
        ways[f"npy {name}, prefetch 2"] = loader_way(npy, ahead)
        ways[f"npy {name}, mmap=false"] = loader_way(npy, config, mmap=False)
        shuffle = name != "sequential"
        ways[f"h5py slices, {name}"] = peer_way(Slices, plain, shuffle=shuffle)
        for workers in (0, 2):
            ways[f"torch DataLoader {name}, {workers} workers"] = peer_way(
                TorchLoader, plain, shuffle=shuffle, workers=workers
            )
    ways["nanoGPT's way"] = peer_way(NanoGPT, plain, shuffle=True)
    return ways


def turn(next_batch: NextBatch, seconds: float) -> float:
    """Batches per second, over `seconds` and one batch at least."""
    batches, elapsed, start = 0, 0.0, time.perf_counter()
    while batches == 0 or elapsed < seconds:
        next_batch()
        batches += 1
        elapsed = time.perf_counter() - start
    return batches / elapsed


def measure(ways: dict[str, Way], tokens: np.ndarray, seconds: float, one_turn: float) -> Rows:
    """For each way, round by round: tokens per second, and their ratio to its floor's."""
    floors = {True: floor.copying(tokens, B, T), False: floor.gathering(tokens, B, T)}
    rows: Rows = {name: {"tokens_per_s": [], "ratio": []} for name in ways}
    end = time.perf_counter() + seconds
    while len(rows["npy sequential"]["ratio"]) < 3 or time.perf_counter() < end:
        for name, way in ways.items():
            with way() as next_batch:
                size = next_batch()[0].numel()
                floor_rate = turn(floors["sequential" in name], one_turn / 4) * B * T
                rate = turn(next_batch, one_turn) * size
            rows[name]["tokens_per_s"].append(rate)
            rows[name]["ratio"].append(rate / floor_rate)
    return rows


def first_batches(folder: Path, config: LoaderConfig, times: int) -> dict[str, list[float]]:
    """Milliseconds to a first batch: from opening the files on, and at 90 % of an epoch of an open store."""
    opened, resumed = [], []
    for _ in range(times):
        start = time.perf_counter()
        store = open_split(folder, "train")
        loader = make_loader(config, store)
        loader.next_batch()
        opened.append(1000 * (time.perf_counter() - start))
        step = loader.position
        cursor = loader.state_dict() | {"position": loader.batches_per_epoch * 9 // 10 * step}
        start = time.perf_counter()
        loader = make_loader(config, store)
        loader.load_state_dict(cursor)
        loader.next_batch()
        resumed.append(1000 * (time.perf_counter() - start))
    return {"first_batch_ms": opened, "resume_ms": resumed}


def memory(way: Way, one_turn: float) -> dict[str, list[float]]:
    """Megabytes of anonymous memory that reading takes at most, and child processes; for a fork."""
    before = most = anonymous_mb()
    with way() as next_batch:
        for _ in range(5):
            turn(next_batch, one_turn)
            most = max(most, anonymous_mb())
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"anonymous_mb": [most - before], "child_processes": [len(children)]}


def main() -> None:
    """Write the sets, measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=40_000_000, help="tokens of each set (40 000 000)")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the ways take turns (120)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    needed = SHARDS * (B * T + 1)
    if options.tokens < needed:
        parser.error(f"--tokens={options.tokens} must be at least {needed}: a batch in each shard")
    torch.set_num_threads(1)
    tokens = random_tokens(options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        folders = write_sets(Path(folder), tokens, T + 1)
        for file in Path(folder).rglob("*.*"):
            file.read_bytes()  # in order, so that the page cache holds it in large pieces
        rows = measure_all(folders, tokens, options.seconds)
    lines = goals(rows, LOADERS)
    rounds = len(rows["npy sequential"]["ratio"])
    print(f"B={B} T={T}, {options.tokens} tokens, {SHARDS} shards, {rounds} rounds\n")
    print_tables(rows, lines)
    if options.json:
        table = [goal._asdict() for goal in lines]
        write_json(options.json, {"batch_size": B, "seq_len": T, "goals": table, "ways": rows})


if __name__ == "__main__":
    main()
