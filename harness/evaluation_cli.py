"""`scripts/evaluate.py RUN`: the loss of a checkpoint over a whole split of any set."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.script_words import parse, run_script


@dataclass
class EvaluateOptions:
    """Options of `scripts/evaluate.py RUN key=value ...`; `set` null is the run's own set."""

    split: str = "val"
    set: str | None = None
    tokens: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    precision: str = "auto"


def main() -> None:
    """Print one JSON object: loss in nats a token, bits a byte, target tokens, and what was evaluated."""
    run_script(_main)


def _main() -> None:
    path, options = parse(sys.argv[1:], EvaluateOptions, "RUN", "Evaluate a run or a checkpoint on a split.")
    for name in ("tokens", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1, or null")
    if options.precision not in ("auto", "bf16", "float32"):
        raise UserError(f"precision={options.precision} must be one of auto, bf16, float32")
    from harness.device import make_autocast, select_device
    from harness.evaluation import evaluate
    from harness.finished import load
    from harness.storage import open_store
    from harness.weights import check_tokenizer

    device = select_device(options.device)
    finished = load(path, device)
    directory = Path(options.set).absolute() if options.set else finished.set_directory
    store = open_store(directory, options.split)
    check_tokenizer(finished.checkpoint, store.manifest)
    result = evaluate(
        finished.model,
        store,
        tokens=options.tokens,
        batch_size=options.batch_size or finished.config.loader.batch_size,
        seq_len=finished.config.loader.seq_len,
        autocast=make_autocast(options.precision, device),
    )
    answer = {
        "checkpoint": str(finished.checkpoint.path),
        "set": str(directory),
        "split": options.split,
        "metadata_sha256": store.metadata_sha256,
        "tokens": result.tokens,
        "loss": result.loss,
        "bits_per_byte": result.bits_per_byte,
    }
    print(json.dumps(answer, indent=2))
