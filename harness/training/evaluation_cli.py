"""`scripts/evaluate.py RUN`: the loss of a checkpoint over a whole split of any set."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commandline.script_words import parse, run_script
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.run_files.finished import Finished
    from harness.training.objectives import Preference


@dataclass
class EvaluateOptions:
    """Options of `scripts/evaluate.py RUN key=value ...`; `set` and `precision` null are the run's own."""

    split: str = "val"
    set: str | None = None
    tokens: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    precision: str | None = None


def main() -> None:
    """Print one JSON object: what was evaluated, and its loss in nats a token with the bits a byte; of pairs
    the DPO loss with accuracy and reward margin.
    """
    run_script(_main)


def _main() -> None:
    path, options = parse(sys.argv[1:], EvaluateOptions, "RUN", "Evaluate a run or a checkpoint on a split.")
    for name in ("tokens", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1, or null")
    if options.precision not in (None, "auto", "bf16", "float32"):
        raise UserError(f"precision={options.precision} must be one of auto, bf16, float32, or null")
    from harness.checkpoints.weights import check_tokenizer
    from harness.hardware.device import make_autocast, select_device, set_numerics
    from harness.run_files.finished import load
    from harness.storage import PairStore, open_split
    from harness.training.evaluation import evaluate

    device = select_device(options.device)
    finished = load(path, device)
    set_numerics(finished.config, device)
    directory = Path(options.set).absolute() if options.set else finished.set_directory
    store = open_split(directory, options.split)
    check_tokenizer(finished.checkpoint, store.manifest)
    result = evaluate(
        finished.model,
        store,
        tokens=options.tokens,
        batch_size=options.batch_size or finished.config.loader.batch_size,
        seq_len=finished.config.loader.seq_len,
        autocast=make_autocast(options.precision or finished.config.precision, device),
        objective=_preference(finished) if isinstance(store, PairStore) else None,
    )
    answer = {
        "checkpoint": str(finished.checkpoint.path),
        "set": str(directory),
        "split": options.split,
        "metadata_sha256": store.metadata_sha256,
        "tokens": result.tokens,
        **result.scores(),
    }
    print(json.dumps(answer, indent=2))


def _preference(finished: Finished) -> Preference:
    """What pairs are judged by: the run's own reference."""
    from harness.checkpoints import reference
    from harness.training.objectives import make_preference

    saved, config = finished.checkpoint, finished.config
    if not reference.is_needed(config):
        raise UserError(
            f"pairs are judged against the starting weights, and a run of loader={config.loader.name} keeps "
            "none: evaluate on a stream or rows, or evaluate a run of loader=contrastive_rows"
        )
    frozen = reference.load(finished.model, saved)
    return make_preference(finished.model, frozen, config.trainer.dpo_beta, compiled=False)
