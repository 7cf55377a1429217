"""How fast a step trains: what each measure brings, and the harness beside a bare loop and beside nanoGPT.

    python scripts/bench_train.py [--models gpt2_small gpt2_medium] [--nanogpt CHECKOUT] [--write FOLDER]

First the ladder (scripts/train_ladder.py) with the first model: from eager float32 to what the harness does
by default on a GPU, one measure at a time. Then each model at its batch: blocks of steps of the harness's
real loop (its loader over a set on disk, its log, its guard), of a bare loop with the same model, optimizer
and precision over batches in memory, and, where a checkout is given, of nanoGPT's model in such a bare loop.
The blocks take turns in one process. Evaluations and checkpoints have intervals of their own, and are not in
it.

MFU is `flops_per_token * tokens a second / peak`, by harness/model.py and the dense bf16 peak in
harness/hardware/peak_flops.py; where that does not know the device there is none.

What is measured is written after each part, so that a call which is ended early leaves what it has; a part
that fails (out of memory, a compiler that is missing) says so in its place, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_parts import machine, median_interval, write_random_set
from train_ladder import (
    VOCAB_SIZE,
    clear,
    climb,
    flops_a_token,
    nanogpt_step,
    rungs,
)
from train_sides import bare_loop, block_of, harness_block, in_turns

from harness.commandline.composition import config_dir, register, to_dataclass
from harness.config import TrainConfig
from harness.errors import UserError
from harness.files import write_atomic, write_json
from harness.hardware.device import peak_flops, select_device, set_numerics

# Sequences a step of the comparison, by model; what fits 80 GB at 1024 tokens.
BATCHES = {"gpt2_small": 64, "gpt2_medium": 32}


@dataclass
class Bench:
    """What all parts of one call share."""

    options: argparse.Namespace
    device: torch.device
    folder: Path

    def say(self, words: str) -> None:
        print(words, flush=True)

    def failed(self, part: str, error: Exception) -> str:
        """Say that a part failed, and why; that in one line."""
        self.say(f"  {part} failed:\n{''.join(traceback.format_exception(error))}")
        return " ".join(f"{type(error).__name__}: {error}".split())[:300].replace("|", "/")


def compose_config(bench: Bench, model: str, data: Path) -> TrainConfig:
    """What conf/ holds for this model, on our device; nothing but steps happens in the measured blocks."""
    from hydra import compose, initialize_config_dir

    options, beyond = bench.options, 1_000_000
    words = [f"model={model}", "tracker=none", f"device={bench.device}", f"data.path={data}"]
    words += [f"loader.seq_len={options.seq_len}", f"loader.batch_size={batch_size(options, model)}"]
    words += [f"trainer.max_steps={beyond}", f"evaluation.interval={beyond}", f"checkpoint.interval={beyond}"]
    words += ["data.verify=headers", *options.words]
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = to_dataclass(compose("train", overrides=words))
    assert isinstance(config, TrainConfig)
    return config


def batch_size(options: argparse.Namespace, model: str) -> int:
    """Sequences a step in the comparison."""
    size: int = options.batch_size or BATCHES.get(model, 8)
    return size


def ladder(bench: Bench, model: str) -> list[dict[str, Any]]:
    """Every rung that means something on this device."""
    options, config = bench.options, model_config(model)
    flops, peak = flops_a_token(config, options.seq_len), peak_flops(bench.device)
    small = options.batch_size or BATCHES.get(model, 8)
    rows: list[dict[str, Any]] = []
    for rung in rungs(max(1, small // 4), small, compiled=options.compile):
        if bench.device.type not in rung.on:
            continue
        try:
            timing = climb(rung, config, options.seq_len, bench.device, options.steps)
        except Exception as error:
            rows.append({"rung": rung.name, "failed": bench.failed(rung.name, error)})
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
        bench.say(f"  {rung.name}: {timing.seconds * 1e3:.1f} ms, {rate:,.0f} tok/s")
    return rows


def model_config(model: str) -> Any:
    """The sizes of conf/model/MODEL.yaml."""
    from hydra import compose, initialize_config_dir

    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return to_dataclass(compose("train", overrides=[f"model={model}"])).model


def compare(bench: Bench, model: str) -> dict[str, Any]:
    """The harness, the bare loop and nanoGPT in turns: tokens a second, and the harness's own share."""
    options, device = bench.options, bench.device
    clear(device)
    data = bench.folder / f"set-{model}"
    size, steps = batch_size(options, model), options.steps
    tokens = (options.blocks + 2) * steps * size * options.seq_len
    write_random_set(data, tokens, VOCAB_SIZE)
    config = compose_config(bench, model, data)
    set_numerics(config, device)
    with harness_block(config, bench.folder / f"run-{model}", steps, device) as (ours, store):
        sides = {"harness": ours}
        sides["bare"] = block_of(bare_loop(config, store, device), steps, device)
        if options.nanogpt is not None:
            theirs = nanogpt_step(
                options.nanogpt, config.model, size, options.seq_len, device, options.compile
            )
            sides["nanogpt"] = block_of(theirs, steps, device)
        for name, block in sides.items():  # compiles, and warms up
            bench.say(f"  {name} is ready after a block of {block():.1f} s")
        seconds = in_turns(sides, options.blocks)
    if options.trace:
        shutil.copytree(
            bench.folder / f"run-{model}" / "profile", options.write / f"trace-{model}", dirs_exist_ok=True
        )
    return figures(bench, config, model, seconds)


def compared(bench: Bench, model: str) -> dict[str, Any]:
    """`compare`, or why it failed."""
    try:
        return compare(bench, model)
    except Exception as error:
        return {"model": model, "failed": bench.failed(model, error)}


def figures(bench: Bench, config: TrainConfig, model: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What the blocks of one model say."""
    flops, peak = flops_a_token(config.model, config.loader.seq_len), peak_flops(bench.device)
    tokens = config.loader.batch_size * config.loader.seq_len * bench.options.steps
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    shares = [ours / bare - 1 for ours, bare in zip(seconds["harness"], seconds["bare"], strict=True)]
    low, high, coverage = median_interval(shares)
    return {
        "model": model,
        "batch_size": config.loader.batch_size,
        "seq_len": config.loader.seq_len,
        "tokens_per_s": rates,
        "mfu": None if peak is None else {name: rate * flops / peak for name, rate in rates.items()},
        "own_share": statistics.median(shares),
        "interval": [low, high],
        "coverage": coverage,
        "seconds": seconds,
    }


def tables(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [f"Ladder, {result['ladder_model']} at T={result['seq_len']}:", ""]
    lines += [
        "| measure | ms a step | tokens/s | MFU | peak memory | ready after |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["ladder"]:
        if "failed" in row:
            lines.append(f"| {row['rung']} | {row['failed']} | - | - | - | - |")
            continue
        memory = "-" if row["peak_mb"] is None else f"{row['peak_mb'] / 1e3:.1f} GB"
        lines.append(
            f"| {row['rung']} | {row['ms']:.1f} | {row['tokens_per_s']:,.0f} | {_percent(row['mfu'])} "
            f"| {memory} | {row['ready_s']:.1f} s |"
        )
    for one in result["comparisons"]:
        if "failed" in one:
            lines += ["", f"{one['model']} failed: {one['failed']}"]
            continue
        lines += ["", f"{one['model']}, {one['batch_size']} x {one['seq_len']} tokens a step, in turns:", ""]
        lines += ["| loop | tokens/s | MFU |", "|---|---|---|"]
        for name, rate in one["tokens_per_s"].items():
            lines.append(f"| {name} | {rate:,.0f} | {_percent(one['mfu'] and one['mfu'][name])} |")
        low, high = one["interval"]
        lines += [
            "",
            f"The harness's own share of a step: {one['own_share']:+.2%} ({low:+.2%} .. {high:+.2%}).",
        ]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt2_small", "gpt2_medium"], help="of conf/model/")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens a sequence (1024)")
    parser.add_argument("--batch-size", type=int, help="sequences a step (64 for gpt2_small, ...)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a rung and of a block (10)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks a side (6)")
    parser.add_argument("--device", default="auto", help="as in train.py (auto)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--words", nargs="*", default=[], help="more words for the harness's configuration")
    parser.add_argument("--write", type=Path, help="write train.md and train.json into this folder")
    parser.add_argument(
        "--trace", action="store_true", help="with --write: also a trace of three steps of each model"
    )
    options = parser.parse_args()
    if options.trace and (options.write is None or options.steps < 10):
        parser.error(
            f"--trace needs --write, and --steps={options.steps} of at least 10: it takes steps 8 to 10"
        )
    try:
        device = select_device(options.device)
    except UserError as error:
        parser.error(str(error))
    if options.compile is None:
        options.compile = device.type == "cuda"
    options.compile = options.compile and compiles(device)
    options.words += [f"compile={str(options.compile).lower()}", f"profile={str(options.trace).lower()}"]
    logging.getLogger("harness").setLevel(logging.WARNING)
    result = measure(options, device)
    print(tables(result))
    print(f"\n{result['machine']['device']}, torch {torch.__version__}, {result['seconds']:.0f} s in all")
    if any("failed" in part for part in result["ladder"] + result["comparisons"]):
        raise SystemExit(1)


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All parts, written after each one."""
    begun = time.perf_counter()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine() | {"device": _device_name(device)},
        "seq_len": options.seq_len,
        "compiled": options.compile,
        "ladder_model": options.models[0],
        "ladder": [],
        "comparisons": [],
    }

    def done(part: str, rows: list[dict[str, Any]]) -> None:
        result[part] += rows
        result["seconds"] = time.perf_counter() - begun
        if options.write is not None:
            options.write.mkdir(parents=True, exist_ok=True)
            write_json(options.write / "train.json", result)
            write_atomic(options.write / "train.md", f"# Training steps\n\n{tables(result)}\n")

    with tempfile.TemporaryDirectory(prefix="bench-train-") as temporary:
        bench = Bench(options, device, Path(temporary))
        done("ladder", ladder(bench, options.models[0]))
        for model in options.models:
            done("comparisons", [compared(bench, model)])
    return result


def compiles(device: torch.device) -> bool:
    """Whether torch.compile works here, which needs a C compiler and Python's headers; said where not."""
    try:
        torch.compile(lambda x: x.sin() * 2)(torch.ones(8, device=device))
    except Exception as error:
        print(f"torch.compile does not work here, nothing is compiled: {error}", file=sys.stderr)
        return False
    return True


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
