"""`init_from=CHECKPOINT|RUN`: a run that begins with the weights of another, and takes nothing else of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoints import checkpoint
from harness.checkpoints.checkpoint import Checkpoint
from harness.checkpoints.restore import cut
from harness.commandline.commands import shown
from harness.config import TrainConfig, get
from harness.config_record import from_dict
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.model import GPT
    from harness.storage.manifest import Manifest

_SHAPE = ("model.n_layer", "model.n_head", "model.n_embd", "model.gelu")


def open_initial(
    config: TrainConfig, opened: Callable[[Path], Checkpoint] = checkpoint.open_checkpoint
) -> Checkpoint | None:
    """The checkpoint that `config.init_from` names, its files checked; None where there is none.

    `opened` is what opens it.

    Raises `UserError` where the configured model has another shape, or positions that the checkpoint has not.
    """
    if config.init_from is None:
        return None
    saved = opened(checkpoint.find(Path(os.path.abspath(config.init_from)), "init_from"))
    theirs = from_dict(saved.config, str(saved.path / checkpoint.CONFIG))
    problems = [
        f"{key}: its weights {get(theirs, key)}, this run {get(config, key)}. Use {key}={get(theirs, key)}"
        for key in _SHAPE
        if get(theirs, key) != get(config, key)
    ]
    known, wanted = theirs.loader.seq_len, config.loader.seq_len
    if wanted > known:
        problems.append(
            f"loader.seq_len: its weights {known}, this run {wanted}: they know no position beyond. "
            f"Use loader.seq_len<={known}"
        )
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(f"init_from={shown(saved.path)} does not fit this model:\n{lines}")
    return saved


def check_tokenizer(saved: Checkpoint, manifest: Manifest) -> None:
    """Raise `UserError` unless the set was made with the tokenizer that the model was trained with."""
    from harness.storage.manifest import TokenizerInfo

    theirs = manifest.tokenizer
    name = from_dict(saved.config, str(saved.path / checkpoint.CONFIG)).tokenizer.name
    vocab_size, sha256 = saved.trainer["vocab_size"], _tokenizer_sha256(saved)
    if not theirs.means_the_same(TokenizerInfo(name, vocab_size, None, sha256)):
        raise UserError(
            f"{manifest.path} was made with tokenizer {theirs.name} ({theirs.vocab_size} ids, sha256 "
            f"{theirs.sha256}), the model in {shown(saved.path)} was trained with {name} ({vocab_size} ids, "
            f"sha256 {sha256}): its ids would mean other text. Use a set made with the model's tokenizer"
        )


def _tokenizer_sha256(saved: Checkpoint) -> str | None:
    """From the run's copy of its manifest; None where there is no copy that can be read."""
    try:
        value = json.loads((saved.run_dir / "manifest.json").read_text())["tokenizer"].get("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return value if isinstance(value, str) else None


def load_initial(model: GPT, saved: Checkpoint) -> None:
    """Put a checkpoint's weights into a fresh model; of its positions the first `seq_len`."""
    with saved.foreign(saved.model_file):
        model.load_state_dict(cut(saved.weights(), model.seq_len))


def initial_record(saved: Checkpoint) -> dict[str, Any]:
    """What trainer.json says of the weights that a run began with."""
    return {"path": str(saved.path), "step": saved.step, "model_sha256": saved.model_sha256}
