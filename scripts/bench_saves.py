"""What checkpoints cost a run: the loop with saves over without, in the background and not, on a CPU.

    python scripts/bench_saves.py [--rounds 5] [--steps 6] [--n-layer 4] [--n-embd 512] [--json PATH]

One process trains blocks of steps in three ways that take turns, in an order that rotates from round to
round; a first round is not counted. Saves go through `trainer.train` and `Saver`, at every step,
which is as often as can be: at `checkpoint.interval=250` a step bears a 250th of what is shown. A block's
time runs from its first step until its last checkpoint is on disk, the removal of older ones included.

Printed for each way: the median of a step; the ratio to the same round's block without saves, its median and
range; the pause of a save, medians: what the loop waits for the save before it to end, and for its own copy
(or for the whole of it where it is synchronous); and the bytes that are copied and that lie on disk then.
The folder needs room for three checkpoints.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parts.bench_parts import CPU, VOCAB_SIZE, BlockClock, machine, measured_where, write_random_set

from harness.build import assemble, build_learner
from harness.checkpoints.host_copy import tensor_bytes
from harness.checkpoints.saving import Saver
from harness.config import CheckpointConfig, TrainConfig
from harness.data_setup import open_data
from harness.files import write_json
from harness.loaders import make_loader
from harness.preemption import StopRequest
from harness.run_files.run_dir import Status
from harness.tracking import NoTracker
from harness.training.run import Run
from harness.training.trainer import train

WAYS = ("without", "background", "synchronous")


class TimedSaver(Saver):
    """Notes for each save the seconds it waited for the one before, its own seconds, and the bytes copied."""

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        super().__init__(run_dir, config)
        self.background = config.background
        self.saves: list[tuple[float, float, int]] = []

    def save(self, parts: dict[str, Any], before: Callable[[], object] = lambda: None) -> None:
        step = parts["trainer"]["step"]
        start = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        is_new = step != self.last_saved
        super().save(parts, before)
        if is_new:
            copied = tensor_bytes(parts) if self.background else 0
            self.saves.append((waited - start, time.perf_counter() - waited, copied))


def block(run: Run, way: str, steps: int) -> tuple[float, list[tuple[float, float, int]]]:
    """Train `steps` steps; the seconds until the last checkpoint is on disk, and the saves."""
    interval = 10**9 if way == "without" else 1
    config = CheckpointConfig(interval=interval, keep_last=1, background=way == "background")
    saver = run.saver = TimedSaver(run.path, config)
    clock = BlockClock(run.progress, steps)
    with closing(saver):
        train(run, cast(StopRequest, clock))
        ended = time.perf_counter()
    if way == "without":  # the checkpoint at the end is no part of it
        return clock.seconds, []
    return ended - clock.started, saver.saves


def measure(config: TrainConfig, path: Path, rounds: int, steps: int) -> tuple[dict[str, Any], int]:
    """The blocks of each way, one a round, and the bytes of a checkpoint on disk."""
    blocks: dict[str, list[Any]] = {way: [] for way in WAYS}
    with closing(open_data(config, print)) as data, closing(make_loader(config.loader, data.train)) as loader:
        learner = build_learner(config, VOCAB_SIZE, CPU, None)
        path.mkdir()
        run = assemble(
            config, path, learner=learner, data=data, loader=loader, device=CPU, saved=None,
            status=Status(path / "status.json"), tracker=NoTracker(), identity={"run_id": "bench"},
        )  # fmt: skip
        for number in range(rounds + 1):
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                blocks[way].append(block(run, way, steps))
        newest = max((path / "checkpoints").glob("step-*"))
        on_disk = sum(file.stat().st_size for file in newest.iterdir())
        run.log.metrics.close()
    return {way: times[1:] for way, times in blocks.items()}, on_disk


def summary(blocks: dict[str, Any], steps: int) -> dict[str, Any]:
    """Seconds and ratios of each way; the pauses of all its saves."""
    plain = [seconds for seconds, _ in blocks["without"]]
    ways = {}
    for way, times in blocks.items():
        ratios = [seconds / other for (seconds, _), other in zip(times, plain, strict=True)]
        saves = [save for _, block_saves in times for save in block_saves]
        ways[way] = {
            "step_ms": statistics.median(seconds for seconds, _ in times) / steps * 1e3,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "saves": len(saves),
            "wait_ms": statistics.median([wait * 1e3 for wait, _, _ in saves] or [0.0]),
            "own_ms": statistics.median([own * 1e3 for _, own, _ in saves] or [0.0]),
            "copied_bytes": max([copied for _, _, copied in saves], default=0),
        }
    return ways


def make_config(options: argparse.Namespace, set_directory: Path) -> TrainConfig:
    """The model and the batch that were asked for; neither budget nor evaluation comes within the blocks."""
    config = TrainConfig(device="cpu")
    beyond = (options.rounds + 1) * len(WAYS) * options.steps + 1
    config.data.path = str(set_directory)
    config.model.n_layer, config.model.n_embd = options.n_layer, options.n_embd
    config.model.n_head = max(1, options.n_embd // 64)
    config.loader.batch_size, config.loader.seq_len = options.batch_size, options.seq_len
    config.trainer.max_steps = config.evaluation.interval = beyond
    return config


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a block (6)")
    parser.add_argument("--n-layer", type=int, default=4, help="layers of the model (4)")
    parser.add_argument("--n-embd", type=int, default=512, help="its channels (512: 51 MB of weights)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (8)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens a sequence (64)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the run lies")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    for name in ("rounds", "steps", "n_layer", "n_embd", "batch_size", "seq_len"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="bench-saves-", dir=options.folder) as temporary:
        folder = Path(temporary)
        config = make_config(options, folder / "set")
        # Two batches more, so that the prefetch does not meet the end of the epoch.
        batches = config.trainer.max_steps or 0
        write_random_set(folder / "set", (batches + 2) * options.batch_size * options.seq_len + 1)
        load_before = os.getloadavg()[0]
        blocks, on_disk = measure(config, folder / "run", options.rounds, options.steps)
        where = shutil.disk_usage(folder)
    result = {
        "ways": summary(blocks, options.steps),
        "rounds": options.rounds,
        "steps": options.steps,
        "checkpoint_bytes": on_disk,
        "free_bytes": where.free,
        "load_average": [load_before, os.getloadavg()[0]],
        "machine": machine(),
    }
    report(result)
    if options.json:
        write_json(options.json, result)


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    print(measured_where(result))
    print(
        f"{result['rounds']} rounds of {result['steps']} steps a block, a checkpoint of "
        f"{result['checkpoint_bytes'] / 1e6:.0f} MB at every step\n"
    )
    print("| saves       | ms a step | over without (range)  | waits for the last | own pause | copied  |")
    print("|-------------|----------:|----------------------:|-------------------:|----------:|--------:|")
    for way, row in result["ways"].items():
        spread = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} .. {max(row['ratios']):.2f})"
        print(
            f"| {way:<11} | {row['step_ms']:9.0f} | {spread:>21} | {row['wait_ms']:15.1f} ms "
            f"| {row['own_ms']:6.1f} ms | {row['copied_bytes'] / 1e6:4.0f} MB |"
        )


if __name__ == "__main__":
    main()
