"""Kills a run of every storage and loader five times, goes on with it, and audits what it claims.

    python scripts/prove_audit.py [--pairs npy-sequential,hdf5-gzip-padded_rows] [--kills 5] [--steps 90]

Each run is a process of its own that is ended by SIGKILL once it has logged a step drawn at random, and is
then started again with `resume=auto`. The audit must confirm it. Then, in copies: one token of a shard is
changed, with the shard's hash and the manifest rewritten to match, so that the set is whole by itself; one
logged row's chain and one's batch hash are edited; and, with only every fifth row left and no batch hash in
it, the token again. Each time the audit must name the right step (the stretch of five, in the last case): the
first that reads the token, found by looking at where the rows of every batch lie. Prints a table; exit code 1
where anything was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from harness.config import TrainConfig  # noqa: E402
from tests.helpers_matrix import LOADERS, STORAGES, Sets  # noqa: E402

_PAIRS = [f"{storage}-{loader}" for storage in STORAGES for loader in LOADERS]
_SECONDS = 120  # that a process may take to log a step
_EVERY = 5  # rows that are left where the chain alone is compared
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Pair:
    """A storage and a loader, by name, and where the sets and the run and its copies lie."""

    name: str
    sets: Sets
    steps: int

    @property
    def storage(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def loader(self) -> str:
        return self.name.rpartition("-")[2]

    @property
    def path(self) -> Path:
        return self.sets.folder / self.name / "run"

    @property
    def set(self) -> Path:
        return self.sets.directory(self.storage, self.loader)

    def config(self) -> TrainConfig:
        return self.sets.config(
            self.storage,
            self.loader,
            model__n_layer=1,
            model__dropout=0.0,
            trainer__max_steps=self.steps,
            schedule__total_steps=None,
            evaluation__sample_tokens=0,
            evaluation__interval=7,
            checkpoint__interval=7,
            resume="auto",
        )


@dataclass(frozen=True)
class Token:
    """A token of the train split, number `index` of those in `file`, and the first step that reads it."""

    file: Path
    index: int
    step: int


def train(config: TrainConfig, path: Path) -> None:
    """The run, in a process of its own."""
    import logging

    import torch

    from harness.launch import launch

    torch.set_num_threads(1)
    logging.getLogger("harness").setLevel(logging.WARNING)
    launch(config, path)


def run_to_the_end(pair: Pair, kills: int, chance: random.Random) -> int:
    """Train with `kills` SIGKILLs; how many there were."""
    done = 0
    while True:
        process = _CONTEXT.Process(target=train, args=(pair.config(), pair.path))
        process.start()
        if done < kills:
            left = pair.steps - last_step(pair.path)
            wanted = last_step(pair.path) + chance.randint(1, max(1, left // (kills - done + 1)))
            if wait_for(pair.path, wanted, process.is_alive):
                time.sleep(chance.random() * 0.02)  # not always just after a row was written
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
        process.join(_SECONDS)
        if process.exitcode == -signal.SIGKILL:
            done += 1
        elif process.exitcode == 0:
            return done
        else:
            raise SystemExit(f"{pair.name}: a start ended with {process.exitcode}, see {pair.path}/train.log")


def last_step(path: Path) -> int:
    """The step of the last whole row."""
    try:
        steps = re.findall(rb'^\{"step": (\d+),', (path / "metrics.jsonl").read_bytes(), re.MULTILINE)
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def wait_for(path: Path, step: int, alive: Callable[[], bool]) -> bool:
    """Whether the run has logged `step` while it lived."""
    until = time.monotonic() + _SECONDS
    while last_step(path) < step:
        if not alive() or time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def a_token(pair: Pair, chance: random.Random) -> Token:
    """A token that some step read, drawn at random, and the first step that did."""
    from harness.auditing.replay import SegmentReader, open_run, source_of

    record = open_run(pair.path)
    reader = SegmentReader.open(source_of(record, record.segments[0]))
    origins = {step: reader.origins(step) for step in range(1, pair.steps + 1)}
    origin = chance.choice(origins[chance.randint(1, pair.steps)])
    piece = chance.choice(origin.pieces)
    width = LOADERS[pair.loader].seq_len + 1
    if origin.start is None:  # of rows: a column of the row, which may be padding, and an input all the same
        index, token = piece.first * width + chance.randrange(width - 1), None
    else:
        index = piece.first + chance.randrange(piece.length)
        ahead = sum(p.length for p in origin.pieces[: origin.pieces.index(piece)])
        token = origin.start + ahead + index - piece.first
    for step, rows in origins.items():
        for row in rows:
            same_row = token is None and (row.name, row.sample) == (origin.name, origin.sample)
            if same_row or (
                token is not None and row.start is not None and row.start <= token < row.start + width
            ):
                return Token(piece.path, index, step)
    raise AssertionError("the step that it was drawn from reads it")


def change(token: Token, directory: Path) -> None:
    """Change a token in a copy of the set, `directory`, and all hashes to match."""
    import numpy as np

    from harness.storage.manifest import load_manifest, write_manifest

    file = directory / token.file.name
    if file.suffix == ".npy":
        array = np.load(file)
        array.reshape(-1)[token.index] = (int(array.reshape(-1)[token.index]) + 1) % 257
        np.save(file, array)
    else:
        array = _change_hdf5(file, token.index)
    raw = load_manifest(directory).raw
    _put_hash(raw["splits"]["train"], file.name, hashlib.sha256(array.tobytes()).hexdigest())
    write_manifest(directory, raw)


def _change_hdf5(file: Path, index: int) -> Any:
    import h5py

    with h5py.File(file, "r+") as opened:
        dataset = opened["rows" if "rows" in opened else "tokens"]
        array = dataset[:]
        flat = array.reshape(-1)
        flat[index] = (int(flat[index]) + 1) % 257
        dataset[...] = array
        dataset.attrs["sha256"] = hashlib.sha256(array.tobytes()).hexdigest()
    return array


def _put_hash(split: dict[str, Any], file: str, sha256: str) -> None:
    for side in [split] if "shards" in split else split.values():
        for shard in side["shards"]:
            if shard["file"] == file:
                shard["sha256"] = sha256


def audited(path: Path, data: Path) -> list[tuple[int, str]]:
    """What an audit finds wrong with a run."""
    from harness.auditing.audit import audit
    from harness.auditing.replay import open_run

    return list(audit(open_run(path), data_path=str(data)).faults)


def copy_with(pair: Pair, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
    """A copy of the run with other rows."""
    target = pair.path.with_name("copy")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(pair.path, target, ignore=shutil.ignore_patterns("checkpoints"))
    file = target / "metrics.jsonl"
    rows = edit([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def with_other(step: int, key: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Rows of which one, of a training step, has another hash."""

    def edit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        changed = [row for row in rows if row["step"] == step and "loss" in row]
        for row in changed:
            row[key] = f"{int(row[key][0], 16) ^ 1:x}{row[key][1:]}"
        return rows

    return edit


def chain_alone(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every fifth training row, without its batch's hash."""
    kept = [row for row in rows if "loss" in row and row["step"] % _EVERY == 0]
    return [{key: value for key, value in row.items() if key != "batch_sha256"} for row in kept]


def trial(pair: Pair, kills: int, chance: random.Random) -> tuple[list[str], bool]:
    """Kill, go on, audit, change, audit: a row of the table, and whether all was as it must be."""
    pair.sets.make([pair.storage], [pair.loader])
    done = run_to_the_end(pair, kills, chance)
    confirmed = not audited(pair.path, pair.set)
    token = a_token(pair, chance)
    other = pair.path.with_name("set")
    shutil.copytree(pair.set, other)
    change(token, other)
    found = audited(pair.path, other)
    named = "the data is another" in found[0][1] and found[1][0] == token.step
    named &= found[1][1].startswith(f"step {token.step} saw other tokens")

    row = chance.randint(1, pair.steps)
    chain = audited(copy_with(pair, with_other(row, "data_chain")), pair.set)
    batch = audited(copy_with(pair, with_other(row, "batch_sha256")), pair.set)
    edited = [[(at, "was changed" in text) for at, text in found] for found in (chain, batch)]
    rows_named = edited == [[(row, True)]] * 2

    alone = audited(copy_with(pair, chain_alone), other)
    first = (token.step - 1) // _EVERY * _EVERY + 1
    words = f"one of the steps {first} to {first + _EVERY - 1} saw other tokens"
    stretch = [text for _, text in alone if "saw other tokens" in text][:1]
    stretch_named = bool(stretch) and stretch[0].startswith(words)

    good = done == kills and confirmed and named and rows_named and stretch_named
    marks = [str(done), _mark(confirmed), f"{token.step} {_mark(named)}", f"{row} {_mark(rows_named)}"]
    return [pair.name, *marks, f"{first}-{first + _EVERY - 1} {_mark(stretch_named)}"], good


def _mark(right: bool) -> str:
    return "yes" if right else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", default=",".join(_PAIRS))
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the runs lie meanwhile")
    options = parser.parse_args()
    names = options.pairs.split(",")
    if unknown := set(names) - set(_PAIRS):
        parser.error(f"--pairs: {', '.join(sorted(unknown))} is none of {', '.join(_PAIRS)}")
    _CONTEXT.set_forkserver_preload(["harness.launch", "h5py"])
    chance, started, right = random.Random(options.seed), time.perf_counter(), 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sets = Sets(Path(folder), documents=60, shard_tokens=900)
        print("| pair | kills | confirmed | token: first step | row edited: step | chain alone: steps |")
        print("|---|---|---|---|---|---|")
        for name in names:
            cells, good = trial(Pair(name, sets, options.steps), options.kills, chance)
            right += good
            print(f"| {' | '.join(cells)} |", flush=True)
    seconds = time.perf_counter() - started
    print(f"\n{right} of {len(names)} pairs as it must be; {seconds:.0f} s", flush=True)
    raise SystemExit(0 if right == len(names) else 1)


if __name__ == "__main__":
    main()
