"""The parts of `bench_train.py`: each is measured by a process of its own, which writes down what it has."""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.config import TrainConfig
from harness.errors import UserError
from harness.files import write_json
from harness.hardware.device import peak_flops, select_device, set_numerics
from parts.bench_parts import composed, write_random_set
from parts.train_ladder import VOCAB_SIZE, attention_times, climb, flops_a_token, free, nanogpt_step, rungs
from parts.train_sides import Block, bare_loop, block_of, harness_block, in_turns, traced

# Sequences a step of the comparison, by model; what fits 80 GB at 1024 tokens.
BATCHES = {"gpt2_small": 64, "gpt2_medium": 32}


@dataclass
class Bench:
    """What a part is measured with. `report` writes down what is known by now."""

    options: argparse.Namespace
    device: torch.device
    folder: Path
    report: Callable[[dict[str, Any]], None]

    def say(self, words: str) -> None:
        print(words, flush=True)

    def failed(self, what: str, error: Exception) -> str:
        """Say that something failed, and why; that in one line."""
        self.say(f"  {what} failed:\n{''.join(traceback.format_exception(error))}")
        return " ".join(f"{type(error).__name__}: {error}".split())[:300].replace("|", "/")

    @property
    def compiles(self) -> bool:
        wanted: bool | None = self.options.compile
        return self.device.type == "cuda" if wanted is None else wanted


def measure(part: str, options: argparse.Namespace) -> None:
    """Measure `part`: `machine`, `ladder`, or the model of that name; into `options.part_file`."""
    logging.getLogger("harness").setLevel(logging.WARNING)
    found: dict[str, Any] = {}

    def report(news: dict[str, Any]) -> None:
        found.update(news)
        write_json(options.part_file, found)

    with tempfile.TemporaryDirectory(prefix="bench-train-part-") as temporary:
        try:
            bench = Bench(options, select_device(options.device), Path(temporary), report)
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
        try:
            if part == "machine":
                look(bench)
            elif part == "ladder":
                ladder(bench, options.models[0])
            else:
                compare(bench, part)
        except Exception as error:
            report({"failed": found.get("failed", {}) | {"all of it": bench.failed(part, error)}})
            raise SystemExit(1) from None


def look(bench: Bench) -> None:
    """Which device this is, and whether torch.compile works: it needs a C compiler and Python's headers."""
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "CPU"
    bench.report({"device": name, "compiled": False})
    if bench.compiles:
        torch.compile(lambda x: x.sin() * 2)(torch.ones(8, device=bench.device))
        bench.report({"compiled": True})


def ladder(bench: Bench, model: str) -> None:
    """One layer's attention by itself, and every rung that means something on this device."""
    options, config = bench.options, compose_config(bench, model).model
    rows, failed = list[dict[str, Any]](), dict[str, str]()
    flops, peak = flops_a_token(config, options.seq_len), peak_flops(bench.device)
    size = batch_size(options, model)
    try:
        attention = attention_times(config, size, options.seq_len, bench.device, options.steps)
        bench.report({"attention_ms": attention})
    except Exception as error:
        failed["attention"] = bench.failed("attention", error)
        bench.report({"failed": failed})
    for rung in rungs(max(1, size // 4), size, compiled=bench.compiles):
        if bench.device.type not in rung.on:
            continue
        try:
            timing = climb(rung, config, options.seq_len, bench.device, options.steps)
        except Exception as error:
            failed[rung.name] = bench.failed(rung.name, error)
            bench.report({"failed": failed})
            continue
        rate = timing.tokens_per_s
        rows.append(
            {
                "rung": rung.name,
                "ms": timing.seconds * 1e3,
                "tokens_per_s": rate,
                "mfu": None if peak is None else rate * flops / peak,
                "peak_mb": timing.peak_mb,
                "ready_s": timing.ready_s,
            }
        )
        bench.report({"rows": rows})
        bench.say(f"  {rung.name}: {timing.seconds * 1e3:.1f} ms, {rate:,.0f} tok/s")


def compare(bench: Bench, model: str) -> None:
    """The harness in turns with the bare loop, then with nanoGPT: seconds of each one's blocks.

    Each pair is written down after every two blocks; one that fails costs no other.
    """
    options, device, steps = bench.options, bench.device, bench.options.steps
    failed, pairs = dict[str, str](), dict[str, dict[str, list[float]]]()
    config = compose_config(bench, model)
    tokens = config.loader.batch_size * config.loader.seq_len * steps  # of a block
    bench.report(
        {
            "batch_size": config.loader.batch_size,
            "seq_len": config.loader.seq_len,
            "tokens": tokens,
            "flops": flops_a_token(config.model, config.loader.seq_len),
            "peak": peak_flops(device),
            "pairs": pairs,
            "failed": failed,
        }
    )
    write_random_set(bench.folder / "set", (2 * options.blocks + 3) * tokens, VOCAB_SIZE)
    set_numerics(config, device)
    with harness_block(config, bench.folder / "run", steps, device) as (run, block, store):
        _warm_up(bench, "harness", block)
        others = {"bare": lambda: bare_loop(config, store, device)}
        if options.nanogpt is not None:
            others["nanogpt"] = lambda: nanogpt_step(options.nanogpt, config, device, bench.compiles)
        for name, make in others.items():
            seconds = pairs[name] = {"harness": [], name: []}
            sides = {"harness": block}
            try:
                sides[name] = block_of(make(), steps, device)
                _warm_up(bench, name, sides[name])
                for _ in in_turns(sides, options.blocks, seconds):
                    bench.report({"pairs": pairs})
            except Exception as error:
                failed[name] = bench.failed(name, error)
                bench.report({"failed": failed})
            sides.clear()
            free(device)
        if options.trace:  # last: what has been traced once is slower afterwards
            traced(run, block)
            shutil.copytree(run.path / "profile", options.write / f"trace-{model}", dirs_exist_ok=True)


def _warm_up(bench: Bench, name: str, block: Block) -> None:
    begun = time.perf_counter()
    block()
    bench.say(f"  {name} is ready after a block of {time.perf_counter() - begun:.1f} s")


def compose_config(bench: Bench, model: str) -> TrainConfig:
    """What conf/ holds for this model, on our device; nothing but steps happens in the measured blocks."""
    options, beyond = bench.options, 1_000_000
    words = [f"model={model}", "tracker=none", f"device={bench.device}", f"data.path={bench.folder / 'set'}"]
    words += [f"loader.seq_len={options.seq_len}", f"loader.batch_size={batch_size(options, model)}"]
    words += [f"trainer.max_steps={beyond}", f"evaluation.interval={beyond}", f"checkpoint.interval={beyond}"]
    words += ["data.verify=headers", f"compile={str(bench.compiles).lower()}", *options.words]
    return composed(words)


def batch_size(options: argparse.Namespace, model: str) -> int:
    """Sequences a step in the comparison."""
    size: int = options.batch_size or BATCHES.get(model, 8)
    return size
