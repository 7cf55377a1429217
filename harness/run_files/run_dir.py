"""A run's own files, apart from its checkpoints and metrics.

config.yaml        the resolved configuration          .hydra/             as composed, with overrides.yaml
environment.json   every start of the run: code, packages, hardware, threads
manifest.json      a copy of the data's manifest       train.log
lineage.json       which data and which order each stretch of steps came from (lineage.py)
manifest-*.json    copies of the manifests before shards were added, each named by its digest
reference.safetensors  the frozen starting weights of a run that is trained on preferences
incidents.jsonl    steps whose numbers went wrong, where there were any (incidents.py)
summary.json       what it came to, once it has ended or stopped (summary.py)
profile/           a trace of a few steps, with profile=true (profiling.py)
job.json           of a sweep's job: its identity, its words, the sweep's name
status.json        state, phase, step, last_saved, pid, ... : what a scheduler or a person asks first
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness.append_file import AppendFile
from harness.errors import EXIT_DONE
from harness.files import write_atomic, write_json
from harness.resuming import growth
from harness.storage.manifest import manifest_digest

if TYPE_CHECKING:
    import torch

log = logging.getLogger("harness")

_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "h5py", "wandb", "safetensors")
JOB_FILE = "job.json"
_NOTE_INTERVAL = 5.0  # seconds
_MARKS = ("config.yaml", "status.json", "metrics.jsonl", "checkpoints")


def holds_a_run(path: Path) -> bool:
    return any((path / name).exists() for name in _MARKS)


def began_alike(path: Path, config: dict[str, Any], manifest: dict[str, Any]) -> bool:
    """Whether the run in `path`, which died before its first checkpoint, had this configuration and data."""
    try:
        same_config = (path / "config.yaml").read_text() == yaml.safe_dump(config, sort_keys=False)
        return same_config and bool(json.loads((path / growth.COPY).read_text()) == manifest)
    except (OSError, ValueError):
        return False


def write_inputs(
    path: Path,
    config: dict[str, Any],
    composed: dict[str, str],
    manifest: dict[str, Any],
    step: int,
    places: list[dict[str, Any]],
) -> None:
    """What the run was told, at its start (step 0) or at a resume; `places` of its ranks."""
    (path / ".hydra").mkdir(parents=True, exist_ok=True)
    for name, text in composed.items():
        write_atomic(path / ".hydra" / name, text)
    write_atomic(path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    _keep_manifest(path, manifest)
    write_json(path / growth.COPY, manifest)
    starts = read_starts(path)
    start = {"step": step, **environment(), "world_size": len(places), "ranks": places}
    write_json(path / "environment.json", {"starts": [*starts, start]})


def _keep_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """The copy of another set's manifest, from before shards were added, stays under its digest."""
    try:
        old = json.loads((path / growth.COPY).read_text())
        name = growth.kept_name(manifest_digest(old))
    except (OSError, ValueError, TypeError):
        return
    if old != manifest:
        write_json(path / name, old)


def read_starts(path: Path) -> list[Any]:
    """What environment.json says of each start of the run in `path`, oldest first; empty where it is lost."""
    try:
        starts = json.loads((path / "environment.json").read_text())["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # lost history must not keep a run from going on
    return starts if isinstance(starts, list) else []


def environment() -> dict[str, Any]:
    """The code, packages and hardware of this process."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "time": now(),
        "argv": sys.orig_argv,
        "cwd": os.getcwd(),
        "host": socket.gethostname(),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }


def place(device: torch.device) -> dict[str, Any]:
    """Where this process computes."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "device": str(device)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit and dirtiness of the checkout that this code runs from; None outside one."""

    def ask(*words: str) -> str:
        folder = Path(__file__).resolve().parent
        answer = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Status:
    """`status.json`, replaced atomically: at each change of phase, and between them every few seconds.

    `phase` is start, train, evaluate, sample, save or end. `updated` is the run's heartbeat: it is written
    where the loop goes on (a step, a batch of an evaluation, a token of a sample, a part of a save), never by
    a clock beside it. So a state of running whose `updated` is older than a minute means that one such
    thing takes that long, or that the run hangs, or that its process is gone: `pid` on `host` says which.
    A disk that does not take the file is said once, and does not end the run.
    """

    def __init__(self, path: Path, **fields: Any) -> None:
        self.path, self._lock, self._ended, self._said = path, threading.Lock(), False, False
        self.fields: dict[str, Any] = {
            "state": "running",
            "phase": "start",
            "step": 0,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": now(),
            "updated": now(),
            "exit_code": None,
            "error": None,
            "reason": None,
            "traceback": None,
            "wandb_id": None,
            "wandb_last_step": None,
            **fields,
        }
        self.update()

    def update(self, **fields: Any) -> None:
        """Change fields and write the file."""
        with self._lock:
            if not self._ended:
                self._write(fields)

    def note(self, **fields: Any) -> None:
        """The run goes on: change fields; they are written here where the last write is some seconds ago.

        A write waits for the disk, and small models make a hundred steps a second.
        """
        self.fields |= fields
        if time.monotonic() - self._written >= _NOTE_INTERVAL:
            self.update()

    def end(self, exit_code: int) -> None:
        """Say that a run is done or stopped, unless it is said to have failed; nothing is written after it.

        Also for a thread that ends the process while the main thread is anywhere.
        """
        with self._lock:
            if not self._ended and self.fields["state"] == "running":
                state = "done" if exit_code == EXIT_DONE else "stopped"
                self._write({"state": state, "phase": "end", "exit_code": exit_code})
            self._ended = True

    def _write(self, fields: dict[str, Any]) -> None:
        self.fields |= {**fields, "updated": now()}
        try:
            write_json(self.path, self.fields)
        except OSError as error:
            if not self._said:
                log.warning("%s cannot be written (%s): it says what was before", self.path, error.strerror)
            self._said = True
        self._written = time.monotonic()


def read_status(path: Path) -> dict[str, Any]:
    """The status of a run, or an empty dict where there is none that can be read."""
    try:
        status = json.loads((path / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


class _LogFile(logging.Handler):
    """Appends to a file; lines that a full disk keeps out go with a later one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append(f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Keep the harness's log in `train.log` as well, with times. `harness.file` goes there alone."""
    handler = _LogFile(path / "train.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    harness, file_only = logging.getLogger("harness"), logging.getLogger("harness.file")
    file_only.propagate = False
    harness.setLevel(logging.INFO)
    for logger in (harness, file_only):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in (harness, file_only):
            logger.removeHandler(handler)
        handler.close()
