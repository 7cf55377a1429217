"""The harness and nanoGPT on nanoGPT's own recipe for a CPU: loss at equal tokens, and tokens a second.

    python scripts/bench_nanogpt.py PATH_OF_A_NANOGPT_CHECKOUT [--seeds 3] [--pairs 5] [--write FOLDER]

The recipe is that of its README for a computer without a GPU: characters of Shakespeare, 4 layers, 4 heads,
128 wide, 64 tokens of context, 12 sequences a step, 2000 steps, AdamW with lr 1e-3 that falls by a cosine to
1e-4 after 100 steps of warm-up, betas 0.9 and 0.99, weight decay 0.1, gradients clipped at 1, no dropout.

Both sides read the same token ids (the checkout's own train.bin and val.bin, which its
data/shakespeare_char/prepare.py makes), in windows drawn at random with replacement, and are judged by the
mean loss over all of val.bin in blocks of 64. The real commands are run in turns, each in a process of its
own: nanoGPT's train.py as it is, with its fixed seed moved by our seed, and our train.py.

Not the same on both sides: the harness's model has biases, and a vocabulary padded to a multiple of 128 (65
characters become 128 rows); its loss is logged, its data hashed and its cursor kept as in any run. nanoGPT's
model has neither biases nor padding.

Speed is taken from outside, in the same way for both: the time between two lines of a run's output.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from bench_parts import machine, median_interval

from harness.files import write_atomic, write_json
from harness.storage.manifest import write_manifest

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARM_UP = 2000, 100
BLOCK, BATCH = 64, 12
LOG_EVERY = 10
FIRST_TIMED = 50  # the steps before it are warm-up, of caches and of allocators

# nanoGPT's script, with its seed moved: it has none on its command line.
_SEEDED = (
    "import runpy, sys, torch; seed = torch.manual_seed; moved = int(sys.argv.pop(1)); "
    "torch.manual_seed = lambda value: seed(value + moved); "
    "runpy.run_path('train.py', run_name='__main__')"
)
# The mean loss of its checkpoint over all targets of val.bin, by its own model.
_JUDGE = """
import sys, numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
model = GPT(GPTConfig(**saved["model_args"])).eval()
model.load_state_dict(saved["model"])
ids, block = torch.from_numpy(np.fromfile(sys.argv[2], np.uint16).astype(np.int64)), model.config.block_size
total, count = 0.0, len(ids) - 1
with torch.no_grad():
    for start in range(0, count, block):
        end = min(start + block, count)
        loss = model(ids[None, start:end], ids[None, start + 1 : end + 1])[1]
        total += loss.item() * (end - start)
print("mean loss", total / count)
"""


def bin_file(checkout: Path, split: str) -> Path:
    """The checkout's own token ids of a split, uint16 without a header."""
    return checkout / "data" / "shakespeare_char" / f"{split}.bin"


def write_set(checkout: Path, directory: Path) -> None:
    """nanoGPT's token ids as a prepared set of the harness; ids mean nothing to it, so no text is sampled."""
    directory.mkdir()
    splits: dict[str, Any] = {}
    for split in ("train", "val"):
        ids, file = np.fromfile(bin_file(checkout, split), np.uint16), f"{split}_00000.npy"
        np.save(directory / file, ids)
        shard = {"file": file, "tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
        splits[split] = {"total_tokens": len(ids), "shards": [shard]}
    vocab_size = 1 + max(int(np.fromfile(bin_file(checkout, split), np.uint16).max()) for split in splits)
    write_manifest(
        directory,
        {
            "format_version": 2,
            "storage": {"format": "npy", "dtype": "uint16", "layout": "stream"},
            "tokenizer": {"name": "byte", "vocab_size": vocab_size},
            "splits": splits,
        },
    )


def nanogpt_command(folder: Path, seed: int, steps: int) -> list[str]:
    """Its README's words for a CPU; it saves after `steps` steps, and then makes one more."""
    words = [f"--max_iters={steps}", f"--lr_decay_iters={STEPS}", f"--eval_interval={steps}"]
    words += ["--device=cpu", "--compile=False", "--eval_iters=1", f"--log_interval={LOG_EVERY}"]
    words += [f"--block_size={BLOCK}", f"--batch_size={BATCH}", "--n_layer=4", "--n_head=4", "--n_embd=128"]
    words += ["--dropout=0.0", "--always_save_checkpoint=True", f"--out_dir={folder}"]
    recipe = "config/train_shakespeare_char.py"
    return [sys.executable, "-u", "-c", _SEEDED, str(seed), recipe, *words]


def harness_command(folder: Path, data: Path, seed: int, steps: int) -> list[str]:
    """The same recipe in our words."""
    words = [f"data.path={data}", "loader=sliding_window", "loader.sampling=uniform", f"seed={seed}"]
    words += [f"loader.seq_len={BLOCK}", f"loader.batch_size={BATCH}", "model=nano", "model.gelu=erf"]
    words += ["optimizer.lr=1e-3", "optimizer.betas=[0.9,0.99]", "optimizer.weight_decay=0.1"]
    words += [f"schedule.warmup_steps={WARM_UP}", f"schedule.total_steps={STEPS}", "trainer.grad_clip=1"]
    words += ["schedule.min_lr_ratio=0.1", f"trainer.max_steps={steps}", f"evaluation.interval={steps}"]
    words += ["evaluation.tokens=111539", "evaluation.sample_tokens=0", f"checkpoint.interval={steps}"]
    words += [f"trainer.log_interval={LOG_EVERY}", "device=cpu", "tracker=none", f"hydra.run.dir={folder}"]
    return [sys.executable, "-u", str(ROOT / "train.py"), *words]


class Lines:
    """A process's output with the time of each line that tells a step."""

    def __init__(self, command: list[str], cwd: Path, pattern: str, environment: dict[str, str]) -> None:
        self.steps: list[tuple[int, float]] = []
        self.text: list[str] = []
        with subprocess.Popen(
            command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = re.match(pattern, line)
                self.text.append(line)
                if found:
                    self.steps.append((int(found.group(1)), time.perf_counter()))
        if process.returncode != 0:
            raise SystemExit(
                f"error: {' '.join(command)} ended with {process.returncode}:\n" + "".join(self.text[-30:])
            )

    def tokens_per_s(self, last: int) -> float:
        """Between the first timed step's line and the last that no evaluation follows."""
        times = {step: at for step, at in self.steps if FIRST_TIMED <= step <= last}
        first, end = min(times), max(times)
        return (end - first) * BLOCK * BATCH / (times[end] - times[first])


class Trial:
    """Both sides' commands over one pair of folders, and what they measure."""

    def __init__(self, checkout: Path, folder: Path, threads: int | None) -> None:
        self.checkout, self.folder = checkout, folder
        write_set(checkout, folder / "set")
        self.environment = dict(os.environ)
        if threads is not None:
            self.environment["OMP_NUM_THREADS"] = str(threads)
        self._runs = 0

    def nanogpt(self, seed: int, steps: int) -> tuple[Path, float]:
        """Train nanoGPT: its checkpoint, and its tokens a second."""
        out = self._next()
        command = nanogpt_command(out, seed, steps)
        lines = Lines(command, self.checkout, r"iter (\d+):", self.environment)
        return out / "ckpt.pt", lines.tokens_per_s(steps - LOG_EVERY)

    def harness(self, seed: int, steps: int) -> tuple[Path, float]:
        """Train the harness: its run directory, and its tokens a second."""
        out = self._next()
        command = harness_command(out, self.folder / "set", seed, steps)
        lines = Lines(command, self.folder, r"step (\d+)/", self.environment)
        return out, lines.tokens_per_s(steps - LOG_EVERY)

    def judge(self, checkpoint: Path) -> float:
        """The mean loss over val.bin of nanoGPT's checkpoint, by its own code, in nats."""
        command = [sys.executable, "-c", _JUDGE, str(checkpoint), str(bin_file(self.checkout, "val"))]
        found = subprocess.run(command, cwd=self.checkout, text=True, capture_output=True, check=True)
        return float(found.stdout.split()[-1])

    def _next(self) -> Path:
        self._runs += 1
        return self.folder / f"run-{self._runs}"


def harness_loss(run: Path) -> float:
    """The mean loss over val.bin that the run's last evaluation found, in nats."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss: float = [row["val_loss"] for row in rows if "val_loss" in row][-1]
    return loss


def in_turns(
    count: int, ours: Callable[[int], float], theirs: Callable[[int], float]
) -> list[tuple[float, float]]:
    """Both sides `count` times; who goes first changes."""
    pairs = []
    for index in range(count):
        if index % 2:
            second, first = theirs(index), ours(index)
        else:
            first, second = ours(index), theirs(index)
        print(f"  {index + 1}/{count}: harness {first:.5g}, nanoGPT {second:.5g}", flush=True)
        pairs.append((first, second))
    return pairs


def measure(trial: Trial, seeds: int, pairs: int, speed_steps: int) -> dict[str, Any]:
    """The speeds of `pairs` pairs of short runs, then the losses of `seeds` seeds a side."""
    print(f"tokens a second, steps {FIRST_TIMED} to {speed_steps - LOG_EVERY}")
    speeds = in_turns(
        pairs, lambda _: trial.harness(0, speed_steps)[1], lambda _: trial.nanogpt(0, speed_steps)[1]
    )
    print(f"validation loss after {STEPS} steps of {BATCH} x {BLOCK} tokens, nats")
    losses = in_turns(
        seeds,
        lambda seed: harness_loss(trial.harness(seed, STEPS)[0]),
        lambda seed: trial.judge(trial.nanogpt(seed, STEPS)[0]),
    )
    ratios = [ours / theirs for ours, theirs in speeds]
    low, high, coverage = median_interval(ratios)
    return {
        "losses": {"harness": [ours for ours, _ in losses], "nanogpt": [theirs for _, theirs in losses]},
        "tokens_per_s": {
            "harness": [ours for ours, _ in speeds],
            "nanogpt": [theirs for _, theirs in speeds],
        },
        "speed_ratio": statistics.median(ratios),
        "speed_interval": [low, high],
        "coverage": coverage,
    }


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "| | validation loss (nats), mean of the seeds | each seed | tokens/s, median |",
        "|---|---|---|---|",
    ]
    for side, name in (("harness", "harness"), ("nanogpt", "nanoGPT")):
        losses, speeds = result["losses"][side], result["tokens_per_s"][side]
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(
            f"| {name} | {statistics.fmean(losses):.4f} | {each} | {statistics.median(speeds):,.0f} |"
        )
    ours, theirs = result["losses"]["harness"], result["losses"]["nanogpt"]
    spread = max(max(side) - min(side) for side in (ours, theirs))
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    low, high = result["speed_interval"]
    lines += [
        "",
        f"Difference of the means {difference:+.4f}; the seeds of a side "
        f"lie up to {spread:.4f} apart. Speed: harness over nanoGPT {result['speed_ratio']:.3f} "
        f"({low:.3f} .. {high:.3f}, {len(result['tokens_per_s']['harness'])} pairs, interval of the median "
        f"by order statistics, coverage {result['coverage']:.0%}).",
    ]
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """The table with what it was made by and on."""
    where = result["machine"]
    assert __doc__ is not None
    head, _, rest = __doc__.partition("\n\n")
    command, _, rest = rest.partition("\n\n")
    return (
        f"# {head.rstrip('.')}\n\nMade by `{command.strip()}` on {result['date']}: {where['cpu']}, "
        f"{where['cpus']} CPUs, Python {where['python']}, torch {where['torch']}, "
        f"{result['threads'] or where['threads']} threads.\n\n{table(result)}\n\n{rest.strip()}\n"
    )


def main() -> None:
    """Measure, print, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of nanoGPT with its Shakespeare prepared")
    parser.add_argument("--seeds", type=int, default=3, help="seeds a side (3)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs for the speed (5)")
    parser.add_argument("--speed-steps", type=int, default=400, help="steps of each of them (400)")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both sides (as it is)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the runs lie")
    parser.add_argument("--write", type=Path, help="write nanogpt.md and nanogpt.json into this folder")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    for file in (checkout / "train.py", bin_file(checkout, "train"), bin_file(checkout, "val")):
        if not file.is_file():
            parser.error(
                f"{file} is missing: give a checkout of nanoGPT, in which "
                "`python data/shakespeare_char/prepare.py` was run"
            )
    if options.seeds < 1 or options.pairs < 1 or options.speed_steps < FIRST_TIMED + 2 * LOG_EVERY:
        parser.error(
            f"--seeds={options.seeds} and --pairs={options.pairs} must be at least 1, "
            f"--speed-steps={options.speed_steps} at least {FIRST_TIMED + 2 * LOG_EVERY}"
        )
    with tempfile.TemporaryDirectory(prefix="bench-nanogpt-", dir=options.folder) as temporary:
        trial = Trial(checkout, Path(temporary), options.threads)
        result = measure(trial, options.seeds, options.pairs, options.speed_steps)
    result |= {
        "date": datetime.date.today().isoformat(),
        "steps": STEPS,
        "threads": options.threads,
        "machine": machine(),
    }
    print(table(result))
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        write_atomic(options.write / "nanogpt.md", page(result))
        write_json(options.write / "nanogpt.json", result)


if __name__ == "__main__":
    main()
