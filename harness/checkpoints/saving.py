"""When a run is saved, that it was, and what happens where it could not be.

A checkpoint is written from a copy, by a thread, while training goes on; at most one at a time. The thread is
a daemon, so no disk that hangs keeps the process from ending; and `close` waits for what is being written as
long as that gets on, and then tells it to give up, because a process that ends while a thread is inside of
torch's C++ is aborted (exit code 134 after the right message).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness.checkpoints import checkpoint_writer, retention
from harness.checkpoints.checkpoint import checkpoints_dir, complete_steps
from harness.checkpoints.checkpoint_writer import Cancelled
from harness.checkpoints.host_copy import HostCopy, tensor_bytes
from harness.commandline.commands import command, shown
from harness.config import CheckpointConfig
from harness.distributed.meeting import STALL_S
from harness.errors import RunFailed, UserError
from harness.files import write_atomic

log = logging.getLogger("harness")

# After STALL_S without a block written a run that ends in an error gives up the save under way, and this is
GIVE_UP_S = 1.0  # for its thread to notice; the last fsync of a large file may take most of it
_BEAT_S = 1.0
_LOOK_S = 0.1
_SAY_S = 2.0  # of waiting, after which it is said


class Saver:
    """Writes the checkpoints of the run in `run_dir` as often as `config` says, and removes old ones.

    A save that fails for the operating system's reasons is said and tried again at the next interval, until
    `max_failures` in a row end the run with `RunFailed`; any other error is a fault of the harness and is
    raised by the next call. To be closed in a `finally`.

    `last_saved` is the newest step that is on disk. `beat` is called every now and then by the thread that
    waits here, as long as the writing gets on. `seconds` is what the slowest save so far took, from the call
    to the disk; None before there was one. `holding` is around all that must not be cut off; it is given what
    changes as long as that gets on.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        beat: Callable[[], object] = lambda: None,
        holding: Callable[..., AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.last_saved = max(complete_steps(run_dir), default=None)
        self.seconds: float | None = None
        self._beat, self._blocks, self._holding = beat, 0, holding
        self._run_dir, self._config = run_dir, config
        self._begun = time.monotonic()
        self._memory = HostCopy()
        self._idle = threading.Event()
        self._idle.set()
        self._cancelled = threading.Event()
        self._failures, self._failure, self._fault = 0, "", None  # type: int, str, BaseException | None
        self._said: set[str] = set()

    @property
    def waits(self) -> bool:
        """Whether a save would keep its caller waiting for a disk."""
        return not self._config.background or self.is_writing

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way beside the caller."""
        return not self._idle.is_set()

    @property
    def is_late(self) -> bool:
        """Whether the last save is as many minutes ago as saves are to be apart."""
        minutes = self._config.minutes
        return minutes is not None and time.monotonic() - self._begun >= 60 * minutes

    def due(self, step: int, late: bool | None = None) -> bool:
        """Whether step `step`, just done, is to be saved; raises where earlier saves end the run.

        `late` is what the ranks have agreed on of `is_late`; None: what it says now.
        """
        self._raise_if_hopeless()
        return (self.is_late if late is None else late) or step % self._config.interval == 0

    def save(self, parts: dict[str, Any], before: Callable[[], object] = lambda: None) -> None:
        """Save `parts`, the arguments of `checkpoint_writer.write`, when the save before is done.

        The tensors may be changed as soon as this returns. `before` is called first, where the writing
        happens: it makes durable what the checkpoint counts on, and its `OSError` is a failed save. A step
        that is saved already is left as it is.
        """
        self.wait()
        self._raise_if_hopeless()
        step = parts["trainer"]["step"]
        if self._is_saved(step):
            self._failure, self.last_saved = "", step
            return
        self._begun = time.monotonic()
        with self._held():
            self._begin(parts, before)

    def _held(self) -> AbstractContextManager[object]:
        return self._holding(lambda: self._blocks)

    def _begin(self, parts: dict[str, Any], before: Callable[[], object]) -> None:
        """Write here, or have a copy written by a thread."""
        if not self._config.background:
            self._write(parts, before)
        else:
            self._begin_thread(self._memory.take(parts), before)

    def _begin_thread(self, parts: dict[str, Any], before: Callable[[], object]) -> None:
        self._idle.clear()
        thread = threading.Thread(
            target=self._write_copy, args=(parts, before), name="checkpoint", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads: nothing is under way
            self._idle.set()
            raise

    def wait(self) -> None:
        """Return when no save is under way."""
        blocks = self._blocks
        while not self._idle.wait(_BEAT_S):
            if self._blocks != blocks:
                self._beat()
            blocks = self._blocks

    def finish(self) -> None:
        """Return when the step given to `save` last is on disk; raises `RunFailed` where it is not."""
        self.wait()
        self._raise_if_hopeless()
        if self._failure:
            raise RunFailed(f"{self._failure}. {self._advice()}", reason="disk")

    def close(self) -> None:
        """End the thread: what it writes is finished if it gets on, else given up. Raises nothing."""
        if not self._gets_done():
            self._cancelled.set()
            if not self._idle.wait(GIVE_UP_S):
                log.warning(
                    "a checkpoint was still being written to %s", shown(checkpoints_dir(self._run_dir))
                )

    def _gets_done(self) -> bool:
        """Wait for the save under way, unless it stands still; whether it is done."""
        begun = since = time.monotonic()
        blocks, said = self._blocks, False
        while not self._idle.wait(_LOOK_S):
            now = time.monotonic()
            if not said and now - begun >= _SAY_S:
                said = True
                log.info(
                    "waiting for the checkpoint that is being written to %s, as long as it gets on; Ctrl-C "
                    "twice leaves without it", shown(checkpoints_dir(self._run_dir)),
                )  # fmt: skip
            if self._blocks != blocks:
                blocks, since = self._blocks, now
            elif now - since >= self._patience():
                return False
        return True

    def _patience(self) -> float:
        return STALL_S

    def _is_saved(self, step: int) -> bool:
        with contextlib.suppress(OSError):  # what cannot be looked at cannot be written either, which is said
            return step in complete_steps(self._run_dir)
        return False

    def _raise_if_hopeless(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._failures >= self._config.max_failures:
            limit = f"checkpoint.max_failures={self._config.max_failures}"
            raise RunFailed(
                f"{self._failures} saves in a row failed ({limit}): {self._failure}. {self._advice()}",
                reason="disk",
            )

    def _write_copy(self, parts: dict[str, Any], before: Callable[[], object]) -> None:
        try:
            self._memory.wait()
            self._write(parts, before)
        except BaseException as error:  # raised where the loop is
            self._fault = error
        finally:
            self._idle.set()

    def _write(self, parts: dict[str, Any], before: Callable[[], object]) -> None:
        trainer = parts["trainer"]
        try:
            with self._held():
                before()
                path = checkpoint_writer.write(self._run_dir, **parts, between=self._between)
        except Cancelled:
            return
        except OSError as error:
            self._failed(self._in_words(trainer["step"], parts, error))
            return
        self._saved(path, trainer)

    def _saved(self, path: Path, trainer: dict[str, Any]) -> None:
        self._failures, self._failure = 0, ""
        self.last_saved = trainer["step"]
        self.seconds = max(self.seconds or 0.0, time.monotonic() - self._begun)
        log.info("saved %s", shown(path))
        self._tidy_up(path, trainer)

    def remove_surplus(self, trainer: dict[str, Any]) -> None:
        """Remove what is not kept, now that the step of `trainer` is on disk.

        To be called when a run goes on, too: where a kill came before the removal, there may be no room for
        the next save, and so no removal after it.
        """
        try:
            retention.remove_surplus(self._run_dir, self._config, trainer["step"], trainer["run_id"])
        except (OSError, UserError) as error:
            self._say_once(f"older checkpoints could not be removed: {error}")

    def _tidy_up(self, path: Path, trainer: dict[str, Any]) -> None:
        """What follows a save that is durable; where it fails, that is said once and tried at the next."""
        error = _name_latest(path)  # before anything goes: it must not name what is gone
        self.remove_surplus(trainer)
        if error is not None and (error := _name_latest(path)) is not None:  # there may be room now
            self._say_once(f"{path.with_name('latest')} does not name the newest checkpoint: {error}")

    def _between(self) -> None:
        """Before each block that is written."""
        if self._cancelled.is_set():
            raise Cancelled
        self._blocks += 1
        if not self._config.background:
            self._beat()

    def _in_words(self, step: int, parts: dict[str, Any], error: OSError) -> str:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(self._run_dir).free:,}"
        where = error.filename or checkpoints_dir(self._run_dir)
        return (
            f"step {step} could not be saved: {where}: {error.strerror or error} "
            f"({free} bytes free, at least {tensor_bytes(parts):,} needed)"
        )

    def _failed(self, failure: str) -> None:
        self._failures, self._failure = self._failures + 1, failure
        if self._failures < self._config.max_failures:
            log.warning(
                "%s. %s; training goes on and the next checkpoint is tried when it is due. "
                "Failure %d in a row, %d end the run (checkpoint.max_failures)",
                self._failure, self._older(), self._failures, self._config.max_failures,
            )  # fmt: skip

    def _older(self) -> str:
        steps = []
        with contextlib.suppress(OSError):
            steps = complete_steps(self._run_dir)
        return (
            f"Older checkpoints are intact, the newest is step {steps[-1]}"
            if steps
            else "No older one is to be seen"
        )

    def _advice(self) -> str:
        again = command("train", f"resume={shown(self._run_dir)}")
        return f"{self._older()}. Make room, or give the folder back its permission, then go on: {again}"

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s", message)


def _name_latest(path: Path) -> OSError | None:
    try:
        write_atomic(path.with_name("latest"), path.name + "\n")
    except OSError as error:
        return error
    return None
