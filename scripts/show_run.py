"""What came of a run: where it stands and came from, a sample, its loss beside what counting achieves on the
same text, and how to go on.

python scripts/show_run.py RUN [tokens=200]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.commandline.commands import command, shown
from harness.commandline.script_words import parse, run_script
from harness.errors import UserError
from harness.run_files.run_history import history

if TYPE_CHECKING:
    from harness.run_files.finished import Finished


@dataclass
class ShowOptions:
    """Options of this script."""

    tokens: int = 300
    prompt: str = ""
    seed: int = 0


def main() -> None:
    path, options = parse(sys.argv[1:], ShowOptions, "RUN", "Show what came of a run.")
    lines = history(path.expanduser().absolute())
    print("\n".join(lines), flush=True)
    if lines and not any(line.startswith("saved") for line in lines):
        return  # it died before its first checkpoint: there is no model to show
    import torch

    from harness.checkpoints.weights import check_tokenizer
    from harness.prepare import load_tokenizer
    from harness.run_files.finished import load
    from harness.storage.manifest import load_manifest
    from harness.training.sample import sample_text

    finished = load(path, torch.device("cpu"))
    directory, trained = finished.set_directory, finished.checkpoint.trainer
    manifest = load_manifest(directory)
    check_tokenizer(finished.checkpoint, manifest)
    tokenizer = load_tokenizer(directory, manifest)
    text = sample_text(
        finished.model,
        tokenizer,
        options.prompt,
        options.tokens,
        temperature=0.8,
        top_k=None,
        seed=options.seed,
    )
    print(f"\n--- a sample of {options.tokens} tokens " + "-" * 40)
    print(text)
    print("-" * 70)
    _compare(finished)
    data, loader = (f"{group}={getattr(finished.config, group).name}" for group in ("data", "loader"))
    step, run = trained["step"], shown(finished.checkpoint.run_dir)
    print(f"\nthe run lies in       {run}  (step {step}, {trained['elapsed_s']:.0f} s)")
    print(f"go on with it         {command('train', f'resume={run}', f'trainer.max_steps={2 * step}')}")
    print(f"train a larger model  {command('train', data, loader, 'model=micro')}")
    print(f"more text from it     {command('sample', str(run), 'prompt=import ')}")


def _compare(finished: Finished) -> None:
    """The run's validation loss, of a stream beside what counting achieves on the same targets."""
    from harness.storage import TokenStore, open_split
    from harness.tracking.jsonl import loss_after
    from harness.training.baselines import baseline_losses
    from harness.training.evaluation import bits_per_byte

    directory, saved = finished.set_directory, finished.checkpoint
    ours = loss_after(saved.run_dir / "metrics.jsonl", saved.step, saved.trainer["val_loss"])
    if ours is None:  # stopped before the first evaluation, or no number came of it
        print("no validation loss yet")
        return
    train = open_split(directory, "train")
    validation = open_split(finished.config.evaluation.set or directory, "val")
    if not isinstance(train, TokenStore) or not isinstance(validation, TokenStore):
        print(f"validation loss {ours:.4f} (counting baselines are for streams of tokens alone)")
        return
    tokens = finished.config.evaluation.tokens
    losses = baseline_losses(train, validation, tokens) | {"this run": ours}
    bits = {name: bits_per_byte(loss, validation) for name, loss in losses.items()}
    print(f"bits a byte on the first {min(tokens, validation.total_tokens - 1):,} validation tokens:")
    for name, value in bits.items():
        if value is None:
            raise UserError(f"{validation.manifest.path} does not count bytes: prepare the set again")
        print(f"  {name:<9} {value:.3f}")
    difference = (bits["bigram"] or 0.0) - (bits["this run"] or 0.0)
    relation = "below" if difference > 0 else "ABOVE"
    print(f"  the model is {abs(difference):.3f} bits {relation} the bigram baseline")


if __name__ == "__main__":
    run_script(main)
