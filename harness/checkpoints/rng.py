"""The random state of a run: every generator that a step may draw from, saved whole and restored strictly.

A generator that came back in another state would give other dropout masks and say nothing: what cannot be
restored exactly stops a run before it writes. A device of another kind has generators of its own, which begin
anew, and that is said.
"""

from __future__ import annotations

import hashlib
import platform
import random
from typing import TYPE_CHECKING, Any

from harness.commandline.commands import shown
from harness.distributed.ranks import ALONE, Ranks
from harness.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_PARTS = ("python", "numpy", "torch", "cuda", "versions")


def state(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's and torch's generators, on CUDA that of `device` too, with what gives the numbers
    their meaning: library versions, the GPU or the CPU's threads.

    Plain values and uint8 tensors, as `torch.load(weights_only=True)` takes them. `cuda` is empty on a CPU.
    """
    import numpy as np
    import torch

    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
        "versions": _versions(device),
    }


def state_of(ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """What a checkpoint keeps: `state`; of several ranks rank 0's, with those of the `others` in order.

    A collective.
    """
    own = state(device)
    if not ranks.several:
        return own
    first, *others = ranks.gather(own)
    return {**first, "others": others}


def part(value: int, ranks: Ranks) -> None:
    """After `seed(value)` and what all ranks drew alike: each but rank 0 begins a sequence of its own."""
    if ranks.rank:
        seed(_seed_of(value, ranks.rank))


def _seed_of(value: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{value} {rank}".encode()).digest()[:8]) >> 1


def seed(value: int) -> None:
    """Seed every generator that `state` keeps."""
    import numpy as np
    import torch

    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)  # CUDA's too


def restore(
    saved: dict[str, Any], device: torch.device, *, source: Path, anew: int, ranks: Ranks = ALONE
) -> list[str]:
    """Set every generator to the state `saved`, read from `source`; a line for what is not as it was.

    Where the checkpoint's device was of another kind, CUDA's generators are seeded with `anew` instead; where
    it was saved by more or fewer `ranks`, all generators are, for each rank otherwise. Raises `UserError`
    where a part is missing or is no state of its generator.
    """
    import numpy as np
    import torch

    others = saved.get("others", [])
    if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
        raise _unusable(source, "its part others holds no states")
    if len(others) + 1 != ranks.size:
        seed(_seed_of(anew, ranks.rank))
        return [
            *_version_lines(saved.get("versions"), device),
            f"changed since the checkpoint: world_size {len(others) + 1} -> {ranks.size} (all random numbers "
            "begin anew, so with dropout the steps are other ones; the batches stay the same)",
        ]
    if ranks.rank:
        saved = others[ranks.rank - 1]
    missing = [part for part in _PARTS if part not in saved]
    if missing:
        raise _unusable(source, f"it lacks the state of {', '.join(missing)}")
    _restore_part("python", source, lambda: random.setstate(saved["python"]))
    _restore_part("numpy", source, lambda: np.random.set_state(_numpy_state(saved["numpy"])))
    _restore_part("torch", source, lambda: torch.set_rng_state(saved["torch"]))
    before = "cuda" if saved["cuda"] else "cpu"
    if device.type == before == "cuda":
        own = _own_of(saved["cuda"], device, source)
        _restore_part("cuda", source, lambda: torch.cuda.set_rng_state(own, device))
    lines = _version_lines(saved["versions"], device)
    if device.type != before:
        if device.type == "cuda":
            torch.cuda.manual_seed_all(anew % 2**63)
        return [
            *lines,
            f"random numbers: the checkpoint was trained on {before}, this run on {device.type}: the "
            f"generators of {device.type} {_BEGIN[device.type]}, so the steps are not bit-equal",
        ]
    return lines


_BEGIN = {"cuda": "are seeded anew", "cpu": "go on where they were, unused"}


def _numpy_state(saved: Any) -> tuple[Any, ...]:
    import numpy as np

    name, keys, position, has_gauss, gauss = saved
    return name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss


def _restore_part(part: str, source: Path, setter: Any) -> None:
    try:
        setter()
    except Exception as error:
        raise _unusable(source, f"its part {part} is no state of that generator ({error})") from error


def _own_of(states: list[Any], device: torch.device, source: Path) -> Any:
    """The state of the device that the run computes on; older versions kept that of every one it saw."""
    index = device.index or 0
    if len(states) > 1 and index >= len(states):
        raise UserError(
            f"{shown(source)} holds the random state of {len(states)} CUDA devices, none of number {index}: "
            "random numbers would begin anew, and the steps would not be the run's. Use device=cuda:N as the "
            f"run did, N from 0 to {len(states) - 1}"
        )
    return states[0 if len(states) == 1 else index]


def _unusable(source: Path, what: str) -> UserError:
    return UserError(
        f"{shown(source)}: {what}, so the random numbers would not go on as they were and the steps would "
        f"not be the run's. Resume another checkpoint, or start a new run with its weights: "
        f"init_from={shown(source.parent)}"
    )


def _versions(device: torch.device) -> dict[str, str]:
    import numpy as np
    import torch

    versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": str(torch.__version__)}
    if device.type == "cuda":
        return versions | {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(device)}
    return versions | {"threads": str(torch.get_num_threads())}  # sums of another order


def _version_lines(saved: Any, device: torch.device) -> list[str]:
    """The same state gives the same steps only with the same libraries, GPU and threads."""
    before = saved if isinstance(saved, dict) else {}
    changed = [
        f"{name} {before[name]} -> {now}"
        for name, now in _versions(device).items()
        if before.get(name, now) != now
    ]
    if not changed:
        return []
    return [f"changed since the checkpoint: {', '.join(changed)} (the steps may not be bit-equal)"]
