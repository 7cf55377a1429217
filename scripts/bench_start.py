"""How long a run takes to its first step, what of it is ours, and what memory that needs.

    python scripts/bench_start.py [--rounds 7] [--folder DIR] [--json PATH] [WORDS of train.py ...]

Real processes on the default model and prepared data, in turns, one of each way a round. A time runs from
before the process is started to its mark: the line of step 1 in train.log, or the end of the imports that a
`python -c` makes. "torch and Hydra" is what no program of this kind can do without, "an AdamW step" what
torch imports besides when its own optimizer makes a step. Memory (Linux) is that of the process at its mark.

The imports are those that `-X importtime` lists, each at the fastest of the rounds: ours by module, and what
they import that neither torch nor Hydra did, by package.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parts.bench_parts import machine, measured_where

from harness.files import write_json

ROOT = Path(__file__).resolve().parents[1]
OURS = ("harness", "__main__")
MARK = "import time; now = time.time(); print(now); print(open('/proc/self/smaps_rollup').read())"
ADAMW = (
    "p = torch.zeros(4, requires_grad=True); o = torch.optim.AdamW([p], fused=True); "
    "p.sum().backward(); o.step()"
)
BARE = {
    "python": "pass",
    "torch": "import torch",
    "torch and Hydra": "import torch, hydra, omegaconf",
    "torch and an AdamW step": f"import torch; {ADAMW}",
}
TRAIN = {"train.py tracker=none": ["tracker=none"], "train.py, W&B offline": ["tracker.mode=offline"]}


class Start(NamedTuple):
    """`seconds` to the mark; `rss` and `anonymous` bytes there, None where the system does not say."""

    seconds: float
    rss: int | None
    anonymous: int | None


def bare(code: str) -> Start:
    """A process that imports and says when it has."""
    begun = time.time()
    process = subprocess.run(
        [sys.executable, "-c", f"{code}; {MARK}"], capture_output=True, text=True, check=True
    )
    now, _, memory = process.stdout.partition("\n")
    return Start(float(now) - begun, *_sizes(memory))


def train(words: list[str], folder: Path) -> Start:
    """A run of one step, to the line that says so."""
    path = Path(tempfile.mkdtemp(prefix="run-", dir=folder)) / "run"
    begun = time.time()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words, f"hydra.run.dir={path}"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    memory, step = "", None
    while step is None and process.poll() is None:
        time.sleep(0.005)
        step = _first_step(path / "train.log")
        if step is not None:  # an evaluation follows, so the process is still there
            memory = _read(Path(f"/proc/{process.pid}/smaps_rollup"))
    _, errors = process.communicate()
    step = step or _first_step(path / "train.log")
    if step is None:
        raise SystemExit(f"train.py {' '.join(words)} made no step:\n{errors}")
    return Start(step - begun, *_sizes(memory))


def _first_step(log: Path) -> float | None:
    for line in _read(log).splitlines():
        date, _, rest = line.partition(",")
        if rest[4:].startswith("step 1/"):
            return datetime.datetime.strptime(date, "%Y-%m-%d %H:%M:%S").timestamp() + int(rest[:3]) / 1e3
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _sizes(smaps: str) -> tuple[int | None, int | None]:
    found = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in smaps.splitlines() if line.endswith("kB")
    }
    return found.get("Rss"), found.get("Anonymous")


def imports(command: list[str], folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of each module's own import, without what it imports: the least of the rounds."""
    least: dict[str, float] = {}
    for _ in range(rounds):
        process = subprocess.run(
            [sys.executable, "-X", "importtime", *command], cwd=folder, capture_output=True, text=True
        )
        for line in process.stderr.splitlines():
            own, _, name = line.removeprefix("import time:").partition("|")
            name = name.partition("|")[2].strip()
            if line.startswith("import time:") and own.strip().isdigit():
                least[name] = min(least.get(name, float("inf")), int(own) / 1e3)
    return least


def imported(folder: Path, words: list[str], rounds: int) -> dict[str, Any]:
    """What our own modules take to import, and what they pull in besides torch and Hydra."""
    free = imports(["-c", BARE["torch and Hydra"]], folder, rounds)
    whole = imports([str(ROOT / "train.py"), *words], folder, rounds)
    ours, pulled = dict[str, float](), collections.Counter[str]()
    for name, milliseconds in whole.items():
        package = name.partition(".")[0]
        if package in OURS:
            ours[name] = milliseconds
        elif name not in free:
            pulled[package] += milliseconds  # type: ignore[assignment]
    return {
        "ours_ms": sum(ours.values()),
        "pulled_ms": sum(pulled.values()),
        "torch_and_hydra_ms": sum(free.values()),
        "modules": {name: ours[name] for name in sorted(ours, key=ours.__getitem__, reverse=True)},
        "packages": dict(pulled.most_common()),
        "compiler": sorted(name for name in whole if name in ("torch._dynamo", "sympy")),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every way in turns."""
    words = ["trainer.max_steps=1", *options.words]
    train([*words, "tracker=none"], folder)  # prepares the data, fills the caches
    starts: dict[str, list[Start]] = collections.defaultdict(list)
    for number in range(options.rounds):
        for name, code in BARE.items():
            starts[name].append(bare(code))
        for name, more in TRAIN.items():
            starts[name].append(train([*words, *more], folder))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    return {
        "ways": {name: _figures(found) for name, found in starts.items()},
        "imports": imported(folder, [*words, "tracker=none"], min(3, options.rounds)),
    }


def _figures(starts: list[Start]) -> dict[str, Any]:
    seconds = [start.seconds for start in starts]
    return {
        "seconds": statistics.median(seconds),
        "least_seconds": min(seconds),
        "all_seconds": seconds,
        "rss": _median([start.rss for start in starts]),
        "anonymous": _median([start.anonymous for start in starts]),
    }


def _median(values: list[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def report(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    ways, found = result["ways"], result["imports"]
    print(measured_where(result))
    print(f"\n{'a process of':<26}{'seconds':>9}{'least':>8}{'RSS MB':>9}{'anonymous':>11}")
    for name, row in ways.items():
        sizes = ["-" if row[key] is None else f"{row[key] / 1e6:.0f}" for key in ("rss", "anonymous")]
        print(f"{name:<26}{row['seconds']:>9.2f}{row['least_seconds']:>8.2f}{sizes[0]:>9}{sizes[1]:>11}")
    ratio = ways["train.py tracker=none"]["seconds"] / ways["torch and Hydra"]["seconds"]
    print(f"\nto the first step: {ratio:.2f} times what torch and Hydra take to import")
    print(
        f"imports, ms: torch and Hydra {found['torch_and_hydra_ms']:.0f}, our {len(found['modules'])} "
        f"modules {found['ours_ms']:.0f}, what they pull in besides {found['pulled_ms']:.0f}\n"
        f"torch's compiler: {', '.join(found['compiler']) or 'not imported'}"
    )
    for title, table in (("our modules", found["modules"]), ("pulled in", found["packages"])):
        first = [f"{name} {milliseconds:.1f}" for name, milliseconds in list(table.items())[:12]]
        print(f"  {title}: {', '.join(first)}")


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="processes of each way (7)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the runs lie")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("words", nargs="*", help="words for train.py")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds} must be at least 1")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-start-", dir=options.folder) as temporary:
        result = measure(options, Path(temporary))
    result |= {"machine": machine(), "load_average": [load_before, os.getloadavg()[0]]}
    report(result)
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
