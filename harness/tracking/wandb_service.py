"""wandb's helper process, wandb-core: it writes a run's files and sends them.

It outlives the process that started it: a while after a kill, and for hours where the server is silent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_TEARDOWN_SECONDS = 2.0
_ORPHAN_SECONDS = 10.0


def end_helpers() -> None:
    """End wandb's helper processes of this process: a run's file is whole then, and a fault stays behind.

    Bounded, because the same wait at the interpreter's exit, which this takes over, is not. A helper that
    still tries to reach a silent server would outlive this process by hours, with our standard output open:
    it is ended. What it did not send is in the run's file, for `wandb sync`.
    """
    import wandb

    before = helpers()
    within(_TEARDOWN_SECONDS, wandb.teardown)
    _end(lambda: before & helpers(), _TEARDOWN_SECONDS)


def end_orphans(files: list[Path]) -> None:
    """Wait for the helper of a killed process, which may still be writing to `files`; end one that stays.

    Only then do the files say what W&B has.
    """
    wanted = {str(path.resolve()) for path in files}
    _end(
        lambda: {pid for pid, _ in _cores() if pid not in helpers() and _holds(pid, wanted)}, _ORPHAN_SECONDS
    )


def _end(left: Callable[[], set[int]], seconds: float) -> None:
    """Wait until no process is left, then kill what is."""
    deadline = time.monotonic() + seconds
    while (pids := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def helpers() -> set[int]:
    """The process ids of this process's own helpers; empty where there is no /proc."""
    return {pid for pid, parent in _cores() if parent == os.getpid()}


def _cores() -> Iterator[tuple[int, int]]:
    """The id of every wandb-core process on this machine, and of its parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        state, parent = rest.split()[:2]
        if name.endswith("(wandb-core") and state != "Z":
            yield int(stat.parent.name), int(parent)


def _holds(pid: int, files: set[str]) -> bool:
    """Whether a process has one of the files open."""
    with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
        return any(os.readlink(link) in files for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


class StillRunning(Exception):
    """What was started did not end in time, and goes on in its thread."""


def within(seconds: float, action: Callable[[], object]) -> BaseException | None:
    """Run `action` for at most `seconds`: its error, `StillRunning`, or None where it succeeded.

    A thread, because no setting of wandb bounds every wait inside it.
    """
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, name="wandb", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return StillRunning(f"no answer in {seconds:g} s")
    return errors[0] if errors else None
