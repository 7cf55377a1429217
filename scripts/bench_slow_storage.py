"""Loaders on storage where every read waits 5 ms, beside plain mappings, RowReader and read_ranges.

    python scripts/bench_slow_storage.py --write docs/benchmarks [--folder DIR] [--tokens N] [--steps 150]

A folder is mounted through FUSE by `slow_storage/slow_fs.c`, in which a read takes a set time, however much
it reads. Steps take a batch of 32 x 1024 and then "compute" for 20 ms, in which the processor is free, as
with a device. Every way has a process of its own, with nothing in the page cache. Before it is measured, each
loader's first batches are compared with those of the same set on the disk itself. Three mounts: with 64 reads
of the kernel's own under way at once, with 12 (what FUSE does by default), and with direct I/O: there the
page cache keeps nothing, files cannot be mapped and hints do nothing. At the end reads fail: what comes of
that.

`--write` makes slow_storage.md and slow_storage.json in a folder; without it the page is only printed.
For Linux, as root: `apt-get install gcc pkg-config fuse3 libfuse3-dev`. About 8 minutes, and 20 bytes of disk
a token (40,000,000 of them by default).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from parts.bench_sets import random_tokens, write_sets
from peers.forks import Failed, in_fork
from slow_storage import BATCH_SIZE, SEQ_LEN, ways
from slow_storage.failures import outcomes
from slow_storage.mount import Kind, build, fuse_version, mounted
from slow_storage.page import page

from harness.files import write_atomic, write_json

# How many batches of each loader are compared with those on the disk itself.
_CHECKED = 20
_SMALL = 2_000_000  # tokens of the set whose reads fail
# The look-ahead of a file system in the kernel: ours, and the default of FUSE.
_WIDE, _NARROW = 64, 12


def measured(
    program: Path, folder: Path, work: Path, log: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every way of reading on every kind of mount."""
    latency_us, compute = int(options.latency_ms * 1000), options.compute_ms / 1000
    kinds = {
        "64 reads ahead": Kind(latency_us, _WIDE),
        "12 reads ahead": Kind(latency_us, _NARROW),
        "direct I/O": Kind(latency_us, _WIDE, direct=True),
    }
    rows = []

    def run(mount_name: str, storage: str, name: str, task: Any, *arguments: Any) -> None:
        row: dict[str, Any] = {"mount": mount_name, "storage": storage, "way": name}
        with mounted(program, folder, work / "mount", kinds[mount_name]) as place:
            try:
                row |= in_fork(task, place, *arguments, log=log)
            except Failed as failed:
                row["error"] = str(failed)
        rows.append(row)
        print(f"{mount_name}: {storage} {name}: {row.get('error') or _brief(row)}", file=sys.stderr)

    for mount_name in kinds:
        plain_steps = min(options.steps, 40)
        for name in ways.PLAIN:
            if mount_name == "direct I/O" and name != "np.memmap, windows":
                continue  # nothing can be mapped there
            run(mount_name, "npy", name, ways.plain, name, plain_steps, compute)
        for storage in ("npy", "hdf5", "hdf5 gzip") if mount_name == "64 reads ahead" else ("npy", "hdf5"):
            for name, (layout, _) in ways.LOADERS.items():
                where = f"{storage}-{layout}".replace(" ", "-")
                with mounted(program, folder, work / "mount", kinds[mount_name]) as place:
                    in_fork(ways.check, place, folder, where, name, _CHECKED, log=log)
                steps = ways.steps_of(name, options.steps)
                run(mount_name, storage, name, ways.loader, where, name, steps, compute)
    return rows


def _brief(row: dict[str, Any]) -> str:
    return f"wait {row['wait_ms']:.2f} ms, step {row['step_of_compute']:.2f} of compute"


def main() -> None:
    """Write the sets, measure, print the page, write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, help="make slow_storage.md and slow_storage.json in this folder"
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the sets are made")
    parser.add_argument("--tokens", type=int, default=40_000_000, help="of the sets (40 000 000)")
    parser.add_argument("--steps", type=int, default=150, help="of each loader (150)")
    parser.add_argument("--latency-ms", type=float, default=5.0, help="of a read (5)")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="of a step (20)")
    options = parser.parse_args()
    if options.steps < 10 or options.tokens < 2 * _SMALL:
        parser.error(f"--steps={options.steps} must be at least 10, --tokens={options.tokens} {2 * _SMALL}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        program, log = build(work), work / "log"
        folder, small = work / "sets", work / "small"
        for there, tokens in ((folder, options.tokens), (small, _SMALL)):
            there.mkdir()
            write_sets(there, random_tokens(tokens), SEQ_LEN + 1)
        ways.write_plain(folder)
        with mounted(program, folder, work / "mount", Kind(0, _WIDE)) as place:
            ceilings = {str(threads): ways.ceiling(place, threads) for threads in (1, 32)}
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, Linux",
            "versions": {
                "Python": ".".join(map(str, sys.version_info[:3])),
                "libfuse": fuse_version(),
                **{module: version(module) for module in ("torch", "numpy", "h5py")},
            },
            "batch": [BATCH_SIZE, SEQ_LEN],
            **{key: vars(options)[key] for key in ("tokens", "steps", "latency_ms", "compute_ms")},
            "no_latency_us_a_read": ceilings,
            "rows": measured(program, folder, work, log, options),
            "failures": outcomes(program, small, work, log),
        }
    text = page(result)
    print(text)
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        write_json(options.write / "slow_storage.json", result)
        write_atomic(options.write / "slow_storage.md", text)


if __name__ == "__main__":
    main()
