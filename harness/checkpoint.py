"""A step on disk: written whole or not at all, readable by eye, refused when a single bit has changed.

    step-00000200/   model.safetensors  optimizer.pt  rng.pt  loader.json  trainer.json  config.yaml
                     checkpoint.json    written last: the other files with their sizes and SHA-256

A step is built as `step-N.tmp`, every file and folder fsynced, then renamed. torch is imported only where
tensors are read or written, so finding a checkpoint costs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness.errors import UserError
from harness.files import fsync_dir, sha256_file, write_atomic

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FORMAT_VERSION = 1
MODEL, OPTIMIZER, RNG = "model.safetensors", "optimizer.pt", "rng.pt"
LOADER, TRAINER, CONFIG = "loader.json", "trainer.json", "config.yaml"
FILES = (MODEL, OPTIMIZER, RNG, LOADER, TRAINER, CONFIG)
_INDEX = "checkpoint.json"
_TRAINER_KEYS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "epoch": (int,),
    "tokens": (int,),
    "elapsed_s": (int, float),
    "val_loss": (int, float, type(None)),
    "best_val_loss": (int, float, type(None)),
    "best_step": (int, type(None)),
    "run_id": (str,),
    "parent": (dict, type(None)),
    "vocab_size": (int,),
    "metadata_sha256": (str,),
    "content_sha256": (str, type(None)),
}
# Of runs that have such a thing; absent in checkpoints that were written before it was known.
_OPTIONAL_TRAINER_KEYS: dict[str, tuple[type, ...]] = {
    "init_from": (dict, type(None)),
    "reference_sha256": (str, type(None)),
    "data_changes": (list,),
    "lineage": (list,),
    "data_chain": (str, type(None)),
}
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files have all been checked against its index."""

    path: Path
    step: int
    trainer: dict[str, Any]
    loader: dict[str, Any]
    config: dict[str, Any]
    model_sha256: str

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent

    def restore_into(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Put the saved weights, and the optimizer's state where one is given, into place."""
        with self.foreign(MODEL):
            model.load_state_dict(self.weights())
        if optimizer is not None:
            with self.foreign(OPTIMIZER):
                optimizer.load_state_dict(self.optimizer_state())

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, on the CPU."""
        from safetensors.torch import load_file

        with self.foreign(MODEL):
            return load_file(self.path / MODEL)

    def optimizer_state(self) -> dict[str, Any]:
        return self._tensors(OPTIMIZER)

    def rng_state(self) -> dict[str, Any]:
        return self._tensors(RNG)

    def _tensors(self, name: str) -> dict[str, Any]:
        import torch

        with self.foreign(name):
            state: dict[str, Any] = torch.load(self.path / name, map_location="cpu", weights_only=True)
        return state

    @contextlib.contextmanager
    def foreign(self, name: str) -> Iterator[None]:
        """A file that is what its index says, and yet not what this harness wrote."""
        try:
            yield
        except Exception as error:
            if isinstance(error, MemoryError) or "out of memory" in str(error):
                raise
            raise UserError(
                f"{self.path / name} does not fit this run ({type(error).__name__}: {error}): "
                f"it is intact, but was not written by this harness for this model. {_others(self.path)}"
            ) from error


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def step_dir(run_dir: Path, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step-{step:08d}"


def complete_steps(run_dir: Path) -> list[int]:
    """The steps that were saved whole, ascending."""
    folder = checkpoints_dir(run_dir)
    if not folder.is_dir():
        return []
    names = [match for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted(int(match[1]) for match in names if (folder / match[0] / _INDEX).is_file())


def incomplete_steps(run_dir: Path) -> list[str]:
    """The names of step folders without an index: no checkpoints, but perhaps what is left of some."""
    folder, complete = checkpoints_dir(run_dir), complete_steps(run_dir)
    names = (
        [match for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
        if folder.is_dir()
        else []
    )
    return sorted(match[0] for match in names if int(match[1]) not in complete)


def is_newest(path: Path) -> bool:
    """Whether a checkpoint is the newest complete one of its run directory."""
    steps = complete_steps(path.parent.parent)
    return bool(steps) and step_dir(path.parent.parent, steps[-1]) == path


def find(path: Path, key: str = "resume") -> Path:
    """The checkpoint that `KEY=PATH` means: PATH itself, or the newest complete one of a run directory."""
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"{key}={path} {what}. Give a run directory, or one of its checkpoints/step-N folders."
        )
    if (path / _INDEX).is_file():
        return path
    steps = complete_steps(path)
    if steps:
        return step_dir(path, steps[-1])
    if _STEP.fullmatch(path.name):
        raise UserError(
            f"{path} is not a complete checkpoint: {_INDEX}, which is written last, is missing. "
            + _others(path)
        )
    raise UserError(
        f"{key}={path}: no complete checkpoint there: neither {_INDEX} nor checkpoints/step-N/{_INDEX}. "
        "Give a run directory or one of its checkpoints/step-N folders."
    )


def _others(path: Path) -> str:
    steps = [
        step for step in complete_steps(path.parent.parent) if step_dir(path.parent.parent, step) != path
    ]
    return f"Use {step_dir(path.parent.parent, steps[-1])}" if steps else "The run has no other checkpoint."


def open_checkpoint(path: Path) -> Checkpoint:
    """Check every file's size and SHA-256 against the index, then read the small ones.

    Raises `UserError` naming the file and both values for anything missing, cut, changed or foreign.
    """
    index = _read_index(path)
    for name in FILES:
        _check_file(path / name, index["files"][name])
    trainer, loader, config = _read_trainer(path), _read_json(path / LOADER), _read_config(path)
    if trainer["step"] != index["step"]:
        raise UserError(
            f"{path / TRAINER}: step {trainer['step']}, but {_INDEX} says {index['step']}. " + _others(path)
        )
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != index["step"]:
        raise UserError(f"{path} was renamed: {_INDEX} says step {index['step']}. Give it back its name.")
    return Checkpoint(path, index["step"], trainer, loader, config, index["files"][MODEL]["sha256"])


def _read_trainer(path: Path) -> dict[str, Any]:
    trainer = _read_json(path / TRAINER)
    optional = {key: kinds for key, kinds in _OPTIONAL_TRAINER_KEYS.items() if key in trainer}
    for key, kinds in (_TRAINER_KEYS | optional).items():
        value = trainer.get(key)
        if key not in trainer or not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise UserError(
                f"{path / TRAINER}: {key} is {trainer.get(key, 'missing')!r}, expected {wanted}: "
                f"not written by this harness. {_others(path)}"
            )
    return trainer


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((path / CONFIG).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path / CONFIG} cannot be read as YAML ({error}). {_others(path)}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path / CONFIG} must hold keys, not {config!r}. {_others(path)}")
    return config


def _read_index(path: Path) -> dict[str, Any]:
    file = path / _INDEX
    index = _read_json(file)
    if index.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{file}: format_version {index.get('format_version')!r}, this harness reads {FORMAT_VERSION}"
        )
    entries, step = index.get("files"), index.get("step")
    if (
        type(step) is not int
        or step < 0
        or not isinstance(entries, dict)
        or set(index) != {"format_version", "step", "files"}
    ):
        raise UserError(
            f"{file} is not an index of this harness: it must hold format_version, step and files. "
            + _others(path)
        )
    if set(entries) != set(FILES):
        raise UserError(
            f"{file} names {', '.join(sorted(map(str, entries)))}; expected {', '.join(sorted(FILES))}. "
            + _others(path)
        )
    for name, entry in entries.items():
        if (
            not isinstance(entry, dict)
            or set(entry) != {"bytes", "sha256"}
            or type(entry["bytes"]) is not int
        ):
            raise UserError(
                f"{file}: the entry of {name} must hold bytes and sha256, not {entry!r}. {_others(path)}"
            )
    return index


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise UserError(
            f"{path} is missing, but {_INDEX} names it ({entry['bytes']} bytes). {_others(path.parent)}"
        )
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise UserError(
            f"{path} has {size} bytes, {_INDEX} says {entry['bytes']}: the file is damaged. "
            + _others(path.parent)
        )
    digest = sha256_file(path)
    if digest != entry["sha256"]:
        raise UserError(
            f"{path}: SHA-256 is {digest}, {_INDEX} says {entry['sha256']}: the file is damaged. "
            + _others(path.parent)
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}). {_others(path.parent)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}. {_others(path.parent)}")
    return value


def save(
    run_dir: Path,
    *,
    model: dict[str, Tensor],
    optimizer: dict[str, Any],
    rng: dict[str, Any],
    loader: dict[str, Any],
    trainer: dict[str, Any],
    config: dict[str, Any],
) -> Path:
    """Write the step `trainer["step"]`; one that is already saved is left as it is. Returns its folder."""
    import torch
    from safetensors.torch import save_file

    target = step_dir(run_dir, trainer["step"])
    if (target / _INDEX).is_file():
        return target
    temporary = target.with_name(target.name + ".tmp")
    for leftover in (temporary, target):  # of a writer that was killed: without an index it is no checkpoint
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    writers: dict[str, Callable[[Path], Any]] = {
        MODEL: lambda path: save_file(model, path),
        OPTIMIZER: lambda path: torch.save(optimizer, path),
        RNG: lambda path: torch.save(rng, path),
        LOADER: lambda path: path.write_text(json.dumps(loader, indent=2) + "\n"),
        TRAINER: lambda path: path.write_text(json.dumps(trainer, indent=2, allow_nan=False) + "\n"),
        CONFIG: lambda path: path.write_text(yaml.safe_dump(config, sort_keys=False)),
    }
    try:
        entries = {}
        for name in FILES:
            path = temporary / name
            writers[name](path)
            _fsync(path)
            entries[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        index = {"format_version": FORMAT_VERSION, "step": trainer["step"], "files": entries}
        write_atomic(temporary / _INDEX, json.dumps(index, indent=2) + "\n")
        os.rename(temporary, target)
    except BaseException as error:
        free = shutil.disk_usage(temporary).free
        shutil.rmtree(temporary, ignore_errors=True)  # half a checkpoint would keep a full disk full
        needed = 3 * sum(tensor.nbytes for tensor in model.values())  # weights and AdamW's two moments
        if isinstance(error, Exception) and not isinstance(error, OSError) and free < needed:
            # The libraries that write tensors do not all say so when the disk is full.
            text = f"no space left for step {trainer['step']}: {free:,} bytes free, about {needed:,} needed"
            raise OSError(errno.ENOSPC, text, str(target)) from error
        raise
    fsync_dir(target.parent)
    write_atomic(target.parent / "latest", target.name + "\n")
    return target


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
