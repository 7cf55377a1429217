"""Writing a checkpoint: whole or not at all.

A step is built as `step-N.tmp`, every file and folder fsynced, then renamed. All bytes go through `File`, in
blocks: so they are hashed as they are written, the operating system's own error is known (the libraries that
write tensors have errors of their own for a full disk), and a writer that is to give up does so within a
block. A thread inside of a library's C++ when the process ends would abort it: see `saving.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from harness.checkpoints.checkpoint import set_aside, step_dir
from harness.checkpoints.checkpoint_files import (
    CONFIG,
    FORMAT_VERSION,
    INDEX,
    LOADER,
    MODEL,
    OPTIMIZER,
    RNG,
    TRAINER,
)  # fmt: skip
from harness.checkpoints.safetensors_file import write_safetensors
from harness.files import fsync_dir, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4 << 20
Writer = Callable[["File"], object]  # writes the whole content of a file


class Cancelled(Exception):
    """The writer was told to give up; nothing of its step is left."""


def write(
    run_dir: Path,
    *,
    model: dict[str, Tensor],
    optimizer: dict[str, Any],
    rng: dict[str, Any],
    loader: dict[str, Any],
    trainer: dict[str, Any],
    config: dict[str, Any],
    between: Callable[[], object] = lambda: None,
) -> Path:
    """Write the step `trainer["step"]`, durably; one that is already saved is left as it is. Its folder.

    A failure leaves nothing behind and raises the `OSError` that caused it, with the path of the file.
    `between` is called before each block; the `Cancelled` that it may raise ends the writing.
    """
    target = step_dir(run_dir, trainer["step"])
    if (target / INDEX).is_file():
        return target
    writers: dict[str, Writer] = {
        MODEL: lambda file: write_safetensors(model, file),
        OPTIMIZER: lambda file: save_tensors(optimizer, file),
        **small_writers(rng=rng, loader=loader, trainer=trainer, config=config),
    }
    write_plain(target, trainer["step"], writers, between)
    return target


def write_plain(
    target: Path, step: int, writers: dict[str, Writer], between: Callable[[], object] = lambda: None
) -> None:
    """Write a step by the `writers` of its files, FILES, to the folder `target`, which makes room for it."""
    temporary = make_room(target)
    with removed_on_failure(temporary):
        entries = write_files(temporary, writers, between)
        complete(temporary, target, FORMAT_VERSION, step, entries, between)


def small_writers(
    *, rng: dict[str, Any], loader: dict[str, Any], trainer: dict[str, Any], config: dict[str, Any]
) -> dict[str, Writer]:
    """What writes the files of SMALL_FILES."""
    return {
        RNG: lambda file: save_tensors(rng, file),
        LOADER: lambda file: file.write(to_json(loader)),
        TRAINER: lambda file: file.write(to_json(trainer)),
        CONFIG: lambda file: file.write(yaml.safe_dump(config, sort_keys=False).encode()),
    }


def write_files(
    temporary: Path, writers: dict[str, Writer], between: Callable[[], object]
) -> dict[str, dict[str, Any]]:
    """Write files into a step's temporary folder; their entries in the index."""
    entries = {}
    for name, writer in writers.items():
        with File(temporary / name, between) as file:
            writer(file)
        entries[name] = {"bytes": file.size, "sha256": file.sha256()}
    return entries


def complete(
    temporary: Path,
    target: Path,
    version: int,
    step: int,
    entries: dict[str, dict[str, Any]],
    between: Callable[[], object],
) -> None:
    """Write the index of a step, all of whose files are durable, and give the step its name."""
    write_atomic(temporary / INDEX, to_json({"format_version": version, "step": step, "files": entries}))
    between()
    os.rename(temporary, target)
    fsync_dir(target.parent)


@contextlib.contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Half a checkpoint would keep a full disk full."""
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_of(target: Path) -> Path:
    """The folder in which a step is built."""
    return target.with_name(target.name + ".tmp")


def make_room(target: Path) -> Path:
    """An empty folder for the files of a step, and nothing at `target`.

    What a killed writer left goes; a step without its index, which no writer leaves, gets another name.
    """
    temporary = temporary_of(target)
    if temporary.exists():
        shutil.rmtree(temporary)
    if os.path.lexists(target):
        set_aside(target)
    if not target.parent.is_dir():
        target.parent.mkdir()
        fsync_dir(target.parent.parent)
    temporary.mkdir()
    return temporary


class File:
    """A new file, durable when the context ends without an error; only `write` and `flush`, for libraries."""

    def __init__(self, path: Path, between: Callable[[], object]) -> None:
        self.path, self.size = path, 0
        self._between, self._digest = between, hashlib.sha256()
        self._error: BaseException | None = None

    def __enter__(self) -> File:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        return self

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`, a block at a time."""
        whole = memoryview(data)
        left = whole.cast("B") if whole.nbytes else whole  # an empty one cannot be cast
        try:
            while left:
                self._between()
                count = os.write(self._descriptor, left[:_BLOCK])
                self._digest.update(left[:count])
                self.size += count
                left = left[count:]
        except BaseException as error:
            self._error = error
            raise
        return whole.nbytes

    def flush(self) -> None:
        """Nothing is held back."""

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        except OSError as failure:
            self._error = failure
        finally:
            os.close(self._descriptor)
        cause = self._error  # of what a library made an error of its own
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(self.path)) from error
        if cause is not None and cause is not error:
            raise cause


def save_tensors(value: dict[str, Any], file: File) -> None:
    import torch

    torch.save(value, file)  # type: ignore[arg-type]  # it needs no more of a file than ours has


def to_json(value: dict[str, Any]) -> bytes:
    """Readable JSON; NaN, which other parsers could not read, is refused."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
