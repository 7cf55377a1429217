"""What may change when a run goes on, and what may not; and the random state that goes with it.

| kind  | keys                                                                      | at a resume          |
|-------|---------------------------------------------------------------------------|----------------------|
| fatal | the model's shape, the vocabulary, init_from                              | refused              |
| order | loader, batch_size, seq_len, the seeds, stride, sampling, row_width, ...  | refused              |
| loss  | mask_boundary, dpo_beta                                                   | refused              |
| data  | the manifest's digest                                                     | refused, growth.py   |
| free  | budget, lr, schedule, cadences, tracker, micro-batch, device, ...         | listed, old and new  |

Each difference is named with both values before the first step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness import growth
from harness.commands import shown
from harness.config import set_directory
from harness.config_record import from_dict, to_dict
from harness.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from harness.checkpoint import Checkpoint
    from harness.storage.manifest import Manifest

_SHAPE = "the weights have another shape"
_ORDER = "the order of the data changes"
_LOSS = "the loss becomes another one"
_REFUSED = {
    **dict.fromkeys(("model.n_layer", "model.n_head", "model.n_embd"), _SHAPE),
    **dict.fromkeys(("loader.name", "loader.batch_size", "loader.seq_len", "loader.seed", "seed"), _ORDER),
    **dict.fromkeys(("loader.stride", "loader.sampling", "loader.epoch_seed"), _ORDER),
    **dict.fromkeys(("loader.row_width", "loader.window_tokens"), _ORDER),
    **dict.fromkeys(("loader.mask_boundary", "trainer.dpo_beta"), _LOSS),
    "init_from": "a run that goes on has its weights already",
}
_BUDGET = {"trainer.max_steps", "trainer.max_tokens"}
# Named by other checks, or no setting of the run at all.
_SILENT = {"resume", "resume_accept", "run.name", "model.name"}


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


def check_settings(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    """Compare a checkpoint's settings with those it is to go on with; a line for each change that is free.

    This needs no data: a set may have to be prepared before it can be opened. Raises one `UserError` that
    names every setting that may not change, with both values.
    """
    source = str(checkpoint.path / "config.yaml")
    old_config, new_config = _effective(to_dict(from_dict(checkpoint.config, source))), _effective(config)
    changed = differences(old_config, new_config)
    refused = [key for key in changed if key in _REFUSED and not _belongs_to_another_loader(key, changed)]
    if refused:
        words = ", ".join(key.removesuffix(".name") for key in refused)
        raise _refusal(
            checkpoint,
            [
                f"{key}: checkpoint {changed[key][0]}, now {changed[key][1]}: {_REFUSED[key]}"
                for key in refused
            ],
            f"Drop {words} from the command",
        )
    return [
        f"changed since the checkpoint: {key} {old} -> {new}{_consequence(key, config)}"
        for key, (old, new) in changed.items()
        if key not in _SILENT
    ]


def check_data(checkpoint: Checkpoint, loader: str, manifest: Manifest, accept: list[str]) -> list[str]:
    """Compare a checkpoint's data with the set it is to go on with; a line for a change that was accepted.

    `accept`: kinds of change that were allowed by name (`data`). Raises a `UserError` with both digests.
    """
    problems = []
    vocab_size = checkpoint.trainer["vocab_size"]
    if vocab_size != manifest.tokenizer.vocab_size:
        problems.append(
            f"vocabulary: checkpoint {vocab_size}, {manifest.path} {manifest.tokenizer.vocab_size}: "
            "the embedding has another shape"
        )
    data, grown = _data_difference(checkpoint, manifest, loader, "data" in accept)
    if problems + data:
        raise _refusal(checkpoint, problems + data, "Use the data of the checkpoint")
    return grown


def check_place(checkpoint: Checkpoint, now: Path) -> None:
    """Raise `UserError` where the set is now to lie at another place, `now`, and nothing is there.

    A run that goes on would prepare another set there, only to be told that it is another.
    """
    before = set_directory(from_dict(checkpoint.config, str(checkpoint.path / "config.yaml")))
    if now != before and not now.exists():
        raise _refusal(
            checkpoint,
            [f"data: checkpoint {shown(before)}, now {shown(now)}: there is no prepared set"],
            "Say where the checkpoint's data lies, data.root=FOLDER or data.path=FOLDER",
        )


def _refusal(checkpoint: Checkpoint, problems: list[str], mend: str) -> UserError:
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return UserError(
        f"{shown(checkpoint.path)} cannot go on like this:\n{lines}\n"
        f"{mend}, or start a new run without resume=."
    )


def _effective(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the loader's null replaced by what it means."""
    loader = dict(config["loader"])
    if loader.get("stride", 0) is None and loader["sampling"] != "uniform":
        loader["stride"] = loader["seq_len"]
    if loader.get("row_width", 0) is None:
        loader["row_width"] = loader["seq_len"] + 1
    return config | {"loader": loader}


def _belongs_to_another_loader(key: str, changed: dict[str, tuple[Any, Any]]) -> bool:
    """Two loaders have different keys; that they are two is said once."""
    return key.startswith("loader.") and key != "loader.name" and "loader.name" in changed


def _consequence(key: str, config: dict[str, Any]) -> str:
    follows_budget = key in _BUDGET and config["schedule"]["total_steps"] is None
    return " (the rest of the lr schedule changes with it)" if follows_budget else ""


def _data_difference(
    checkpoint: Checkpoint, manifest: Manifest, loader: str, accepted: bool
) -> tuple[list[str], list[str]]:
    """What is wrong with the data, and what was accepted of it; both empty where it is the checkpoint's."""
    old, new = checkpoint.trainer["metadata_sha256"], manifest.metadata_sha256
    if old == new:
        return [], []
    recorded = growth.recorded_manifest(checkpoint.run_dir, old)
    digests = f"metadata_sha256: checkpoint {old}, {manifest.path} {new}"
    if (added := growth.added_shards(recorded, manifest.raw)) is not None:
        if accepted and loader == "sequential":
            return [], [f"changed since the checkpoint, accepted: {growth.in_words(added)}, {digests}"]
        return [f"{digests}: {growth.refusal(loader, added)}"], []
    same = checkpoint.trainer["content_sha256"]
    tokens = "the same tokens in another set" if same and same == manifest.content_sha256 else "other data"
    known = differences(recorded, manifest.raw) if recorded else {}
    fields = "".join(f"\n      {key}: {_then_and_now(*values)}" for key, values in known.items())
    return [f"{digests}: {tokens}{fields}"], []


def _then_and_now(before: Any, after: Any) -> str:
    """Both values; of two lists of shards, which may be thousands, how many and where they part."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return f"then {before}, now {after}"
    same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
    first = min(len(before), len(after)) if same is None else same
    return f"then {len(before)}, now {len(after)}, different from number {first} on"


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
