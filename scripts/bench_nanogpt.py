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
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parts.bench_parts import machine, median_interval
from parts.nanogpt_runs import BATCH, BLOCK, FIRST_TIMED, LOG_EVERY, STEPS, Trial, bin_file, harness_loss

from harness.files import write_atomic, write_json


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
