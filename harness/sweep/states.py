"""How far a job or a run is, read from its directory alone."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from harness.run_files.run_dir import read_starts, read_status

DONE, RUNNING, STOPPED, FAILED, DIED, WAITING = "done", "running", "stopped", "failed", "died", "waiting"
_SILENT_S = 300.0  # after which a run on another host counts as dead


class JobState(NamedTuple):
    """`state` is one of the words above; died: it says running, but its process is gone.

    `step`: the last one that is known. `resumed_from`: the step that its newest start went on from, 0 for a
    fresh one. `reason`: what ended it, in a line, else "". `started`: when its newest start was, ISO 8601.
    """

    state: str
    step: int
    resumed_from: int
    reason: str
    started: str

    @property
    def has_ended(self) -> bool:
        return self.state not in (RUNNING, WAITING)


def read_state(path: Path | None) -> JobState:
    """The state of the job in `path`; one without a directory or a status waits."""
    status = {} if path is None else read_status(path)
    if path is not None and not status and (path / "status.json").exists():
        return JobState(FAILED, 0, 0, "status.json cannot be read, or says nothing", "")
    if path is None or not status:
        return JobState(WAITING, 0, 0, "", "")
    starts = read_starts(path)
    resumed = starts[-1].get("step") if starts and isinstance(starts[-1], dict) else 0
    state = status.get("state")
    if state == RUNNING and not _is_alive(status):
        state = DIED
    if state == DONE and status.get("reason"):  # a done job that may not be counted, job.py says why
        state = FAILED
    if state not in (DONE, RUNNING, STOPPED, FAILED, DIED):
        state = FAILED
    return JobState(
        state,
        _whole(status.get("step")),
        _whole(resumed),
        _reason(status, state),
        str(status.get("started") or ""),
    )


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _reason(status: dict[str, Any], state: Any) -> str:
    """Why it ended, in a line."""
    if state == DIED:
        return f"its process {status.get('pid')} on {status.get('host')} is gone (killed, or out of memory)"
    if state != FAILED:
        return ""
    word, text = status.get("reason") or "error", str(status.get("error") or "").strip()
    first, *rest = text.splitlines() or ["status.json does not say why"]
    if first.endswith(":"):  # what it is lies in the lines of a list, or in the next one
        items = [line.strip(" -") for line in rest if line.lstrip().startswith("- ")]
        first += " " + "; ".join(items or [line.strip() for line in rest[:1]])
    return f"{word}: {first.removeprefix('UserError: ').removeprefix('RunFailed: ').rstrip()}"


def _is_alive(status: dict[str, Any]) -> bool:
    """Whether the process that writes this status may still be there."""
    if status.get("host") != socket.gethostname():
        with contextlib.suppress(TypeError, ValueError):
            updated = datetime.fromisoformat(str(status.get("updated")))
            return (datetime.now(UTC) - updated).total_seconds() < _SILENT_S
        return False
    try:
        os.kill(_whole(status.get("pid")) or -1, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return status.get("pid") is not None
