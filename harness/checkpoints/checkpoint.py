"""A step on disk: written whole or not at all, readable by eye, refused when a single bit has changed.

    step-00000200/   model.safetensors  optimizer.pt  rng.pt  loader.json  trainer.json  config.yaml
                     checkpoint.json    written last: the other files with their sizes and SHA-256

Sharded over several ranks the tensors lie in files of each rank instead: see `shard_files.py`.
Here steps are found and read; `checkpoint_files.py` says what each file must hold, `checkpoint_writer.py`
writes them. torch is imported only where tensors are read, so finding a checkpoint costs nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoints.checkpoint_files import CONFIG as CONFIG
from harness.checkpoints.checkpoint_files import FILES as FILES
from harness.checkpoints.checkpoint_files import (
    INDEX,
    LOADER,
    MODEL,
    OPTIMIZER,
    RNG,
    SHARDED_VERSION,
    TRAINER,
    Entries,
    check_files,
    read_config,
    read_index,
    read_json,
    read_trainer,
)
from harness.checkpoints.shard_files import SHARDS, Shards, index_from_json, model_sha256
from harness.errors import UserError
from harness.files import fsync_dir

if TYPE_CHECKING:
    from torch import Tensor, nn

Check = Callable[[Path, Entries], None]  # of a checkpoint's folder: `check_files`
_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")  # as `step_dir` names them: a step has one name


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files have all been checked against its index.

    `sharded`: its tensors lie in shards; whoever reads them here has them whole all the same. `model_sha256`
    is of model.safetensors, of a sharded one of what takes its place: see `shard_files.model_sha256`.
    """

    path: Path
    step: int
    trainer: dict[str, Any]
    loader: dict[str, Any]
    config: dict[str, Any]
    model_sha256: str
    sharded: bool = False

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent

    @property
    def model_file(self) -> str:
        """The file that says what the weights are."""
        return SHARDS if self.sharded else MODEL

    @property
    def optimizer_file(self) -> str:
        """The file that says what the optimizer's state is."""
        return SHARDS if self.sharded else OPTIMIZER

    def restore_into(self, model: nn.Module) -> None:
        """Put the saved weights into place."""
        with self.foreign(self.model_file):
            model.load_state_dict(self.weights())

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, on the CPU."""
        from safetensors.torch import load_file

        if self.sharded:
            with self.shards() as shards:
                return shards.weights()
        with self.foreign(MODEL):
            return load_file(self.path / MODEL)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's `state_dict`, on the CPU."""
        if self.sharded:
            with self.shards() as shards:
                return shards.optimizer_state()
        return self._tensors(OPTIMIZER)

    @contextlib.contextmanager
    def shards(self) -> Iterator[Shards]:
        """The tensors of a sharded checkpoint; an error of reading them is one of `foreign`."""
        with self.foreign(SHARDS):
            index = index_from_json(read_json(self.path, SHARDS))
            with Shards(self.path, index, self.step) as shards:
                yield shards

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
        except UserError:
            raise
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
    return sorted(int(match[1]) for match in names if (folder / match[0] / INDEX).is_file())


def incomplete_steps(run_dir: Path) -> list[str]:
    """The names of step folders without an index: no checkpoints, but perhaps what is left of some."""
    folder, complete = checkpoints_dir(run_dir), complete_steps(run_dir)
    names = (
        [match for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
        if folder.is_dir()
        else []
    )
    return sorted(match[0] for match in names if int(match[1]) not in complete)


def aside(folder: Path) -> Path:
    """Where a damaged step is kept: `step-N.damaged`, or with a number where there is one already."""
    names = (folder.with_name(f"{folder.name}.damaged{i or ''}") for i in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def set_aside(folder: Path) -> None:
    """Give what is no checkpoint, and yet has the name of one, another name."""
    os.rename(folder, aside(folder))
    fsync_dir(folder.parent)


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
    if (path / INDEX).is_file():
        return path.resolve() if path.is_symlink() else path  # its run is where it lies
    steps = complete_steps(path)
    if steps:
        return step_dir(path, steps[-1])
    if _STEP.fullmatch(path.name):
        raise UserError(
            f"{path} is not a complete checkpoint: {INDEX}, which is written last, is missing. "
            + _others(path)
        )
    raise UserError(
        f"{key}={path}: no complete checkpoint there: neither {INDEX} nor checkpoints/step-N/{INDEX}. "
        "Give a run directory or one of its checkpoints/step-N folders."
    )


def _others(path: Path) -> str:
    steps = [
        step for step in complete_steps(path.parent.parent) if step_dir(path.parent.parent, step) != path
    ]
    return f"Use {step_dir(path.parent.parent, steps[-1])}" if steps else "The run has no other checkpoint."


def open_checkpoint(path: Path, *, tensors: bool = True, check: Check = check_files) -> Checkpoint:
    """Check every file's size and SHA-256 against the index, then read the small ones.

    `tensors` False leaves out the large ones, for what asks only who and where the run was. `check` is who
    checks the files. Raises `UserError` naming the file and both values for anything missing, cut, changed or
    foreign.
    """
    try:
        checkpoint = _read(path, tensors, check)
    except UserError as error:
        raise UserError(f"{error}. {_others(path)}") from None
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != checkpoint.step:
        raise UserError(f"{path} was renamed: {INDEX} says step {checkpoint.step}. Give it back its name.")
    return checkpoint


def _read(path: Path, tensors: bool, check: Check) -> Checkpoint:
    index = read_index(path)
    step, files = index["step"], index["files"]
    check(path, files if tensors else {name: files[name] for name in (LOADER, TRAINER, CONFIG)})
    trainer, loader, config = read_trainer(path), read_json(path, LOADER), read_config(path)
    if trainer["step"] != step:
        raise UserError(f"{path / TRAINER}: step {trainer['step']}, but {INDEX} says {step}")
    sharded = index["format_version"] == SHARDED_VERSION
    digest = model_sha256(files) if sharded else files[MODEL]["sha256"]
    return Checkpoint(path, step, trainer, loader, config, digest, sharded)
