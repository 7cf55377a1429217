"""What the loop costs beside the model: `trainer.train` against a bare loop, in one process on CPU.

    python scripts/bench_loop.py [--model nano] [--pairs 10] [--steps 20] [--json PATH]

The two sides take turns, a block of steps each, and who goes first alternates from pair to pair; a first pair
is not counted. Both start from the same weights and get the same batches and learning rates; at the end their
weights must be equal to the last bit, so they did the same work.

The bare side: forward, backward, clipping, the fused AdamW step, zero_grad; its batches are int64 in memory.

The harness's side: `train` as conf/ sets it, with `tracker=none`. Its time holds all that happens from a
block's first step to the end of its last: the loader and its prefetch thread over a set on disk, the
schedule, and every `trainer.log_interval` steps the row in metrics.jsonl, the line in train.log and on a
console (here the null device), and status.json (with fsync, at most once a second). Not in it: evaluations
and checkpoints, which have intervals of their own, and the start of a run.

Beside it: how long a step of the harness waited for its batch, the 99th percentile as a share of the step.

The overhead of a pair is harness / bare - 1. The interval of the median is one of order statistics: it
assumes nothing about the noise but that it is alike on both sides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from parts.bench_parts import (
    CPU,
    VOCAB_SIZE,
    BlockClock,
    composed,
    console,
    machine,
    measured_where,
    median_interval,
    write_random_set,
)
from torch import Tensor, nn

from harness.build import assemble, build_learner
from harness.commandline.composition import config_dir
from harness.config import TrainConfig, set_directory
from harness.data_setup import open_data
from harness.errors import UserError
from harness.files import write_json
from harness.loaders import Batch, Loader, TokenDataLoader, make_loader
from harness.optim import lr_at
from harness.preemption import StopRequest
from harness.run_files.run_dir import Status, log_file
from harness.storage import TokenStore
from harness.tracking import NoTracker
from harness.training.run import Run
from harness.training.trainer import train


class BareLoop:
    """The same model, optimizer, learning rates and batches, and nothing else."""

    def __init__(self, config: TrainConfig, store: TokenStore, total_steps: int) -> None:
        learner = build_learner(config, VOCAB_SIZE, CPU, None)
        self.model, self.optimizer, self.grad_clip = (
            learner.model,
            learner.optimizer,
            config.trainer.grad_clip,
        )
        loader = TokenDataLoader(store, config.loader.batch_size, config.loader.seq_len)
        self.batches = [loader.next_batch()[:2] for _ in range(total_steps)]
        budget = config.trainer.max_steps
        assert budget is not None
        self.lrs = [lr_at(k + 1, config.optimizer.lr, config.schedule, budget) for k in range(total_steps)]
        self.done = 0

    def block(self, steps: int) -> float:
        """Train `steps` steps; the seconds they took."""
        block = slice(self.done, self.done + steps)
        start = time.perf_counter()
        for (inputs, targets), lr in zip(self.batches[block], self.lrs[block], strict=True):
            self.step(inputs, targets, lr)
        seconds = time.perf_counter() - start
        self.done += steps
        return seconds

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> None:
        """One optimizer step; its graph dies with it, as on the harness's side."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.model.loss(inputs, targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class WaitClock:
    """A run's loader that notes how long each batch was waited for."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self.waits = loader, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_batch(self) -> Batch:
        """The loader's next batch, timed."""
        start = time.perf_counter()
        batch = self._loader.next_batch()
        self.waits.append(time.perf_counter() - start)
        return batch


def harness_block(run: Run, steps: int) -> float:
    """Train `steps` steps with the harness's loop; the seconds they took, before the checkpoint."""
    clock = BlockClock(run.progress, steps)
    train(run, cast(StopRequest, clock))
    shutil.rmtree(run.path / "checkpoints")
    return clock.seconds


def compose_config(options: argparse.Namespace, folder: Path) -> TrainConfig:
    """What conf/ holds for this model; the budget and the intervals end beyond the last measured step."""
    beyond = (options.pairs + 1) * options.steps + 1
    words = [f"model={options.model}", "tracker=none", "device=cpu"]
    words += [f"trainer.max_steps={beyond}", f"evaluation.interval={beyond}", f"checkpoint.interval={beyond}"]
    for key in ("batch_size", "seq_len"):
        if getattr(options, key) is not None:
            words.append(f"loader.{key}={getattr(options, key)}")
    config = composed(words)
    config.data.path = str(folder / "set")
    return config


def measure(
    config: TrainConfig, path: Path, pairs: int, steps: int
) -> tuple[list[tuple[float, float]], list[float]]:
    """Seconds of a block of the harness and of the bare loop, for each pair; each step's wait for data."""
    with closing(open_data(config, print)) as data, closing(make_loader(config.loader, data.train)) as source:
        assert isinstance(data.train, TokenStore)
        bare = BareLoop(config, data.train, (pairs + 1) * steps)
        learner = build_learner(config, VOCAB_SIZE, CPU, None)
        loader = WaitClock(source)
        path.mkdir()
        with log_file(path), console():
            run = assemble(
                config, path, learner=learner, data=data, loader=cast(Loader, loader), device=CPU, saved=None,
                status=Status(path / "status.json"), tracker=NoTracker(), identity={"run_id": "bench"},
            )  # fmt: skip
            times = []
            for pair in range(pairs + 1):
                if pair % 2:
                    harness_s, bare_s = harness_block(run, steps), bare.block(steps)
                else:
                    bare_s, harness_s = bare.block(steps), harness_block(run, steps)
                times.append((harness_s, bare_s))
        check_equal(run.model.state_dict(), bare.model.state_dict())
    return times[1:], loader.waits[steps:]


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Both sides did the same work, to the last bit."""
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert ours.keys() == theirs.keys()
    assert not different, f"the two sides trained other weights: {', '.join(different)}"


def summary(times: list[tuple[float, float]], waits: list[float], steps: int) -> dict[str, Any]:
    """The figures of all pairs; overheads are shares of the bare loop's time."""
    overheads = [harness_s / bare_s - 1 for harness_s, bare_s in times]
    low, high, coverage = median_interval(overheads)
    step_s = statistics.median(harness_s for harness_s, _ in times) / steps
    median, p99, longest = (float(np.quantile(waits, share)) for share in (0.5, 0.99, 1.0))
    return {
        "pairs": len(times),
        "steps": steps,
        "harness_ms_a_step": step_s * 1e3,
        "bare_ms_a_step": statistics.median(bare_s for _, bare_s in times) / steps * 1e3,
        "overhead": statistics.median(overheads),
        "interval": [low, high],
        "coverage": coverage,
        "overheads": overheads,
        "wait_ms": {"median": median * 1e3, "p99": p99 * 1e3, "max": longest * 1e3},
        "wait_p99_share": p99 / step_s,
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = sorted(file.stem for file in (config_dir() / "model").glob("*.yaml"))
    parser.add_argument("--model", default="nano", choices=sizes, help="size of the model (nano)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks that count (10)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (20)")
    parser.add_argument("--batch-size", type=int, help="sequences a step (as loader.batch_size in conf/)")
    parser.add_argument("--seq-len", type=int, help="tokens a sequence (as loader.seq_len in conf/)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the run lies")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < 1:
        parser.error(f"--pairs={options.pairs} and --steps={options.steps} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="bench-loop-", dir=options.folder) as temporary:
        folder = Path(temporary)
        try:
            config = compose_config(options, folder)
        except UserError as error:
            parser.error(str(error))
        loader, last_step = config.loader, (options.pairs + 1) * options.steps
        # Two batches more, so that the prefetch does not meet the end of the epoch.
        tokens = (last_step + loader.prefetch) * loader.batch_size * loader.seq_len + 1
        write_random_set(set_directory(config), tokens)
        load_before = os.getloadavg()[0]
        times, waits = measure(config, folder / "run", options.pairs, options.steps)
    result = summary(times, waits, options.steps) | {
        "model": options.model,
        "batch_size": loader.batch_size,
        "seq_len": loader.seq_len,
        "log_interval": config.trainer.log_interval,
        "load_average": [load_before, os.getloadavg()[0]],
        "machine": machine(),
    }
    report(result)
    if options.json:
        write_json(options.json, result)


def report(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    low, high = result["interval"]
    print(measured_where(result))
    print(
        f"model {result['model']}, {result['batch_size']} x {result['seq_len']} tokens a step, "
        f"{result['pairs']} pairs of blocks of {result['steps']} steps, "
        f"a log row every {result['log_interval']} steps"
    )
    print(
        f"bare loop  {result['bare_ms_a_step']:9.3f} ms a step (median)\n"
        f"harness    {result['harness_ms_a_step']:9.3f} ms a step (median)\n"
        f"overhead of a pair: " + " ".join(f"{value:+.2%}" for value in result["overheads"])
    )
    print(
        f"overhead   {result['overhead']:+.2%} median, {low:+.2%} .. {high:+.2%} "
        f"(interval of the median by order statistics, coverage {result['coverage']:.1%})"
    )
    wait = result["wait_ms"]
    print(
        f"wait for data: median {wait['median']:.3f} ms, p99 {wait['p99']:.3f} ms = "
        f"{result['wait_p99_share']:.2%} of a step, longest {wait['max']:.3f} ms"
    )
    print(f"final weights of both sides are equal bit for bit after {result['pairs'] + 1} blocks each")


if __name__ == "__main__":
    main()
