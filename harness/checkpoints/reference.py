"""The frozen starting weights that preferences are measured against: `reference.safetensors` of a run.

Written once, before the first step. Every checkpoint of the run holds its SHA-256, and a branch has a copy.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from harness.checkpoints.restore import cut
from harness.commandline.commands import shown
from harness.config import TrainConfig, layout
from harness.errors import UserError
from harness.files import replacing, sha256_file

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint
    from harness.model import GPT

FILE = "reference.safetensors"


def is_needed(config: TrainConfig) -> bool:
    """Whether the run is trained on preferences."""
    return layout(config.loader) == "contrastive"


def frozen(model: GPT) -> GPT:
    """A copy of the model as it is now, without dropout or gradients; no random number is drawn."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def load(model: GPT, saved: Checkpoint) -> GPT:
    """The reference of the checkpoint's run, in the shape and on the device of `model`.

    Raises `UserError` where its file is missing, or is not the one that the checkpoint was trained against.
    """
    from safetensors.torch import load_file

    path, expected = saved.run_dir / FILE, saved.trainer.get("reference_sha256")
    if not path.is_file():
        raise _unusable(saved, f"{shown(path)} is missing (its SHA-256 is {expected})")
    found = sha256_file(path)
    if found != expected:
        raise _unusable(saved, f"{shown(path)} has SHA-256 {found}, the checkpoint names {expected}")
    reference = frozen(model)
    reference.load_state_dict(cut(load_file(path), model.seq_len))
    return reference


def write(run_dir: Path, reference: GPT) -> str:
    """Keep the reference in a run directory; its SHA-256. Equal weights give equal files."""
    from safetensors.torch import save_file

    path = run_dir / FILE
    with replacing(path) as temporary:
        save_file(reference.state_dict(), temporary)
    return sha256_file(path)


def copy_into(run_dir: Path, saved: Checkpoint) -> str:
    """Give a branch its parent's reference, byte for byte; its SHA-256, which `load` has checked."""
    import shutil

    with replacing(run_dir / FILE) as temporary:
        shutil.copyfile(saved.run_dir / FILE, temporary)
    sha256: str = saved.trainer["reference_sha256"]
    return sha256


def _unusable(saved: Checkpoint, what: str) -> UserError:
    return UserError(
        f"{what}: {shown(saved.path)} was trained against those weights, and against others it would learn "
        "something else. Put the file back, or start a new run: init_from=" + str(shown(saved.path))
    )
