"""W&B as a mirror of metrics.jsonl: online where it can be, offline where it cannot, never in the way.

What could stop or delay a run is decided here and not left to wandb: it would ask for a key on a
terminal, wait on a silent server, and return the previous run where one was not finished.
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness.commandline.commands import shown
from harness.config_groups import WandbTrackerConfig
from harness.errors import EXIT_STOPPED
from harness.tracking import NoTracker, TrackedRun, Tracker, wandb_record
from harness.tracking.wandb_mode import MODES, choose_mode, quiet, run_settings, unknown_mode
from harness.tracking.wandb_service import StillRunning, end_helpers, end_orphans, within

Report = Callable[[str], None]
_MOST_OF_A_TAG = 64  # characters; with a longer one wandb takes none

# Runs that this process has not finished: while there is one, wandb's helper process has to stay.
_unfinished: weakref.WeakSet[WandbTracker] = weakref.WeakSet()


class WandbTracker:
    """One W&B run, held as an object: nothing here uses `wandb.run` or `wandb.log`."""

    def __init__(self, run: Any, *, last_step: int | None, finish_timeout: float, report: Report) -> None:
        self.id: str | None = str(run.id)
        self.last_step = last_step
        self._run, self._timeout, self._report = run, finish_timeout, report
        self._failed = False
        _unfinished.add(self)

    def log(self, row: dict[str, Any], *, late: bool = False) -> None:
        """Send one whole step; the first failure ends the mirror with one line."""
        step = row["step"]
        if self._failed or self not in _unfinished:
            return
        if self.last_step is not None and step <= self.last_step:
            if not late:
                return
            if self._run.resumed:  # the server's run takes no step twice, not even another part of it
                self._report(f"W&B: step {step} was sent without its evaluation, which is in metrics.jsonl")
                return
        try:
            # Committed, or it would stay in wandb's memory until the next step: a kill would lose it.
            self._run.log(row, step=step, commit=True)
        except Exception as error:
            self._failed = True
            self._report(
                f"W&B: logging step {step} failed ({_short(error)}); nothing more is sent, "
                "metrics.jsonl has every row"
            )
        else:
            self.last_step = max(step, self.last_step or 0)

    def summarize(self, values: dict[str, Any]) -> None:
        if self._failed or self not in _unfinished:
            return
        try:
            self._run.summary.update(values)
        except Exception as error:
            self._report(f"W&B: the summary was not sent ({_short(error)})")

    def finish(self, exit_code: int, at_most: float = math.inf) -> None:
        """Close the run, waiting `tracker.finish_timeout` or `at_most` seconds for its upload."""
        if self not in _unfinished:
            return
        _unfinished.discard(self)
        seconds = min(self._timeout, at_most)
        error = within(seconds, partial(_finish, self._run, exit_code))
        if isinstance(error, StillRunning):
            limit = "tracker.finish_timeout=" if seconds == self._timeout else ""
            self._report(
                f"W&B: the upload did not end within {limit}{seconds:g} s; "
                f"send the rest later: wandb sync {_directory(self._run)}"
            )
        elif error is not None and not self._failed:
            self._report(f"W&B: closing the run failed ({_short(error)})")
        _end_service()


def open_wandb(config: WandbTrackerConfig, tracked: TrackedRun, report: Report) -> Tracker:
    """A W&B run in `tracked.directory/wandb`, or a `NoTracker` and one line that says why."""
    # wandb's own crash reports share its server: where that is silent, they hold up the process's exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if (unknown := unknown_mode()) is not None:
        report(
            f"W&B: WANDB_MODE={unknown} is none of {', '.join(MODES)}: nothing is sent, metrics.jsonl has "
            "every row. Mend it with: WANDB_MODE=offline"
        )
        return NoTracker()
    try:
        import wandb

        quiet(wandb)
        mode, key, reason = choose_mode(wandb, config)
    except Exception as error:
        # wandb checks its settings with pydantic, whose error is a ValueError.
        mend = "the WANDB_ variable of that name" if isinstance(error, ValueError) else "pip install wandb"
        report(
            f"W&B: wandb cannot be used ({_short(error)}); metrics.jsonl has every row. "
            f"Mend it with: {mend}, or be without: tracker=none"
        )
        return NoTracker()
    if mode == "disabled":
        report(f"W&B: {reason}; metrics.jsonl has every row")
        return NoTracker()

    recorded, doubt = _recorded_step(tracked) if tracked.resumes else (None, "")
    run = _begin(wandb, _arguments(wandb, config, tracked, key), mode, reason, tracked, report)
    if run is None:
        return NoTracker()
    if run.offline and doubt:
        report(doubt)
    tracker = WandbTracker(
        run,
        last_step=recorded if run.offline else _step_at_the_server(run, recorded, report),
        finish_timeout=config.finish_timeout,
        report=report,
    )
    # Recording an artifact asks the server, which takes as long as it likes to answer.
    fault = within(config.init_timeout, lambda: _describe(wandb, run, tracked, config.tags))
    if fault is not None:
        report(f"W&B: the data set was not recorded ({_short(fault)}); the run is logged without it")
    return tracker


def _recorded_step(tracked: TrackedRun) -> tuple[int | None, str]:
    """The last step in W&B's own files of the run; without them what it was given last, and a line why."""
    folder = tracked.directory / "wandb"
    try:
        if files := wandb_record.record_files(folder, tracked.id):
            end_orphans(files)
            return wandb_record.last_step(files), ""
    except Exception as error:
        reason = f"cannot be read ({_short(error)})"
    else:
        reason = "are gone"
    if tracked.last_step is None:  # then it was given nothing
        return None, ""
    return tracked.last_step, (
        f"W&B: the files of run {tracked.id} in {shown(folder)} {reason}; going on after step "
        f"{tracked.last_step}, the last that W&B was given"
    )


def _step_at_the_server(run: Any, recorded: int | None, report: Report) -> int | None:
    """The last step that an online run has at the server, which alone counts there."""
    last = int(run.starting_step) - 1 if run.resumed else None
    if recorded is not None and recorded > (last or 0):
        report(
            f"W&B: {run.url} has the steps to {last or 0}, the files here to {recorded}: what it lacks is "
            "sent from metrics.jsonl, so those of before need no wandb sync"
        )
    return last


def _arguments(
    wandb: Any, config: WandbTrackerConfig, tracked: TrackedRun, key: str | None
) -> dict[str, Any]:
    """What wandb.init is given in every mode."""
    digests = {f"data/{name}": value for name, value in tracked.digests.items()}
    parent = {} if tracked.parent is None else {"parent": tracked.parent}
    return {
        "dir": str(tracked.directory),
        "id": tracked.id,
        "name": tracked.directory.name,
        "project": config.project,
        "entity": config.entity,
        "group": tracked.group,
        "config": {**tracked.config, **digests, **parent},
        "notes": _notes(tracked),
        "job_type": "train",
        # The default hands back a run that is still open, and with it the wrong configuration.
        "reinit": "create_new",
        "settings": run_settings(wandb, config, key),
    }


def _notes(tracked: TrackedRun) -> str | None:
    """Where a branch began; nothing at a resume, when a person may have written notes of their own."""
    if tracked.parent is None or tracked.resumes:
        return None
    parent = tracked.parent
    at_wandb = f" ({parent['wandb_id']})" if parent.get("wandb_id") else ""
    return f"branch of {Path(parent['path']).name}{at_wandb} at step {parent['step']}"


def _begin(
    wandb: Any, arguments: dict[str, Any], mode: str, reason: str, tracked: TrackedRun, report: Report
) -> Any:
    """A W&B run, online or offline, or None; where it is not what was asked for, one line says why."""
    if mode == "online":
        try:
            run = wandb.init(**arguments, mode="online", resume="allow" if tracked.resumes else None)
        except Exception as error:
            reason = f"online failed ({_short(error)})"
            # The failed attempt keeps the id occupied inside wandb's service; a new one has it free.
            _end_service()
        else:
            report(f"W&B: {run.url}")
            return run
    try:
        quiet(wandb)
        # No mode of resuming does anything offline: wandb begins another folder under the same id.
        run = wandb.init(**arguments, mode="offline")
    except Exception as error:
        report(f"W&B: no run could be started ({_short(error)}); metrics.jsonl has every row")
        return None
    if reason:
        report(f"W&B: offline, {reason}. Send it later: wandb sync {_to_sync(run)}")
    return run


def _to_sync(run: Any) -> str:
    """The offline folders of a run, in words for a shell; wandb sends them in the order of their time."""
    folder = Path(_directory(run))
    siblings = list(folder.parent.glob(f"offline-run-*-{run.id}*"))
    return str(shown(folder if len(siblings) < 2 else folder.parent / f"offline-run-*-{run.id}*"))


def _add_tags(run: Any, tags: list[str]) -> None:
    """Beside those of WANDB_TAGS, and those given to a run that goes on: wandb.init would replace them."""
    known = list(run.tags or ())
    wanted = list(dict.fromkeys([*known, *(tag[:_MOST_OF_A_TAG] for tag in tags)]))
    if wanted != known:
        run.tags = wanted


def _finish(run: Any, exit_code: int) -> None:
    """A run that was stopped to go on later shows as preempted, and not as failed."""
    if exit_code == EXIT_STOPPED:
        run.mark_preempting()
    run.finish(exit_code=exit_code)


def _describe(wandb: Any, run: Any, tracked: TrackedRun, tags: list[str]) -> None:
    """Tags, tokens as the x-axis, the digests in the summary, the manifest as a `dataset` artifact."""
    _add_tags(run, [*tags, *tracked.tags])
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    run.summary.update({f"data/{key}": value for key, value in tracked.digests.items()})
    folder = tracked.manifest_path.resolve().parent
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder.parent.name}-{folder.name}")[-120:]
    artifact = wandb.Artifact(name, type="dataset", metadata=dict(tracked.digests))
    # A manifest is never changed: no copy in the user's cache folder is needed.
    artifact.add_file(str(tracked.manifest_path), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def _end_service() -> None:
    """End wandb's helper process where no run of this process needs it any more."""
    if not _unfinished:
        end_helpers()


def _directory(run: Any) -> str:
    """The folder of this run's own W&B files."""
    return str(Path(run.dir).parent)


def _short(error: BaseException) -> str:
    """An error as a part of one line."""
    text = " ".join(str(error).split())
    if isinstance(error, StillRunning):
        return text
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
