"""How fast a step trains: the harness beside a bare loop and beside nanoGPT, and what each measure brings.

    python scripts/bench_train.py [--models gpt2_small gpt2_medium] [--nanogpt CHECKOUT] [--write FOLDER]

First each model at its batch: blocks of steps of the harness's real loop (its loader over a set on disk, its
log, its guard) take turns with blocks of a bare loop with the same model, optimizer and precision over
batches in memory, and then, where a checkout is given, with nanoGPT's model in such a loop. Evaluations and
checkpoints have intervals of their own, and are not in it. Last the ladder (scripts/parts/train_ladder.py)
with the first model: from eager float32 to what the harness does by default on a GPU, one measure at a time;
and one layer's attention by each of torch's backends.

MFU is `flops_per_token * tokens a second / peak`, by harness/model.py and the dense bf16 peak in
harness/hardware/peak_flops.py; where that does not know the device there is none.

Each part is a process of its own, which leaves nothing to the next one and can be ended: a part may take half
of what is left of `--minutes`, the last one all of it. What it has measured by then stays: it is written as
it comes. What fails (out of memory, a compiler that is missing) says so in its place, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parts import train_parts
from parts.bench_parts import machine
from parts.train_page import figures, tables

from harness.files import write_atomic, write_json


def run_part(part: str, words: list[str], file: Path, temporary: Path, limit_s: float) -> dict[str, Any]:
    """Run a part as a process of its own: what it wrote into `file`, and `failed` where it did not end well.

    It is ended after `limit_s`, with all that it has started. `words` are options beside those given.
    """
    ours = ["--part", part, "--part-file", str(file)]
    command = [sys.executable, __file__, *sys.argv[1:], *words, *ours]
    # The compiler's files are there too: the parts share them, and they begin with none.
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(limit_s)
        failed = None if code == 0 else f"it ended with {code}"
    except subprocess.TimeoutExpired:
        failed = f"it was ended after {limit_s:.3g} s, its share of --minutes"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if failed is not None:
        print(f"  {part}: {failed}", flush=True)
        found.setdefault("failed", {}).setdefault("all of it", failed)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All parts, written after each one."""
    begun = time.monotonic()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "seq_len": options.seq_len,
        "ladder_model": options.models[0],
        "ladder": [],
        "attention_ms": {},
        "comparisons": [],
        "failed": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-train-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) if options.write is None else options.write / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        parts, words = ["machine", *options.models, "ladder"], list[str]()
        for part in parts:
            left = 60 * options.minutes - (time.monotonic() - begun)
            limit = left if part == parts[-1] else left / 2
            file = folder / f"{part}.json"
            file.unlink(missing_ok=True)
            found = run_part(part, words, file, Path(temporary), max(1.0, limit))
            if part == "machine":
                result["machine"] |= {"device": found.get("device"), "compiled": found.get("compiled", False)}
                words = [] if result["machine"]["compiled"] else ["--no-compile"]
            elif part == "ladder":
                result["ladder"] = found.get("rows", [])
                result["attention_ms"] = found.get("attention_ms", {})
            else:
                result["comparisons"].append(figures({"model": part, **found}))
            result["failed"] |= {f"{part}, {name}": why for name, why in found.get("failed", {}).items()}
            result["seconds"] = time.monotonic() - begun
            _write(options.write, result)
            if result["machine"]["device"] is None:
                break
    return result


def _write(folder: Path | None, result: dict[str, Any]) -> None:
    if folder is not None:
        write_json(folder / "train.json", result)
        write_atomic(folder / "train.md", f"# Training steps\n\n{tables(result)}\n")


def _options() -> argparse.Namespace:
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
    parser.add_argument("--minutes", type=float, default=6.0, help="for all parts (6)")
    parser.add_argument("--write", type=Path, help="write train.md and train.json into this folder")
    parser.add_argument(
        "--trace", action="store_true", help="with --write: also a trace of three steps of each model"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what this process is to measure
    parser.add_argument("--part-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace and (options.write is None or options.steps < 10):
        parser.error(
            f"--trace needs --write, and --steps={options.steps} of at least 10: it takes steps 8 to 10"
        )
    if options.steps < 1 or options.blocks < 1:
        parser.error(f"--steps={options.steps} and --blocks={options.blocks} must be at least 1")
    return options


def main() -> None:
    """Measure, print, write."""
    options = _options()
    if options.part is not None:
        train_parts.measure(options.part, options)
        return
    result = measure(options)
    where = result["machine"]
    print(tables(result))
    print(f"\n{where.get('device')}, torch {where['torch']}, {result['seconds']:.0f} s in all")
    if result["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
