"""What may change when a run goes on, and what may not; and the random state that goes with it.

| kind  | keys                                                              | at a resume             |
|-------|-------------------------------------------------------------------|-------------------------|
| fatal | the model's shape, the vocabulary                                 | refused                 |
| order | loader, batch_size, seq_len, the seeds                            | refused                 |
| data  | the manifest's digest                                             | refused                 |
| free  | budget, lr, schedule, cadences, tracker, micro-batch, device, ... | listed, old and new     |

Each difference is named with both values before the first step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commands import shown
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.checkpoint import Checkpoint
    from harness.storage.manifest import Manifest

_FATAL = {"model.n_layer", "model.n_head", "model.n_embd"}
_ORDER = {"loader.name", "loader.batch_size", "loader.seq_len", "loader.seed", "seed"}
_BUDGET = {"trainer.max_steps", "trainer.max_tokens"}
# Named by other checks, or no setting of the run at all.
_SILENT = {"resume", "run.name", "model.name"}


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested dict as pairs of dotted key and value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with the old and the new one; None where a side lacks the key."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def check(
    checkpoint: Checkpoint, config: dict[str, Any], manifest: Manifest, old_manifest: Path
) -> list[str]:
    """Compare a checkpoint with what is about to go on; returns a line for each free change.

    Raises one `UserError` that names everything that may not change, with both values.
    """
    changed = differences(checkpoint.config, config)
    problems = [
        f"{key}: checkpoint {old}, now {new}: {_why(key)}"
        for key, (old, new) in changed.items()
        if key in _FATAL | _ORDER
    ]
    vocab_size = checkpoint.trainer["vocab_size"]
    if vocab_size != manifest.tokenizer.vocab_size:
        problems.append(
            f"vocabulary: checkpoint {vocab_size}, {manifest.path} {manifest.tokenizer.vocab_size}: "
            "the embedding has another shape"
        )
    problems += _data_problems(checkpoint, manifest, old_manifest)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        refused = [key for key in changed if key in _FATAL | _ORDER]
        mend = f"Drop {', '.join(refused)} from the command" if refused else "Use the data of the checkpoint"
        raise UserError(
            f"{shown(checkpoint.path)} cannot go on like this:\n{lines}\n"
            f"{mend}, or start a new run without resume=."
        )
    return [
        f"changed since the checkpoint: {key} {old} -> {new}{_consequence(key, config)}"
        for key, (old, new) in changed.items()
        if key not in _SILENT
    ]


def _consequence(key: str, config: dict[str, Any]) -> str:
    follows_budget = key in _BUDGET and config["schedule"]["total_steps"] is None
    return " (the rest of the lr schedule changes with it)" if follows_budget else ""


def _why(key: str) -> str:
    return "the weights have another shape" if key in _FATAL else "the order of the data changes"


def _data_problems(checkpoint: Checkpoint, manifest: Manifest, old_manifest: Path) -> list[str]:
    old, new = checkpoint.trainer["metadata_sha256"], manifest.metadata_sha256
    if old == new:
        return []
    same = checkpoint.trainer["content_sha256"]
    tokens = "the same tokens in another set" if same and same == manifest.content_sha256 else "other data"
    fields = "".join(
        f"\n      {key}: then {before}, now {after}"
        for key, (before, after) in differences(_read_manifest(old_manifest), manifest.raw).items()
    )
    return [f"metadata_sha256: checkpoint {old}, {manifest.path} {new}: {tokens}{fields}"]


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def rng_state() -> dict[str, Any]:
    """Every generator a step may draw from, with the versions that give the numbers their meaning."""
    import numpy as np
    import torch

    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
    }


def seed_rng(seed: int) -> None:
    """Seed every generator that `rng_state` keeps."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator to a saved state. A device that is no longer there keeps its seed."""
    import numpy as np
    import torch

    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
