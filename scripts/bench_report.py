"""How long a report of a thousand jobs takes: `scripts/report.py` as a process, on directories made for it.

    python scripts/bench_report.py [--jobs 1000] [--rows 500] [--rounds 3] [--json PATH]

One job is trained for real, by `train.py -m`, with `--rows` logged steps and an evaluation at every tenth.
The others are copies of all its files but the checkpoints, over a grid of stride, weight decay,
learning rate and five seeds: keys, words and every loss of a copy are its own. Of a hundred jobs one has
failed, one died, and one has a metrics file with a line that is no row.

Printed: the seconds of the whole process, each round and the median, with what it read and wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parts.bench_parts import machine, write_random_set

from harness.files import write_json
from harness.tracking.jsonl import encode_row, read_rows

ROOT = Path(__file__).resolve().parents[1]
_STRIDE, _DECAY, _LR = 8, 0.1, 0.001
_SEEDS = 5


def train_one(folder: Path, rows: int) -> Path:
    """A real job of `rows` steps, each of them logged."""
    write_random_set(folder / "set", 4000)
    words = [
        "tracker=none", f"data.path={folder / 'set'}", "loader=sliding_window", f"loader.stride={_STRIDE}",
        "loader.seq_len=16", f"optimizer.weight_decay={_DECAY}", f"optimizer.lr={_LR}", "seed=0",
        "loader.batch_size=2", "model.n_layer=1", "model.n_head=1", "model.n_embd=8",
        f"trainer.max_steps={rows}", "trainer.log_interval=1",
        "evaluation.interval=10", "evaluation.tokens=100",
        "evaluation.sample_tokens=0", "sweep.name=one", "device=cpu",
    ]  # fmt: skip
    command = [sys.executable, str(ROOT / "train.py"), "-m", *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(path.parent for path in (folder / "multirun" / "one").glob("*/metrics.jsonl"))


class Copies:
    """Copies of a job's directory that differ as the jobs of a sweep do."""

    def __init__(self, job: Path) -> None:
        texts = ("config.yaml", "job.json", ".hydra/config.yaml", ".hydra/overrides.yaml")
        self.texts = {name: (job / name).read_text() for name in texts}
        self.rows = read_rows(job / "metrics.jsonl")
        self.job, self.random = job, random.Random(0)
        self.status = json.loads((job / "status.json").read_text())

    def write(self, path: Path, number: int, keys: dict[str, Any]) -> None:
        """The job `number` of the grid, with the values `keys` of its swept keys."""
        ignored = shutil.ignore_patterns("checkpoints", *self.texts, "metrics.jsonl")
        shutil.copytree(self.job, path, ignore=ignored)
        (path / ".hydra").mkdir(exist_ok=True)
        for name, text in self.texts.items():
            (path / name).write_text(self._with_keys(text, keys))
        effect = 0.01 * (keys["stride"] % 7) + 0.3 * keys["lr"] + self.random.gauss(0, 0.005)
        lines = [encode_row(self._varied(row, effect)) for row in self.rows]
        if number % 100 == 97:
            lines[len(lines) // 2] = b"{torn\n"
        (path / "metrics.jsonl").write_bytes(b"".join(lines))
        if number % 100 in (98, 99):
            gone = {"state": "running", "pid": 2**22 + 1}  # no process has such an id
            failed = {"state": "failed", "reason": "error", "error": "RuntimeError: a synthetic one"}
            write_json(path / "status.json", self.status | (gone if number % 100 == 98 else failed))

    def _with_keys(self, text: str, keys: dict[str, Any]) -> str:
        for key, before in (("stride", _STRIDE), ("weight_decay", _DECAY), ("lr", _LR), ("seed", 0)):
            for mark in (": ", "="):
                text = text.replace(f"{key}{mark}{before}", f"{key}{mark}{keys[key]}")
        return text

    def _varied(self, row: dict[str, Any], effect: float) -> dict[str, Any]:
        noise = self.random.gauss(0, 0.02)
        changed = {key: row[key] + effect + noise for key in ("loss", "val_loss") if key in row}
        speed = {"tokens_per_s": row["tokens_per_s"] * (1 + noise)} if "tokens_per_s" in row else {}
        return row | changed | speed


def write_jobs(job: Path, folder: Path, count: int) -> int:
    """`count` job directories in `folder`; the bytes of their files."""
    copies = Copies(job)
    for number in range(count):
        group, seed = divmod(number, _SEEDS)
        block, decay = divmod(group, 4)
        keys = {"stride": 4 + block % 10, "lr": round(1e-3 * (1 + block // 10), 6)}
        keys |= {"weight_decay": (0.1, 0.2, 0.3, 0.4)[decay], "seed": seed}
        copies.write(folder / f"job-{number:05d}", number, keys)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(folder: Path, rounds: int) -> tuple[list[tuple[float, float]], list[str]]:
    """The seconds of each report, by the clock and of the processor, and the first lines that it printed."""
    seconds = []
    for _ in range(rounds):
        start, used = time.perf_counter(), _children_s()
        command = [sys.executable, str(ROOT / "scripts" / "report.py"), str(folder)]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds.append((time.perf_counter() - start, _children_s() - used))
    return seconds, process.stdout.splitlines()[:8]


def _children_s() -> float:
    """What the processes that have ended used of a processor."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Make the directories, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000, help="directories (1000)")
    parser.add_argument("--rows", type=int, default=500, help="logged steps a job (500)")
    parser.add_argument("--rounds", type=int, default=3, help="reports (3)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where they lie")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    for name in ("jobs", "rows", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="bench-report-", dir=options.folder) as temporary:
        folder = Path(temporary)
        size = write_jobs(train_one(folder, options.rows), folder / "sweep", options.jobs)
        load = os.getloadavg()[0]
        seconds, lines = measure(folder / "sweep", options.rounds)
        written = {path.name: path.stat().st_size for path in (folder / "sweep").glob("report.*")}
    result = {
        "jobs": options.jobs,
        "rows": options.rows,
        "seconds": [clock for clock, _ in seconds],
        "median_s": statistics.median(clock for clock, _ in seconds),
        "cpu_s": statistics.median(used for _, used in seconds),
        "read_bytes": size,
        "written_bytes": written,
        "load_average": load,
        "machine": machine(),
    }
    report(result, lines)
    if options.json:
        write_json(options.json, result)


def report(result: dict[str, Any], lines: list[str]) -> None:
    """Print the figures."""
    where = result["machine"]
    print("\n".join(lines))
    print(
        f"\n{where['cpu']}, {where['cpus']} CPUs, {where['platform']}, Python {where['python']}, load "
        f"average {result['load_average']:.1f}"
    )
    files = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sorted(result["written_bytes"].items()))
    seconds = ", ".join(f"{s:.2f}" for s in result["seconds"])
    print(
        f"{result['jobs']} jobs of {result['rows']} steps and their evaluations, "
        f"{result['read_bytes'] / 1e6:.0f} MB: {seconds} s, median {result['median_s']:.2f} s "
        f"({result['cpu_s']:.2f} s of a processor); {files}"
    )


if __name__ == "__main__":
    main()
