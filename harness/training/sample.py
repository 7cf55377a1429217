"""Text from a model: in a run's evaluations, and by `scripts/sample.py RUN`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commandline.script_words import parse, run_script
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.model import GPT
    from harness.prepare import Tokenizer
    from harness.storage.manifest import Manifest

log = logging.getLogger("harness")

Sampler = Callable[[int, Callable[[], object]], str]  # of a number of tokens, and `sample_text`'s `between`


@dataclass
class SampleOptions:
    """Options of `scripts/sample.py RUN key=value ...`."""

    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0
    device: str = "auto"
    set: str | None = None


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
    between: Callable[[], object] = lambda: None,
) -> str:
    """`prompt` and `tokens` tokens after it. Without a prompt the text begins where a document does.

    `between` is called before each token; what it raises abandons the text.
    """
    import torch

    from harness.model import generate

    device = next(model.parameters()).device
    ids = [tokenizer.boundary_token_id, *tokenizer.encode(prompt).tolist()]
    start = torch.tensor([ids], dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(seed)
    result = generate(
        model, start, tokens, temperature=temperature, top_k=top_k, generator=generator, between=between
    )
    return tokenizer.decode(result[0, 1:].cpu().numpy())


def make_sampler(model: GPT, manifest: Manifest, *, seed: int) -> Sampler | None:
    """What samples text from a run's model; None where nothing can decode its tokens."""
    from harness.prepare import load_tokenizer

    try:
        tokenizer = load_tokenizer(manifest.directory, manifest)
    except UserError as error:
        log.info("no text samples: %s", error)
        return None

    def sample(tokens: int, between: Callable[[], object]) -> str:
        return sample_text(
            model, tokenizer, "", tokens, temperature=0.8, top_k=None, seed=seed, between=between
        )

    return sample


def main() -> None:
    """`scripts/sample.py RUN [prompt=... tokens=... temperature=... top_k=... seed=...]`."""
    run_script(_main)


def _main() -> None:
    path, options = parse(sys.argv[1:], SampleOptions, "RUN", "Sample text from a run or a checkpoint.")
    if not (options.temperature >= 0 and math.isfinite(options.temperature)) or options.tokens < 0:
        raise UserError(
            f"temperature={options.temperature} and tokens={options.tokens} must be numbers from 0 on"
        )
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"top_k={options.top_k} must be at least 1, or null for every token")
    from harness.checkpoints.weights import check_tokenizer
    from harness.hardware.device import select_device
    from harness.prepare import load_tokenizer
    from harness.run_files.finished import load
    from harness.storage.manifest import load_manifest

    finished = load(path, select_device(options.device))
    directory = Path(options.set).absolute() if options.set else finished.set_directory
    manifest = load_manifest(directory)
    check_tokenizer(finished.checkpoint, manifest)
    tokenizer = load_tokenizer(directory, manifest)
    print(
        sample_text(
            finished.model, tokenizer, options.prompt, options.tokens,
            temperature=options.temperature, top_k=options.top_k, seed=options.seed,
        )
    )  # fmt: skip
