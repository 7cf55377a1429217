"""What `bench_loader.py` measured, against what the loaders are held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

# What was measured of each way, by name.
Rows = dict[str, dict[str, list[float]]]

OPENING = ("first_batch_ms", "resume_ms", "anonymous_mb")


class Goal(NamedTuple):
    """A line of the table of speeds; `at_most` where less is better."""

    what: str
    least: float
    aim: float
    measured: list[float]
    at_most: bool = False


def goals(rows: Rows, loaders: Iterable[str]) -> list[Goal]:
    """What the loaders of these names are held to.

    Compressed storage is measured for information only, and so are block_shuffle's memory and first batches:
    it fills a window of stated size before it reads from it.
    """

    def against(ours: str, theirs: str) -> list[float]:
        return [a / b for a, b in zip(rows[ours]["ratio"], rows[theirs]["ratio"], strict=True)]

    def worst(key: str) -> list[float]:
        names = [name for name in loaders if name != "block_shuffle"]
        pairs = [f"{storage} {name}" for storage in ("npy", "hdf5") for name in names]
        return max((rows[pair][key] for pair in pairs), key=statistics.median)

    random, hdf5 = "npy permutation", "hdf5 permutation"
    torch_way = "torch DataLoader permutation, {} workers"
    return [
        Goal("npy sequential / copying in RAM", 0.6, 1.0, rows["npy sequential"]["ratio"]),
        Goal("npy random windows / gathering in RAM", 0.35, 0.6, rows[random]["ratio"]),
        Goal("hdf5 random windows / npy", 0.8, 1.0, against(hdf5, random)),
        Goal("hdf5 random windows / h5py slices", 8, 12, against(hdf5, "h5py slices, permutation")),
        Goal("npy random windows / torch, 0 workers", 5, 15, against(random, torch_way.format(0))),
        Goal("npy random windows / torch, 2 workers", 5, 15, against(random, torch_way.format(2))),
        Goal("npy random windows / nanoGPT", 15, 40, against(random, "nanoGPT's way")),
        Goal("first batch from opening on, ms", 20, 10, worst("first_batch_ms"), at_most=True),
        Goal("resume at 90 % of an epoch, ms", 5, 1, worst("resume_ms"), at_most=True),
        Goal("anonymous memory, MB", 10, 10, worst("anonymous_mb"), at_most=True),
        Goal("child processes", 0, 0, worst("child_processes"), at_most=True),
    ]


def print_tables(rows: Rows, lines: list[Goal]) -> None:
    """The goals with what was measured, then every way."""
    print(f"{'':<40}{'at least':>9}{'aim':>7}{'measured':>10}  quartiles")
    for goal in lines:
        low, middle, high = _quartiles(goal.measured)
        missed = "" if (middle <= goal.least if goal.at_most else middle >= goal.least) else "  MISSED"
        sign = "<=" if goal.at_most else ""
        print(
            f"{goal.what:<40}{sign + format(goal.least, 'g'):>9}{goal.aim:>7g}{middle:>10.2f}"
            f"  {low:.2f} .. {high:.2f}{missed}"
        )
    print(f"\n{'way':<38}{'Mtok/s':>8}{'ratio':>8}  {'quartiles':<14}{'first':>7}{'resume':>8}{'MB':>7}")
    for name, row in rows.items():
        low, middle, high = _quartiles(row["ratio"])
        opening = [statistics.median(row[key]) for key in OPENING if key in row]
        print(
            f"{name:<38}{statistics.median(row['tokens_per_s']) / 1e6:>8.1f}{middle:>8.3f}  "
            f"{f'{low:.3f} .. {high:.3f}':<14}" + "".join(f"{value:>8.1f}" for value in opening)
        )


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
