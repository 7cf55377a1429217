"""Resumes that are wrong on purpose: a checkpoint whose every file is intact, and one value is another.

Each stands for a fault that a harness can have. A proof that does not find them proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness.checkpoints import checkpoint
from harness.files import sha256_file


def cursor_moved(folder: Path) -> None:
    """The batch after the stop is skipped."""
    state = _read(folder / checkpoint.LOADER)
    unit = 1 if "strategy" in state else state["seq_len"]
    _edit(folder / checkpoint.LOADER, position=state["position"] + unit * state["batch_size"])


def batch_repeated(folder: Path) -> None:
    """The batch before the stop is trained twice."""
    state = _read(folder / checkpoint.LOADER)
    unit = 1 if "strategy" in state else state["seq_len"]
    _edit(folder / checkpoint.LOADER, position=state["position"] - unit * state["batch_size"])


def rng_not_restored(folder: Path) -> None:
    """The generator of dropout is where its seed puts it."""
    state = torch.load(folder / checkpoint.RNG, weights_only=True)
    state["torch"] = torch.Generator().manual_seed(0).get_state()
    torch.save(state, folder / checkpoint.RNG)


def numpy_not_restored(folder: Path) -> None:
    """A generator that no step of this harness draws from."""
    state = torch.load(folder / checkpoint.RNG, weights_only=True)
    state["numpy"][1][0] ^= 1
    torch.save(state, folder / checkpoint.RNG)


def weight_bit(folder: Path) -> None:
    """The last bit of one weight."""
    weights = load_file(folder / checkpoint.MODEL)
    weights["ln_f.weight"].view(torch.int32)[0] ^= 1
    save_file(weights, folder / checkpoint.MODEL)


def _optimizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        state = torch.load(folder / checkpoint.OPTIMIZER, weights_only=True)
        change(state)
        torch.save(state, folder / checkpoint.OPTIMIZER)

    return tamper


def _progress(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        _edit(folder / checkpoint.TRAINER, **change(_read(folder / checkpoint.TRAINER)))

    return tamper


def row_lost(folder: Path) -> None:
    """The row of the step before the stop."""
    path = folder.parent.parent / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


WRONGS: dict[str, Callable[[Path], None]] = {
    "cursor moved by a batch": cursor_moved,
    "batch repeated": batch_repeated,
    "RNG not restored": rng_not_restored,
    "numpy's RNG not restored": numpy_not_restored,
    "one bit of a weight": weight_bit,
    "moments lost": _optimizer(lambda state: state["state"][0]["exp_avg"].zero_()),
    "optimizer's step lost": _optimizer(lambda state: state["state"][0]["step"].zero_()),
    "squares of one tensor lost": _optimizer(lambda state: state["state"][3]["exp_avg_sq"].zero_()),
    "tokens": _progress(lambda trainer: {"tokens": trainer["tokens"] - 1}),
    "epoch": _progress(lambda trainer: {"epoch": trainer["epoch"] + 1}),
    "best value": _progress(lambda trainer: {"best_val_loss": 0.5}),
    "row lost": row_lost,
}


def tamper(folder: Path, wrong: str) -> None:
    """Make the checkpoint `folder` wrong; its index is made to fit, so that it loads."""
    WRONGS[wrong](folder)
    index = _read(folder / "checkpoint.json")
    for name, entry in index["files"].items():
        entry.update(bytes=(folder / name).stat().st_size, sha256=sha256_file(folder / name))
    _edit(folder / "checkpoint.json", **index)


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(_read(path) | values, indent=2) + "\n")
