"""A command that Hydra composes: its outcome becomes an exit code, its mistakes become our words.

torch, wandb and h5py are imported only once a configuration is known to be good, so `--help`, `--cfg job` and
a typo answer at once.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.commandline import helptext, hints, overrides
from harness.commandline.composition import config_dir, register
from harness.commandline.script_words import reader_may_leave
from harness.distributed import ranks_output, rendezvous
from harness.errors import EXIT_FAILED, EXIT_USER, UserError
from harness.run_files import failure


class _HeldStderr:
    """Keeps back what is printed until a job begins: what Hydra cannot compose is ours to explain."""

    def __init__(self) -> None:
        self.real, self.held = sys.stderr, io.StringIO()
        sys.stderr = self.held

    def release(self) -> None:
        if sys.stderr is self.held:
            sys.stderr = self.real
            print(self.held.getvalue(), end="", file=sys.stderr)

    @property
    def is_holding(self) -> bool:
        return sys.stderr is self.held

    def take(self) -> str:
        sys.stderr = self.real
        return self.held.getvalue()


def run_app(config_name: str, task: Callable[[DictConfig], Any], line: overrides.CommandLine) -> None:
    """Compose `config_name` from the command line and run `task` on it, once or once a sweep's job."""
    if helptext.wants_help(line):
        with reader_may_leave():
            print(helptext.help_text(config_dir(), config_name))
        return
    register()
    logging.raiseExceptions = False  # a closed terminal or pipe must not fill a run's stderr with tracebacks
    meeting = rendezvous.current()
    # Hydra would write into a finished run's .hydra before the run is refused.
    sys.argv = [sys.argv[0], *line.words(), "hydra.output_subdir=null"]
    if not meeting.ranks.leads:
        sys.argv.append("hydra.run.dir=.")  # rank 0 alone makes one
    stderr = _HeldStderr()

    def job(cfg: DictConfig) -> Any:
        stderr.release()
        return _guarded(task, cfg)

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(job)()
    except SystemExit as stop:
        if not (stderr.is_holding and stop.code == EXIT_FAILED):
            raise
        words = hints.reword(stderr.take(), config_dir(), config_name, line)
        if meeting.is_to_say(UserError(words)):
            print(words, file=sys.stderr)
        raise SystemExit(EXIT_USER) from None
    finally:
        stderr.release()


def _guarded(task: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    """Run a job; a user's mistake ends it with exit code 2 and no traceback, but never a whole sweep."""
    os.chdir(HydraConfig.get().runtime.cwd)  # hydra.job.chdir must not move what relative paths mean
    meeting = rendezvous.current()
    ranks_output.log_of(meeting.ranks)
    try:
        return task(cfg)
    except Exception as error:
        words = failure.in_words(error)
        if not meeting.is_to_say(error):
            raise SystemExit(failure.exit_code(error)) from None
        prefix = ranks_output.prefix(meeting.ranks)
        if words is None:
            print(end=prefix and f"{prefix}failed:\n", file=sys.stderr)
            raise
        raise _ending(f"{prefix}error: {words}", failure.exit_code(error)) from failure.cause(error)
    finally:
        remove_if_empty(Path(HydraConfig.get().runtime.output_dir))


def _ending(message: str, code: int) -> BaseException:
    """How a job ends in words: alone by its exit code; in a sweep so that the other jobs still run."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return CompactHydraException(message)
    print(message, file=sys.stderr)
    return SystemExit(code)


def remove_if_empty(folder: Path) -> None:
    """Take back the empty folder that Hydra makes before a job starts, and empty ones above it."""
    for path in (folder, *folder.parents):
        if path == Path.cwd() or not path.is_relative_to(Path.cwd()) or not _is_empty_dir(path):
            return
        path.rmdir()


def _is_empty_dir(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
