"""One job of a sweep: skipped where it is done, gone on with where it is half done, else trained.

A job's mistakes are its own: they are written into its directory, and the other jobs run. Only a request to
stop is for the whole process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import math
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from harness.append_file import AppendFile
from harness.commandline.commands import shown
from harness.config import TrainConfig
from harness.errors import EXIT_USER, UserError
from harness.files import write_json
from harness.resuming import admission
from harness.run_files import failure, run_dir
from harness.sweep import changed
from harness.sweep.devices import device_for
from harness.sweep.identity import identity, place_for, written_identity
from harness.sweep.lock import claimed
from harness.sweep.states import DONE, FAILED, STOPPED, read_state
from harness.tracking.jsonl import loss_after

log = logging.getLogger("harness")

ELSEWHERE = "elsewhere"
REFUSED_FILE = "refused.jsonl"  # in a sweep's folder: time, words, error
# What a sweeper is told of a job without a finite loss: sweepers stumble over NaN and infinity.
FAILED_OBJECTIVE = 1e9
_KEPT = ("step", "parent", "wandb_id", "wandb_last_step")  # of status.json, where a try did not begin


@dataclass(frozen=True)
class Ended:
    """How a job ended: done, failed, stopped, or elsewhere (another process works on it).

    `objective` is the final validation loss in nats a token, always finite.
    """

    path: Path | None
    state: str
    objective: float = FAILED_OBJECTIVE
    exit_code: int = 0


def run_job(config: TrainConfig, folder: Path, words: list[str], composed: dict[str, str]) -> Ended:
    """Bring the job `config` of the sweep in `folder` to its end; `words` name its directory if it is new.

    Raises nothing but what stops the process.
    """
    sha256 = identity(config)
    with claimed(folder, sha256) as owner:
        if owner is not None:
            return _elsewhere(words, owner.pid, owner.host, owner.started)
        path = place_for(folder, sha256, words)
        if admission.is_locked(path):
            return _in_other_hands(path, words)
        before = _raw_status(path)
        try:
            return _run(config, folder, path, sha256, words, composed)
        except Exception as error:
            if admission.is_locked(path):  # since then, and the status is that process's to write
                return _in_other_hands(path, words)
            _record(path, error, recorded=_raw_status(path) != before and read_state(path).state == FAILED)
            return Ended(path, FAILED, exit_code=failure.exit_code(error))
        finally:
            release()  # not before: an error's traceback leads to the model


def _run(
    config: TrainConfig, folder: Path, path: Path, sha256: str, words: list[str], composed: dict[str, str]
) -> Ended:
    status = run_dir.read_status(path)
    if status.get("state") == DONE:
        if written_identity(path) is None:  # without it reports leave the job out
            _write_job_file(config, path, sha256, words)
        reason, error = changed.since_done(config, path)
        if error != status.get("error"):  # beside its state, so that what it has reached stays
            write_json(path / "status.json", status | {"error": error, "reason": reason})
        if error is not None:
            log.error("error: %s", error)
            return Ended(path, FAILED, exit_code=EXIT_USER)
        objective = objective_of(path)
        log.info("done already, validation loss %.4f: %s", objective, shown(path))
        return Ended(path, DONE, objective)
    path.mkdir(parents=True, exist_ok=True)
    _write_job_file(config, path, sha256, words)
    from harness.launch import launch

    with device_for(config.device, folder) as device:
        outcome = launch(dataclasses.replace(config, device=device, resume="auto"), path, composed)
    if outcome.stopped:
        return Ended(path, STOPPED)
    return Ended(path, DONE, _finite(outcome.val_loss))


def _write_job_file(config: TrainConfig, path: Path, sha256: str, words: list[str]) -> None:
    write_json(path / run_dir.JOB_FILE, {"identity": sha256, "name": config.sweep.name, "words": words})


def refuse(folder: Path, words: list[str], error: UserError) -> Ended:
    """Note that settings which a sweeper tried are none that could be trained; they have no directory."""
    log.error("error: %s: %s", " ".join(words), error)
    row = {"time": run_dir.now(), "words": words, "error": str(error)}
    with contextlib.closing(AppendFile(folder / REFUSED_FILE)) as file:
        file.append(json.dumps(row).encode() + b"\n")
    return Ended(None, FAILED, exit_code=EXIT_USER)


def release() -> None:
    """Leave nothing to the next job of this process: no memory of the device, no compiled graphs."""
    torch = sys.modules.get("torch")
    if torch is None:  # nothing was trained
        return
    gc.collect()
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def objective_of(path: Path) -> float:
    """What the done job in `path` reached."""
    step = run_dir.read_status(path).get("step")
    return _finite(loss_after(path / "metrics.jsonl", step, None) if type(step) is int else None)


def _finite(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else FAILED_OBJECTIVE


def _elsewhere(words: list[str], pid: object, host: object, started: object) -> Ended:
    who = "another process" if pid is None else f"process {pid} on {host} since {started}"
    log.info("%s is being trained by %s", " ".join(words) or "the only job", who)
    return Ended(None, ELSEWHERE)


def _in_other_hands(path: Path, words: list[str]) -> Ended:
    """The job is gone on with by hand, by `resume=`, which knows nothing of a sweep's locks."""
    status = run_dir.read_status(path)
    return _elsewhere(words, status.get("pid"), status.get("host"), status.get("started"))


def _raw_status(path: Path) -> bytes:
    try:
        return (path / "status.json").read_bytes()
    except OSError:
        return b""


def _record(path: Path, error: Exception, *, recorded: bool) -> None:
    """Say what ended the job: on the terminal, and where the run has not done so in its own files."""
    words = failure.in_words(error)
    log.error("error: %s", words if words is not None else "".join(traceback.format_exception(error)))
    if recorded:
        return
    path.mkdir(parents=True, exist_ok=True)
    old = run_dir.read_status(path)
    kept = {key: old[key] for key in _KEPT if key in old}  # the next try goes on with the same W&B run
    status = run_dir.Status(path / "status.json", **kept)
    status.update(state=FAILED, phase="end", **failure.fields(error))
    with contextlib.suppress(OSError), run_dir.log_file(path):
        logging.getLogger("harness.file").error("%s", "".join(traceback.format_exception(error)))
