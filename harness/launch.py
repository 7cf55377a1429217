"""From a checked configuration to a finished run: fresh, resumed or branched.

Everything that can be refused is refused before the run directory is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import start
from harness.build import Learner, assemble
from harness.checkpoints import retention
from harness.commandline.commands import shown
from harness.config import TrainConfig, get
from harness.config_record import to_dict
from harness.distributed import followers, rendezvous
from harness.distributed.meeting import Meeting
from harness.distributed.ranks import joined
from harness.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from harness.hardware.peak_memory import PeakMemory
from harness.preemption import TRACKER_SECONDS, StopRequest, listening
from harness.resuming import admission, auto_resume, growth, lineage, take_up
from harness.resuming.identity import identity_of, keep_origin, lineage_of, progress_of
from harness.run_files import failure, incidents, run_dir, summary
from harness.start import Plan
from harness.tracking import NoTracker, TrackedRun, Tracker, open_tracker
from harness.tracking.jsonl import cut_after
from harness.training import completion
from harness.training.run import Run
from harness.training.run_lines import describe, say_goodbye
from harness.training.trainer import data_chain, train

log = logging.getLogger("harness")


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `stopped`: a signal came first and the state is saved."""

    path: Path
    step: int
    val_loss: float | None
    stopped: bool = False


def launch(config: TrainConfig, path: Path, composed: dict[str, str] | None = None) -> Outcome:
    """Run `config` in the directory `path`; `composed` are the files for `.hydra/`, by name.

    `config.resume` is a checkpoint: of a run in `path` itself to go on, of another run to branch from it.
    Every rank calls it; the first one writes. Raises `UserError` before anything is written where the run
    may not start.
    """
    with rendezvous.meeting() as meeting, listening() as stop:
        return _launch(config, Path(os.path.abspath(path)), composed or {}, stop, meeting)


def _launch(
    config: TrainConfig, path: Path, composed: dict[str, str], stop: StopRequest, meeting: Meeting
) -> Outcome:
    ranks, again = meeting.ranks, meeting.earlier == path
    found = auto_resume.find(config, path, meeting)
    if ranks.leads:
        admission.check(config, path, found, again=again)
    begin = start.settle(config, path, found, meeting)
    if begin is None:
        assert found.saved is not None
        log.info("%s", completion.in_words(config, path, found.saved))
        val_loss = completion.with_evaluation(found.saved).trainer["val_loss"]
        return Outcome(path, found.saved.step, val_loss)
    meeting.keep(path)
    with (
        joined(ranks, begin.device.type),
        start.opened(config, path, begin, log.info, meeting=meeting) as plan,
    ):
        memory = PeakMemory(plan.device)
        plan.changes.extend(memory.notes)
        learner = start.learner_of(plan)  # its random state is restored once more before the first step
        if not ranks.leads:
            meeting.gather("ready")
            return _follow(plan, learner, memory, stop, meeting)
        path.mkdir(parents=True, exist_ok=True)
        with admission.locked(path):
            # Once more: another start may have come first.
            admission.check(config, path, found, again=again, held=True)
            meeting.gather("ready")
            return _execute(plan, learner, memory, composed, stop, meeting)


def record(config: TrainConfig) -> dict[str, Any]:
    """The configuration as config.yaml and trackers keep it: how a run was resumed is no part of it."""
    return to_dict(dataclasses.replace(config, resume=None, resume_accept=[]))


def _follow(plan: Plan, learner: Learner, memory: PeakMemory, stop: StopRequest, meeting: Meeting) -> Outcome:
    """Train as every other rank than the first: nothing is written here."""
    meeting.gather("places", run_dir.place(plan.device))
    began = meeting.agree("began", None)
    run = assemble(
        plan.config, plan.path, learner=learner, data=plan.data, loader=plan.loader, device=plan.device,
        saved=plan.saved, status=followers.NoStatus(), tracker=NoTracker(), identity=began["identity"],
        unevaluated=began["unevaluated"], memory=memory, ranks=meeting.ranks,
    )  # fmt: skip
    with _looping(run, plan, learner, stop):
        finished = train(run, stop)
    return Outcome(plan.path, run.progress.step, run.progress.val_loss, stopped=not finished)


@contextlib.contextmanager
def _looping(run: Run, plan: Plan, learner: Learner, stop: StopRequest) -> Iterator[None]:
    """Around the loop: the random state before its first step; what it has opened, closed."""
    if plan.saved is not None:  # last, so that nothing between here and the first step draws a number
        take_up.restore_rng(plan.saved, learner, plan.config, plan.device)
    with (
        contextlib.closing(run.log.metrics),
        contextlib.closing(run.profiler) if run.profiler else contextlib.nullcontext(),
        run.chain,
        stop.asking(),
        _saves_ended(run),  # inside: a signal does not cut off what is still written
    ):
        yield


@contextlib.contextmanager
def _saves_ended(run: Run) -> Iterator[None]:
    try:
        yield
    finally:
        run.saver.close()
        run.status.update(last_saved=run.saver.last_saved)


def _execute(
    plan: Plan,
    learner: Learner,
    memory: PeakMemory,
    composed: dict[str, str],
    stop: StopRequest,
    meeting: Meeting,
) -> Outcome:
    path, saved, manifest = plan.path, plan.saved, plan.data.train.manifest
    step = progress_of(saved).step
    identity = identity_of(path, plan.data, saved)
    segments = lineage_of(plan.config, path, plan.data, saved, plan.loader.state_dict(), identity["run_id"])
    same = plan.goes_on or run_dir.began_alike(path, record(plan.config), manifest.raw)
    before = run_dir.read_status(path) if same else {}
    unevaluated = completion.is_unevaluated(plan.config, path, saved)
    auto_resume.set_aside(plan.found)
    if saved is not None and plan.goes_on:
        auto_resume.mend_latest(saved)
    cut_after(path / "metrics.jsonl", step)
    incidents.cut_after(path, step)
    summary.cut_after(path, step)
    places = meeting.gather("places", run_dir.place(plan.device))
    run_dir.write_inputs(path, record(plan.config), composed, manifest.raw, step, places)
    growth.keep_manifests(path, segments)
    lineage.write(path, segments)
    status = run_dir.Status(
        path / "status.json", step=step, parent=identity["parent"],
        wandb_id=before.get("wandb_id"), wandb_last_step=before.get("wandb_last_step"),
    )  # fmt: skip
    stop.record = status.end
    ending = _Ending(status, meeting)
    meeting.record = ending.failed
    with (
        run_dir.log_file(path),
        _recorded(ending, stop),
        _tracker(plan, identity, ending, stop) as tracker,
    ):
        if meeting.earlier is not None:
            log.info("again     started by its launcher, after an earlier start of the same job")
        for line in plan.changes:
            log.info("%s", line)
        for gone in retention.clean_leftovers(path):
            log.info("removed   %s, which a writer that was killed had left", shown(gone))
        identity |= keep_origin(path, learner, saved, plan.initial)
        identity["lineage"] = lineage.to_record(segments)
        meeting.agree("began", {"identity": identity, "unevaluated": unevaluated})
        run = assemble(
            plan.config, path, learner=learner, data=plan.data, loader=plan.loader, device=plan.device,
            saved=saved, status=status, tracker=tracker, identity=identity, unevaluated=unevaluated,
            memory=memory, ranks=meeting.ranks,
        )  # fmt: skip
        describe(run, plan, places)
        if saved is not None and plan.goes_on:
            run.saver.remove_surplus(saved.trainer)
        # Once more: trackers and saves that go on after a failure may take their time.
        with _looping(run, plan, learner, stop), _failures_recorded(ending, stop):
            finished = train(run, stop)
            figures = summary.write(run, segments, plan.data.train, finished=finished)
            tracker.summarize(summary.for_tracker(run, figures, data_chain(run)))
        ending.exit_code = EXIT_DONE if finished else EXIT_STOPPED
        stop.ends(ending.exit_code)
        if not finished and stop.name == run.limit.reason:
            meeting.end(EXIT_STOPPED)  # or its launcher would start it again, with as much time
        say_goodbye(run, None if finished else stop.name)
    return Outcome(path, run.progress.step, run.progress.val_loss, stopped=not finished)


@dataclass
class _Ending:
    """How the run ends. `has_failed`: that is in status.json and train.log."""

    status: run_dir.Status
    meeting: Meeting
    exit_code: int = EXIT_FAILED
    has_failed: bool = False

    def failed(self, error: BaseException) -> None:
        """Record what ended the run, on this rank or on another one; what comes after that is dropped."""
        if self.has_failed:
            return
        self.has_failed = True
        if failure.exit_code(error) == EXIT_STOPPED:  # a signal to another rank, before the loop
            self.status.end(EXIT_STOPPED)
            return
        fields = failure.fields(error)
        self.status.update(state="failed", **fields)
        logging.getLogger("harness.file").error("%s", fields["traceback"])


@contextlib.contextmanager
def _recorded(ending: _Ending, stop: StopRequest) -> Iterator[None]:
    """Whatever happens, status.json says how the run ended, and train.log holds the traceback."""
    with _failures_recorded(ending, stop):
        yield
    ending.status.end(ending.exit_code)


@contextlib.contextmanager
def _failures_recorded(ending: _Ending, stop: StopRequest) -> Iterator[None]:
    """An error is recorded as what it really was, and raised as that."""
    try:
        yield
    except BaseException as error:
        if stop.interrupted:
            log.info("stopped by %s before a step was made; nothing had to be saved", stop.name)
            ending.status.end(EXIT_STOPPED)
            raise
        cause = ending.meeting.cause(error)
        ending.failed(cause)
        if cause is not error:
            raise cause from error
        raise


@contextlib.contextmanager
def _tracker(plan: Plan, identity: dict[str, Any], ending: _Ending, stop: StopRequest) -> Iterator[Tracker]:
    status = ending.status
    manifest, known = plan.data.train.manifest, status.fields["wandb_id"]
    tracked = TrackedRun(
        id=known or identity["run_id"][:8],
        directory=plan.path,
        config=record(plan.config),
        digests={"metadata_sha256": manifest.metadata_sha256, "content_sha256": manifest.content_sha256},
        manifest_path=manifest.path,
        resumes=plan.goes_on or known is not None,
        last_step=status.fields["wandb_last_step"],
        parent=identity["parent"],
        group=plan.config.sweep.name,
        tags=[f"{group}={get(plan.config, f'{group}.name')}" for group in ("data", "loader", "model")],
    )
    if plan.config.tracker.name == "wandb":  # first, or a kill in between would leave W&B a second run
        status.update(wandb_id=tracked.id)
    tracker = open_tracker(plan.config.tracker, tracked, log.info)
    if tracker.id is None:  # what W&B has of the run stays known for the next start
        status.update(wandb_id=known)
    else:
        status.update(wandb_last_step=tracker.last_step)
    try:
        yield tracker
    finally:
        # Who stops a run does not wait long, nor do the ranks of one that failed, which is said only then;
        # what is not sent by then is in the run's own files.
        code = EXIT_STOPPED if stop.interrupted else ending.exit_code
        is_short = stop.name is not None or (ending.has_failed and ending.meeting.ranks.several)
        tracker.finish(code, at_most=TRACKER_SECONDS if is_short else math.inf)
