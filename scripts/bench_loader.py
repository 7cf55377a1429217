"""How fast the sequential loader reads, against copying the same tokens from RAM to int64 in one process.

    python scripts/bench_loader.py [--tokens 100000000] [--seconds 20] [--json PATH]

A temporary npy set of four shards is written and read warm, in batches of 32 x 1024. Ways take turns, pass
by pass, and every pass opens its files anew, so each pays for its own page faults. A ratio is the median over
the rounds of the floor's time divided by the way's time in the same round.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from harness.files import write_json
from harness.loaders import Prefetcher, TokenDataLoader
from harness.storage import TokenStore, open_store
from harness.storage.manifest import write_manifest

BATCH_SIZE, SEQ_LEN = 32, 1024
BATCH_TOKENS = BATCH_SIZE * SEQ_LEN
VOCAB_SIZE = 50_257
SHARDS = 4
FLOOR = "RAM uint16 -> int64 (the floor)"


def write_tokens(directory: Path, tokens: np.ndarray) -> None:
    """Write `tokens` as a train split of `SHARDS` shards."""
    shards = []
    for index, part in enumerate(np.array_split(tokens, SHARDS)):
        file = f"train_{index:05d}.npy"
        np.save(directory / file, part)
        digest = hashlib.sha256(part.tobytes()).hexdigest()
        shards.append({"file": file, "tokens": len(part), "sha256": digest})
    write_manifest(
        directory,
        {
            "format_version": 2,
            "storage": {"format": "npy", "dtype": "uint16", "layout": "stream"},
            "tokenizer": {"name": "random", "vocab_size": VOCAB_SIZE},
            "splits": {
                "train": {"total_tokens": len(tokens), "shards": shards},
                "val": {"total_tokens": 0, "shards": []},
            },
        },
    )


def ways(tokens: np.ndarray, directory: Path) -> dict[str, Callable[[], None]]:
    """One full pass over the stream for each way of reading it."""
    batches = (len(tokens) - 1) // BATCH_TOKENS
    out = np.empty(BATCH_TOKENS, np.int64)
    mapped = open_store(directory, "train")
    positional = open_store(directory, "train", mmap=False)

    def floor() -> None:
        for start in range(0, batches * BATCH_TOKENS, BATCH_TOKENS):
            np.copyto(out, tokens[start : start + BATCH_TOKENS])

    def get_batch() -> None:
        mapped.close()
        for start in range(0, batches * BATCH_TOKENS, BATCH_TOKENS):
            mapped.get_batch(start, BATCH_SIZE, SEQ_LEN)

    def loader(store: TokenStore, depth: int | None) -> Callable[[], None]:
        def one_pass() -> None:
            store.close()
            plain = TokenDataLoader(store, BATCH_SIZE, SEQ_LEN)
            reader = plain if depth is None else Prefetcher(plain, depth)
            for _ in range(batches):
                reader.next_batch()
            if isinstance(reader, Prefetcher):
                reader.close()

        return one_pass

    return {
        FLOOR: floor,
        "get_batch": get_batch,
        "loader": loader(mapped, None),
        "loader, prefetch 2": loader(mapped, 2),
        "loader, prefetch 8": loader(mapped, 8),
        "loader, data.mmap=false": loader(positional, None),
    }


def measure(passes: dict[str, Callable[[], None]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each pass, the ways alternating, for at least `seconds` and three rounds after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for one_pass in passes.values():
        one_pass()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[FLOOR]) < 3:
        for name, one_pass in passes.items():
            start = time.perf_counter()
            one_pass()
            times[name].append(time.perf_counter() - start)
    return times


def summary(times: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Tokens per second (median) and ratio to the floor (median and quartiles of the rounds) of each way."""
    rows = {}
    for name, seconds in times.items():
        ratios = [ours / theirs for ours, theirs in zip(times[FLOOR], seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rate = tokens / statistics.median(seconds)
        rows[name] = {"tokens_per_s": rate, "ratio": middle, "ratio_quartiles": [low, high]}
    return {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "rounds": len(times[FLOOR]), "ways": rows}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of the set (100 000 000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure (20)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.tokens <= BATCH_TOKENS:
        parser.error(f"--tokens={options.tokens} must be more than one batch of {BATCH_TOKENS} tokens")
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, options.tokens, dtype=np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), tokens)
        times = measure(ways(tokens, Path(folder)), options.seconds)
    result = summary(times, (options.tokens - 1) // BATCH_TOKENS * BATCH_TOKENS)
    print(
        f"B={BATCH_SIZE} T={SEQ_LEN}, {options.tokens} tokens, {SHARDS} shards, {result['rounds']} rounds\n"
    )
    print(f"{'way':<34}{'Mtok/s':>8}{'ratio':>8}  quartiles")
    for name, row in result["ways"].items():
        low, high = row["ratio_quartiles"]
        print(f"{name:<34}{row['tokens_per_s'] / 1e6:>8.0f}{row['ratio']:>8.2f}  {low:.2f} .. {high:.2f}")
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
