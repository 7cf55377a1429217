"""A device for each job: those of one sweep that run on one machine at a time share its GPUs out."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from harness.sweep.lock import alone

try:
    import fcntl
except ImportError:  # no such locks here: every job takes what `auto` means
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def device_for(name: str, folder: Path, count: int | None = None) -> Iterator[str]:
    """The device of one job of the sweep in `folder`: `cuda:N` for as long as the block lasts.

    Only `auto`, on a machine with several CUDA devices, is shared out: each job gets the lowest device that
    the fewest others use, so no two share one before all are taken. Any other `name` is meant as it is.
    `count` is the number of CUDA devices; None asks torch.
    """
    if name == "auto" and fcntl is not None:
        count = _cuda_devices() if count is None else count
        if count > 1:
            with _held(folder / ".locks", count) as index:
                yield name if index is None else f"cuda:{index}"
            return
    yield name


@contextlib.contextmanager
def _held(place: Path, count: int) -> Iterator[int | None]:
    """Hold a seat at a device, until this process ends at most; None where there are no locks."""
    index, seat = _take_seat(place, count)
    try:
        yield index
    finally:
        if seat is not None:
            _free(seat)


def _take_seat(place: Path, count: int) -> tuple[int | None, int | None]:
    """The device with the fewest users, and the descriptor that says we are one."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with alone(place):
            index = min(range(count), key=lambda index: _users(place, index))
            seats = (_lock(place / _seat_name(index, str(number))) for number in itertools.count())
            return index, next(seat for seat in seats if seat is not None)
    except OSError:
        return None, None


def _users(place: Path, index: int) -> int:
    """How many jobs have a seat at this device now."""
    seats = [_lock(path) for path in place.glob(_seat_name(index, "*"))]
    for seat in seats:
        if seat is not None:
            _free(seat)
    return seats.count(None)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the file; None where somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _free(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
    os.close(descriptor)


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _physical(index: int) -> str:
    """Which card a process means by `cuda:index`: another launch may have been given others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (visible[index].strip() if index < len(visible) else "") or str(index)


def _seat_name(index: int, number: str) -> str:
    return f"device-{_file_word(socket.gethostname())}-{_file_word(_physical(index))}-{number}"


def _file_word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text)
