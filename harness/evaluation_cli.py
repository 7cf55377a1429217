"""`scripts/evaluate.py RUN`: the loss of a checkpoint over a whole split of any set."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.script_words import parse, run_script

if TYPE_CHECKING:
    from harness.finished import Finished
    from harness.storage import TokenStore


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

    device = select_device(options.device)
    finished = load(path, device)
    directory = Path(options.set).absolute() if options.set else finished.set_directory
    store = open_store(directory, options.split)
    _check_tokenizer(finished, store)
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


def _check_tokenizer(finished: Finished, store: TokenStore) -> None:
    """Ids mean something only in the tokenizer that the model was trained with."""
    theirs, vocab_size = store.manifest.tokenizer, finished.model.vocab_size
    name, sha256 = finished.config.tokenizer.name, _tokenizer_sha256(finished)
    differs = sha256 is not None and theirs.sha256 is not None and theirs.sha256 != sha256
    if theirs.vocab_size != vocab_size or theirs.name != name or differs:
        raise UserError(
            f"{store.manifest.path} was made with tokenizer {theirs.name} ({theirs.vocab_size} ids, sha256 "
            f"{theirs.sha256}), the model was trained with {name} ({vocab_size} ids, sha256 {sha256}): "
            "evaluate on a set made with the model's tokenizer"
        )


def _tokenizer_sha256(finished: Finished) -> str | None:
    """From the run's copy of its manifest; None where there is no copy that can be read."""
    try:
        raw = json.loads((finished.checkpoint.run_dir / "manifest.json").read_text())
        value = raw["tokenizer"].get("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return value if isinstance(value, str) else None
