"""A trained model back from its run directory, for sampling and evaluating."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from harness.checkpoints import checkpoint
from harness.checkpoints.checkpoint import Checkpoint
from harness.commandline.commands import prepare_command, shown
from harness.config import TrainConfig, set_directory
from harness.config_record import from_dict
from harness.errors import UserError
from harness.model import GPT


@dataclass(frozen=True)
class Finished:
    """A checkpoint, its configuration, and the model with its weights, in evaluation mode."""

    checkpoint: Checkpoint
    config: TrainConfig
    model: GPT

    @property
    def set_directory(self) -> Path:
        """Where the set that it was trained on lies; `UserError` where there is none any more."""
        directory = set_directory(self.config)
        if not directory.exists():
            raise UserError(
                f"the set that this run was trained on, {shown(directory)}, does not exist, and with it its "
                "text and its tokenizer. If it was moved, sample.py and evaluate.py take set=FOLDER; else "
                f"prepare it again: {prepare_command(self.config)}"
            )
        return directory


def load(path: Path, device: torch.device) -> Finished:
    """Load a checkpoint, or a run directory's newest one, whose files are all checked first."""
    saved = checkpoint.open_checkpoint(checkpoint.find(path.expanduser().absolute(), "RUN"))
    config = from_dict(saved.config, str(saved.path / checkpoint.CONFIG))
    model = GPT(config.model, vocab_size=saved.trainer["vocab_size"], seq_len=config.loader.seq_len)
    saved.restore_into(model)
    return Finished(saved, config, model.to(device).eval())
