"""W&B as a mirror of metrics.jsonl: online where it can be, offline where it cannot, never in the way.

What could stop or delay a run is decided here and not left to wandb: it would ask for a key on a
terminal, wait on a silent server, and return the previous run where one was not finished.
"""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import re
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.commands import shown
from harness.config_groups import WandbTrackerConfig
from harness.tracking import NoTracker, Tracker

Report = Callable[[str], None]

_TEARDOWN_SECONDS = 2.0

# Runs that this process has not finished: while there is one, wandb's helper process has to stay.
_unfinished: weakref.WeakSet[WandbTracker] = weakref.WeakSet()


class WandbTracker:
    """One W&B run, held as an object: nothing here uses `wandb.run` or `wandb.log`."""

    def __init__(self, run: Any, *, finish_timeout: float, report: Report) -> None:
        self.id: str | None = str(run.id)
        self._run, self._timeout, self._report = run, finish_timeout, report
        self._failed = False
        # A resumed online run already has the rows after the checkpoint, and takes no step twice.
        self._first_step = int(run.starting_step) if run.resumed else 0
        _unfinished.add(self)

    def log(self, row: dict[str, Any]) -> None:
        """Send one row at its step; the first failure ends the mirror with one line."""
        if self._failed or self not in _unfinished or row["step"] < self._first_step:
            return
        try:
            self._run.log(row, step=row["step"])
        except Exception as error:
            self._failed = True
            self._report(
                f"W&B: logging step {row['step']} failed ({_short(error)}); nothing more is sent, "
                "metrics.jsonl has every row"
            )

    def finish(self, exit_code: int) -> None:
        """Close the run, waiting at most `tracker.finish_timeout` seconds for its upload."""
        if self not in _unfinished:
            return
        _unfinished.discard(self)
        error = _within(self._timeout, lambda: self._run.finish(exit_code=exit_code))
        if isinstance(error, _StillRunning):
            self._report(
                f"W&B: the upload did not end within tracker.finish_timeout={self._timeout:g} s; "
                f"send the rest later: wandb sync {_directory(self._run)}"
            )
        elif error is not None and not self._failed:
            self._report(f"W&B: closing the run failed ({_short(error)})")
        _end_service()


def open_wandb(
    config: WandbTrackerConfig,
    *,
    run_dir: Path,
    run_config: dict[str, Any],
    name: str,
    digests: Mapping[str, str | None],
    manifest_path: Path,
    run_id: str | None,
    report: Report,
) -> Tracker:
    """A W&B run in `run_dir/wandb`, or a `NoTracker` and one line that says why."""
    # wandb's own crash reports share its server: where that is silent, they hold up the process's exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb

        _quiet(wandb)
        mode, key, reason = _mode(wandb, config)
    except Exception as error:
        report(
            f"W&B: wandb cannot be used ({_short(error)}); metrics.jsonl has every row. "
            "Mend it with: pip install wandb, or be without: tracker=none"
        )
        return NoTracker()
    if mode == "disabled":
        report(f"W&B: {reason}; metrics.jsonl has every row")
        return NoTracker()

    arguments: dict[str, Any] = {
        "dir": str(run_dir),
        "id": run_id or secrets.token_hex(4),
        "name": name,
        "project": config.project,
        "entity": config.entity,
        "tags": config.tags or None,
        "config": {**run_config, **{f"data/{key}": value for key, value in digests.items()}},
        "job_type": "train",
        # The default hands back a run that is still open, and with it the wrong configuration.
        "reinit": "create_new",
        "settings": _settings(wandb, config, key),
    }
    run = _begin(wandb, arguments, mode, reason, resumes=run_id is not None, report=report)
    if run is None:
        return NoTracker()
    tracker = WandbTracker(run, finish_timeout=config.finish_timeout, report=report)
    # Recording an artifact asks the server, which takes as long as it likes to answer.
    fault = _within(config.init_timeout, lambda: _describe(wandb, run, digests, manifest_path))
    if fault is not None:
        report(f"W&B: the data set was not recorded ({_short(fault)}); the run is logged without it")
    return tracker


def _begin(
    wandb: Any, arguments: dict[str, Any], mode: str, reason: str, *, resumes: bool, report: Report
) -> Any:
    """A W&B run, online or offline, or None; where it is not what was asked for, one line says why."""
    if mode == "online":
        try:
            # Offline there is nothing to resume: wandb keeps a second folder under the same id.
            run = wandb.init(**arguments, mode="online", resume="allow" if resumes else None)
        except Exception as error:
            reason = f"online failed ({_short(error)})"
            # The failed attempt keeps the id occupied inside wandb's service; a new one has it free.
            _end_service()
        else:
            report(f"W&B: {run.url}")
            return run
    try:
        _quiet(wandb)
        run = wandb.init(**arguments, mode="offline")
    except Exception as error:
        report(f"W&B: no run could be started ({_short(error)}); metrics.jsonl has every row")
        return None
    if reason:
        report(f"W&B: offline, {reason}. Send it later: wandb sync {shown(Path(_directory(run)))}")
    return run


def _mode(wandb: Any, config: WandbTrackerConfig) -> tuple[str, str | None, str]:
    """`online`, `offline` or `disabled`; the key where one was found; why it is not online, if not asked.

    `auto` asks the environment first (`WANDB_MODE`, or the `wandb offline` switch), then looks for a key.
    """
    settings = wandb.setup().settings
    mode, asked = config.mode, ""
    if mode == "auto":
        asked = os.environ.get("WANDB_MODE") or settings.mode
        mode = {"dryrun": "offline", "offline": "offline", "disabled": "disabled"}.get(asked, "online")
    if mode == "disabled":
        return mode, None, f"WANDB_MODE={asked}"
    if mode == "offline":
        return mode, None, ""
    host = os.environ.get("WANDB_BASE_URL") or settings.base_url
    key = os.environ.get("WANDB_API_KEY") or settings.api_key or _netrc_key(host)
    if key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return mode, key, ""
    return "offline", None, f"no key for {urlsplit(host).netloc} (WANDB_API_KEY or wandb login)"


def _netrc_key(url: str) -> str | None:
    """The key in the user's netrc file for the server at `url`."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return None
    hosts = [urlsplit(url).netloc]
    if hosts[0] == "api.forge.coreweave.com":
        hosts.append("api.wandb.ai")  # the same server's older name, under which keys were kept
    for host in hosts:
        entry = entries.authenticators(host)
        if entry and entry[2]:
            return entry[2]
    return None


def _settings(wandb: Any, config: WandbTrackerConfig, key: str | None) -> Any:
    wanted = {
        "silent": True,
        "console": "off",  # the run has train.log
        "allow_val_change": True,  # a resumed run may have another budget
        "init_timeout": config.init_timeout,
        "finish_timeout": config.finish_timeout,
        "api_key": key,  # given, so that wandb never looks for one itself and asks
        "base_url": os.environ.get("WANDB_BASE_URL"),
    }
    known = wandb.Settings.model_fields  # finish_timeout is newer than the oldest wandb we allow
    return wandb.Settings(**{k: v for k, v in wanted.items() if v is not None and k in known})


def _describe(wandb: Any, run: Any, digests: Mapping[str, str | None], manifest_path: Path) -> None:
    """Tokens as the x-axis, the digests in the summary, the manifest as an artifact of type `dataset`."""
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    run.summary.update({f"data/{key}": value for key, value in digests.items()})
    folder = manifest_path.resolve().parent
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder.parent.name}-{folder.name}")[-120:]
    artifact = wandb.Artifact(name, type="dataset", metadata=dict(digests))
    # A manifest is never changed: no copy in the user's cache folder is needed.
    artifact.add_file(str(manifest_path), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def _quiet(wandb: Any) -> None:
    """Nothing of wandb's on the terminal, nor, through the root logger, in train.log."""
    wandb.setup(settings=wandb.Settings(silent=True))
    logging.getLogger("wandb").propagate = False


def _end_service() -> None:
    """End wandb's helper process: the run's file is whole then, and a fault of it stays behind.

    Bounded as well, because the same wait at the interpreter's exit, which this takes over, is not.
    A helper that still tries to reach a silent server would outlive this process by hours, with our
    standard output open: it is ended. What it did not send is in the run's file, for `wandb sync`.
    """
    import wandb

    if _unfinished:
        return
    helpers = _helpers()
    _within(_TEARDOWN_SECONDS, wandb.teardown)
    deadline = time.monotonic() + _TEARDOWN_SECONDS
    while (left := helpers & _helpers()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _helpers() -> set[int]:
    """The process ids of this process's own wandb helpers; empty where there is no /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        state, parent = rest.split()[:2]
        if name.endswith("(wandb-core") and state != "Z" and int(parent) == os.getpid():
            found.add(int(stat.parent.name))
    return found


class _StillRunning(Exception):
    """What was started did not end in time, and goes on in its thread."""


def _within(seconds: float, action: Callable[[], object]) -> BaseException | None:
    """Run `action` for at most `seconds`: its error, `_StillRunning`, or None where it succeeded.

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
        return _StillRunning(f"no answer in {seconds:g} s")
    return errors[0] if errors else None


def _directory(run: Any) -> str:
    """The folder of this run's own W&B files."""
    return str(Path(run.dir).parent)


def _short(error: BaseException) -> str:
    """An error as a part of one line."""
    text = " ".join(str(error).split())
    if isinstance(error, _StillRunning):
        return text
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
