"""The same tokens through this project's loaders and through other libraries', side by side.

    python scripts/bench_peers.py --write docs/benchmarks [--folder DIR] [--tokens 200000000] [--seconds 1]

Every way of reading delivers int64 inputs and targets of 32 x 1024 from a warm page cache, each in a process
of its own, forked from one that has imported nothing but torch. Next to it in the same process the floor is
measured: the tokens in RAM, copied or gathered into one int64 array. This project's npy loaders are measured
first and last. `--write` makes loader.md and loader.json in a folder; without it the table is only printed.
The libraries are those of `pip install -e '.[bench]'`; what is not installed is listed as such.
About 12 minutes on two cores, and 14 bytes of disk a token. For Linux.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from peers import BATCH_TOKENS, TOKENS_FILE
from peers.forks import Failed, in_fork
from peers.measuring import WINDOWS, Task, measure
from peers.page import page
from peers.report import brief, described
from peers.table import OURS, PEERS, Peer


def write_files(module: str, folder: Path, tokens: int) -> None:
    """What the readers of a module expect, in a folder of its name, unless it is there."""
    target, done = folder / module, folder / f"{module}.done"
    if done.exists() and int(done.read_text()) == tokens:
        return
    done.write_text("0")  # what is there from now on is this script's
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    if module == "ours":
        from parts.bench_sets import random_tokens

        stream = random_tokens(tokens)
    else:
        stream = np.fromfile(folder / "ours" / TOKENS_FILE, np.uint16)
    import_module(f"peers.{module}").write(stream, target)
    done.write_text(str(tokens))


def modules(peers: list[Peer]) -> list[str]:
    """The modules that write files, this project's first: the others read its plain tokens."""
    return list(dict.fromkeys(["ours", *(peer.files for peer in peers)]))


def warm(folder: Path) -> None:
    """Read every file in order, so that the page cache holds it in large pieces."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                while stream.read(1 << 24):
                    pass


def measure_all(peers: list[Peer], folder: Path, tokens: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each way and order, in the order of measuring; `again` marks the second one of ours."""
    log = folder / "log.txt"
    for module in modules(peers):
        in_fork(write_files, module, folder, tokens, log=log, limit=1800)
    warm(folder)
    turns = [(peer, False) for peer in peers] + [(peer, True) for peer in peers if peer.name in OURS]
    rows = []
    for peer, again in turns:
        for order in peer.orders:
            row = {"name": peer.name, "order": order, "again": again, "own_state": peer.own_state}
            try:
                row |= in_fork(measure, Task(peer, order, folder, seconds, log), log=log, limit=1800)
            except Failed as error:
                row |= {"error": str(error)}
            rows.append(row)
            print(f"{peer.name}, {order}: {brief(row)}", file=sys.stderr)
    return rows


def main() -> None:
    """Write the files, measure, print the table, write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=200_000_000, help="tokens of the set (200 000 000)")
    parser.add_argument("--seconds", type=float, default=1.0, help=f"of each of {WINDOWS} windows (1)")
    parser.add_argument("--folder", type=Path, help="keep the files here, use them again (a temporary one)")
    parser.add_argument("--write", type=Path, help="make loader.md and loader.json in this folder")
    parser.add_argument("--only", default="", help="ways whose name this regular expression finds")
    options = parser.parse_args()
    needed = 4 * (BATCH_TOKENS + 1)
    if options.tokens < needed:
        parser.error(f"--tokens={options.tokens} must be at least {needed}: a batch in each shard")
    if not options.seconds > 0:
        parser.error(f"--seconds={options.seconds:g} must be more than 0")
    try:
        peers = [peer for peer in PEERS if re.search(options.only, peer.name)]
    except re.error as error:
        parser.error(f"--only={options.only} is no regular expression: {error}")
    if not peers:
        parser.error(f"--only={options.only} finds none of: {'; '.join(peer.name for peer in PEERS)}")
    if options.folder:
        for module in modules(peers):
            if (options.folder / module).exists() and not (options.folder / f"{module}.done").exists():
                parser.error(f"{options.folder / module} is not of this script: --folder must be another one")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        installed = [peer for peer in peers if peer.version is not None]
        rows = measure_all(installed, folder, options.tokens, options.seconds)
        result = described(rows, peers, folder, options.tokens, options.seconds)
    print(page(result))
    if options.write:
        from harness.files import write_atomic, write_json

        options.write.mkdir(parents=True, exist_ok=True)
        write_json(options.write / "loader.json", result)
        write_atomic(options.write / "loader.md", page(result))
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
