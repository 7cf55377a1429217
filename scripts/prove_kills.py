"""Kills preparations at random moments, and once at every fsync and every rename, and checks what is left.

    python scripts/prove_kills.py [--random 30] [--scenarios npy-stream,append] [--no-strace]

After each SIGKILL either nothing lies under the set's name, or a set whose every byte is what its manifest
says; the next run must then end with exactly the files of a preparation that nobody killed. Random moments
are drawn from the time between the first file and the end; the others are hit by strace (Debian's package
strace), which kills the process as it enters its N-th such call. Prints a table; exit code 1 where anything
was wrong. Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from parts.killing import CALLS, killed_at, was_killed  # noqa: E402

from harness.config import PrepareScriptConfig  # noqa: E402
from harness.config_groups import (  # noqa: E402
    ContrastiveRowsConfig,
    DataConfig,
    Hdf5DataConfig,
    JsonlCorpusConfig,
    LoaderConfig,
    PaddedRowsConfig,
    PrepareConfig,
)
from harness.prepare import chunks, pipeline, prepare  # noqa: E402
from harness.storage.verify import verify_set  # noqa: E402

_STORAGES = {
    "npy": DataConfig(),
    "hdf5": Hdf5DataConfig(chunk_tokens=1024),
    "gzip": Hdf5DataConfig(chunk_tokens=1024, compression="gzip"),
}
_LOADERS = {
    "stream": LoaderConfig(),
    "rows": PaddedRowsConfig(seq_len=32),
    "pairs": ContrastiveRowsConfig(seq_len=32),
}
_CALLS = ("fsync", "rename")
_SECONDS = 120
_FEW_DOCUMENTS = 330  # for strace: each call of a preparation is a trial


@dataclass(frozen=True)
class Scenario:
    """What is prepared: `kind` is storage and layout, `before` what lies there already and is replaced."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] | None = None


SCENARIOS = {
    f"{storage}-{layout}": Scenario(f"{storage}-{layout}") for storage in _STORAGES for layout in _LOADERS
}
SCENARIOS |= {
    "overwrite": Scenario("npy-stream", {"overwrite": True}, {}),
    "append": Scenario("hdf5-stream", {"append": True}, {}),
    "source": Scenario("npy-rows", {"overwrite": True, "sharding": "source"}, {"sharding": "source"}),
}


@dataclass
class Tally:
    """What was found after the kills of one scenario."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("random", *_CALLS), 0))
    absent: int = 0
    old: int = 0
    new: int = 0
    went_on: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A folder with the corpora, and the sets that are prepared there."""

    name: str
    folder: Path

    @property
    def scenario(self) -> Scenario:
        return SCENARIOS[self.name]

    def config(self, name: str, corpus: str, **settings: Any) -> PrepareScriptConfig:
        storage, layout = self.scenario.kind.split("-")
        settings = {"shard_tokens": 12_000, "val_fraction": 0.2, "workers": 1} | settings
        return PrepareScriptConfig(
            data=replace(_STORAGES[storage], path=str(self.folder / name)),
            corpus=JsonlCorpusConfig(path=str(self.folder / corpus)),
            prepare=PrepareConfig(**settings),
            loader=_LOADERS[layout],
        )

    def start(self, name: str) -> None:
        """What lies under the name of a new trial before it begins."""
        if self.scenario.before is not None:
            shutil.copytree(self.folder / "before", self.folder / name)

    def run(self, name: str) -> list[str]:
        """Prepare in this process, to the end; what was said."""
        said: list[str] = []
        prepare(self.config(name, "new", **self.scenario.settings), report=said.append)
        return said

    def command(self, name: str) -> list[str]:
        """The same in a process of its own."""
        return [sys.executable, __file__, "--child", self.name, str(self.folder), name]


@dataclass(frozen=True)
class Trials:
    """A place, and what a preparation there that nobody killed took and left; `old` lay there before."""

    place: Place
    seconds: float
    expected: dict[str, str]
    old: dict[str, str] | None

    def check(self, name: str, tally: Tally) -> None:
        """Look at what a kill left, run again, compare."""
        folder = self.place.folder
        directory = folder / name
        if not directory.exists():
            tally.absent += 1
        elif not (found := verify_set(directory)).ok:
            tally.wrong.append(f"{name}: {found.faults[0]}")
        elif (left := contents(directory)) in (self.old, self.expected):
            tally.old += left == self.old
            tally.new += left == self.expected
        else:
            tally.wrong.append(f"{name}: neither the old set nor the new")
        tally.went_on += any("going on after" in line for line in self.place.run(name))
        if contents(directory) != self.expected:
            tally.wrong.append(f"{name}: the next run ended with other files")
        if remains := [path.name for path in folder.glob(f"{name}.*") if path.suffix != ".lock"]:
            tally.wrong.append(f"{name}: {remains} were left")
        shutil.rmtree(directory)


def make_trials(name: str, folder: Path, documents: int) -> Trials:
    """Write the corpora, the set that lies there before, and the one that nobody kills."""
    place = Place(name, folder)
    grows = place.scenario.settings.get("append", False)
    corpora = {"old": (0, 1, 2), "new": (0, 1, 2, 3) if grows else (1, 2, 3)}
    for number in range(4):
        write_corpus(folder / "files" / f"{number}.jsonl", documents // 3, seed=number)
        for corpus, numbers in corpora.items():
            (folder / corpus).mkdir(exist_ok=True)
            if number in numbers:
                shutil.copy2(folder / "files" / f"{number}.jsonl", folder / corpus)
    before = place.scenario.before
    if before is not None:
        prepare(place.config("before", "old", **before), report=lambda line: None)
    place.start("straight")
    began = time.monotonic()
    place.run("straight")
    old = contents(folder / "before") if before is not None else None
    return Trials(place, time.monotonic() - began, contents(folder / "straight"), old)


def write_corpus(path: Path, documents: int, seed: int) -> None:
    """JSON lines that serve every layout: a text, and a pair of the same length."""
    chance = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for number in range(documents):
            words = [
                f"{seed}.{number}",
                *(chance.choice(("token", "shard", "loss", "été", "数据")) for _ in range(40)),
            ]
            text = " ".join(words[: chance.randrange(5, 40)])
            pair = {
                "prompt": text[: len(text) // 2],
                "chosen": text[len(text) // 2 :],
                "rejected": text[::-1],
            }
            file.write(json.dumps({"text": text} | pair) + "\n")


def contents(folder: Path) -> dict[str, str]:
    """Every file but the facts of its making, by name and SHA-256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("provenance.json", "verified.json")
    }


def kill_at_random(trials: Trials, count: int, chance: random.Random, tally: Tally) -> None:
    place, late = trials.place, 0
    while tally.kills["random"] < count:
        name = f"random{tally.kills['random'] + late}"
        place.start(name)
        child = subprocess.Popen(place.command(name))
        building = place.folder / f"{name}.preparing"
        while not building.exists() and child.poll() is None:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 1.2 * trials.seconds))
        child.kill()
        if was_killed(child.wait(_SECONDS)):
            tally.kills["random"] += 1
            trials.check(name, tally)
        else:
            late += 1
            shutil.rmtree(place.folder / name)


def kill_at_every(trials: Trials, call: str, tally: Tally) -> None:
    place = trials.place
    for number in range(1, 1 << 20):
        name = f"{call}{number}"
        place.start(name)
        command = killed_at(CALLS[call], number, place.command(name))
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode == 0:  # there is no such call any more
            trials.check(name, Tally())
            return
        if not was_killed(done.returncode):
            raise SystemExit(f"strace cannot be used here: {done.stderr[-500:]}")
        tally.kills[call] += 1
        trials.check(name, tally)


def prove(name: str, options: argparse.Namespace) -> Tally:
    tally, chance = Tally(), random.Random(f"{options.seed} {name}")
    small_steps()
    with tempfile.TemporaryDirectory(prefix="prove-kills-", dir=options.folder) as folder:
        if options.random:
            trials = make_trials(name, Path(folder, "random"), options.documents)
            kill_at_random(trials, options.random, chance, tally)
        if not options.no_strace:
            trials = make_trials(name, Path(folder, "strace"), _FEW_DOCUMENTS)
            for call in _CALLS:
                kill_at_every(trials, call, tally)
    return tally


def small_steps() -> None:
    """Small chunks, and a journal after each."""
    chunks.CHUNK_BYTES, pipeline.JOURNAL_SECONDS = 20_000, 0.0


def child(name: str, folder: str, target: str) -> None:
    small_steps()
    Place(name, Path(folder)).run(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--random", type=int, default=30, help="kills at random moments a scenario")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--documents", type=int, default=1500, help="of the corpus for random moments")
    parser.add_argument("--no-strace", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    print("| what | random | fsync | rename | left: nothing | the old set | the new | went on | wrong |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    wrong = []
    for name in options.scenarios.split(","):
        tally = prove(name, options)
        wrong += [f"{name}: {one}" for one in tally.wrong]
        kills = " | ".join(str(count) for count in tally.kills.values())
        found = f"{tally.absent} | {tally.old} | {tally.new} | {tally.went_on} | {len(tally.wrong)}"
        print(f"| {name} | {kills} | {found} |", flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
