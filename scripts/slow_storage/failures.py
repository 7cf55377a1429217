"""What reads that fail end in: an error in words, or the end of the process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers.forks import Failed, in_fork

from harness.errors import UserError
from harness.loaders import build_loader
from harness.storage import open_split, open_store
from slow_storage.mount import Kind, mounted
from slow_storage.ways import LOADERS

# Steps within which a read of a failing file must have been asked for.
_STEPS = 300


def _harness(place: Path, name: str, mmap: bool, fail: Callable[[], None]) -> str:
    layout, config = LOADERS[name]
    batches = build_loader(config, open_split(place / f"npy-{layout}", "train", mmap=mmap))
    for step in range(_STEPS):
        if step == 3:
            fail()
        try:
            batches.next_batch()
        except UserError as error:
            return f"error: {error}".replace(f"{place}/", "")
    return "nothing was noticed"


def _mapped(place: Path, fail: Callable[[], None]) -> str:
    """As a loader reads while it finds its storage quick."""
    store = open_store(place / "npy-stream", "train")
    store.read_windows([0], 1025)
    fail()
    for start in range(0, store.total_tokens - 1025, 1025):
        store.read_windows([start], 1025)
    return "nothing was noticed"


def _memmap(place: Path, fail: Callable[[], None]) -> str:
    rows = np.load(place / "npy-rows" / "train_00000.npy", mmap_mode="r")
    fail()
    return f"read {int(rows.max())}"


def outcomes(program: Path, folder: Path, work: Path, log: Path) -> list[dict[str, str]]:
    """What each way of reading comes to when the storage fails, and when a file is cut short."""
    ways: list[tuple[str, Kind, Callable[..., str], tuple[Any, ...]]] = [
        ("np.memmap", Kind(0, 64), _memmap, ()),
        ("any loader, mapped, storage quick", Kind(0, 64), _mapped, ()),
    ]
    for name in ("sequential", "sliding_window, permutation", "padded_rows", "contrastive_rows"):
        ways += [
            (f"{name}, data.mmap=false", Kind(0, 64), _harness, (name, False)),
            (f"{name}, mapped, storage slow", Kind(5000, 64), _harness, (name, True)),
        ]
    found = []
    for name, kind, read, arguments in ways:
        row = {"way": name}
        for fault in ("input/output error", "file cut short"):
            part = work / "failing"
            for layout in ("rows", "stream", "contrastive"):
                shutil.copytree(folder / f"npy-{layout}", part / f"npy-{layout}")
            with mounted(program, part, work / "failing-mount", kind) as place:
                fail = _Fail(part, fault)
                try:
                    row[fault] = in_fork(read, place, *arguments, fail, log=log, limit=120)
                except Failed as failed:
                    killed = str(failed).endswith(f"exit code {-signal.SIGBUS}")
                    row[fault] = "SIGBUS: the process is dead" if killed else str(failed)
            shutil.rmtree(part)
        found.append(row)
    return found


class _Fail:
    """Makes the storage below a mount fail."""

    def __init__(self, folder: Path, fault: str) -> None:
        self._folder, self._fault = folder, fault

    def __call__(self) -> None:
        if self._fault == "input/output error":
            (self._folder / ".fail").touch()
            return
        for file in self._folder.glob("npy-*/*.npy"):
            os.truncate(file, 4096)
