"""The Markdown of scripts/bench_slow_storage.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

_MOUNTS = {
    "64 reads ahead": (
        "The kernel has up to 64 reads of its own under way at once: read-ahead, and so hints. The cache of "
        "decoded chunks holds 64 MiB, most of this set: of a larger gzip set nearly every random window "
        "decodes a chunk, which takes longer than waiting for it."
    ),
    "12 reads ahead": (
        "12 at once, which is what FUSE does where a file system sets nothing else. Where 12 at once cannot "
        "answer a batch's reads while a step computes, everybody waits; the last column is what they take at "
        "least."
    ),
    "direct I/O": (
        "The page cache keeps nothing, files cannot be mapped, and hints do nothing. The loaders notice by "
        "what reads cost, at their second batch, and let 32 threads read ahead at positions."
    ),
}

_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("wait ms", lambda row: f"{row['wait_ms']:.2f}"),
    ("mean", lambda row: f"{row['wait_mean_ms']:.2f}"),
    ("longest", lambda row: f"{row['wait_max_ms']:.1f}"),
    ("step ms", lambda row: f"{row['step_ms']:.1f}"),
    ("of compute", lambda row: f"{row['step_of_compute']:.2f}"),
    ("first batch ms", lambda row: f"{row['first_ms']:.0f}"),
    ("open ms", lambda row: f"{row['open_ms']:.0f}" if "open_ms" in row else "-"),
    ("reads", lambda row: f"{row['reads_a_batch']:.1f}"),
    ("KiB", lambda row: f"{row['kib_a_batch']:.0f}"),
]


def page(result: Row) -> str:
    """The whole of slow_storage.md."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    batch, seq_len = result["batch"]
    alone, many = (result["no_latency_us_a_read"][threads] for threads in ("1", "32"))
    parts = [
        "# Loaders on slow storage",
        f"Made by `python scripts/bench_slow_storage.py --write docs/benchmarks` on {result['date']}: "
        f"{result['machine']}; {versions}. Every figure is in [slow_storage.json](slow_storage.json).",
        f"Every read waits {result['latency_ms']:g} ms, however much it reads; a step takes a batch of "
        f"{batch} x {seq_len} and computes for {result['compute_ms']:g} ms, in which the processor is free, "
        f"as with a device. The set has {result['tokens']:,} tokens, nothing of it in the page cache; the "
        "loaders' first batches were compared with those of the same set on the disk itself. Loaders are as "
        "`train.py` has them, two batches prefetched by a thread; the others read when they are asked. "
        f"Without latency the file system takes {alone:.0f} us a read for one thread, {many:.0f} us for 32.",
        "* **wait ms**: how long steps waited for their batch, the median of all but the first; **mean** and "
        "**longest** of the same.\n"
        "* **step**: wait and compute, the median; **of compute**: that over the compute alone.\n"
        "* **first batch**: with the loader's start; **open**: the headers of all shards before it.\n"
        "* **reads**, **KiB**: what the file system was asked for a batch, what was read ahead included.",
    ]
    for mount, words in _MOUNTS.items():
        parts += [f"## {mount[0].upper() + mount[1:]}", words, _table(result, mount)]
    parts += ["## Reads that fail", _FAILURES, _failures(result["failures"])]
    return "\n\n".join(parts) + "\n"


_FAILURES = """\
After three batches every read of the storage fails, or all files are cut to 4 KiB. Read at positions, that is
an error in words which names the file and the bytes: with `data.mmap=false` always, and with any set while
its storage is found slow. What is read through a mapping, a set on quick storage, can only fail by the signal
SIGBUS, as `np.memmap` does: sizes could be compared before each read, but the file can be cut, and the disk
can fail, right after that. Set `data.mmap=false` where this matters more than speed."""


def _table(result: Row, mount: str) -> str:
    bound = mount == "12 reads ahead"
    heads = ["", "storage", *(head for head, _ in _COLUMNS), *["least ms"] * bound]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result["rows"]:
        if row["mount"] != mount:
            continue
        if "error" in row:
            cells = [f"failed: {row['error']}", *[""] * (len(heads) - 3)]
        else:
            cells = [written(row) for _, written in _COLUMNS]
            cells += [f"{row['reads_a_batch'] * result['latency_ms'] / 12:.1f}"] * bound
        lines.append("| " + " | ".join([row["way"], row["storage"], *cells]) + " |")
    return "\n".join(lines)


def _failures(rows: list[dict[str, str]]) -> str:
    faults = [key for key in rows[0] if key != "way"]
    lines = ["| | " + " | ".join(faults) + " |", "|---" * (len(faults) + 1) + "|"]
    for row in rows:
        cells = [row["way"], *(row[fault].split(". ")[0] for fault in faults)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
