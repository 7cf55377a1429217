"""`train.py -m`: the process that composes a sweep, has Hydra launch its jobs, and says how they ended."""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from harness.commandline.commands import shown
from harness.commandline.composition import composed_files, config_dir, register, to_dataclass
from harness.commandline.overrides import CommandLine, key_of, value_of
from harness.commandline.script_words import reader_may_leave
from harness.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UserError
from harness.sweep import report, report_text, workers
from harness.sweep.board import Board
from harness.sweep.forwarding import forwarding
from harness.sweep.grid import grid_of, named, trains_here
from harness.sweep.job import Ended, refuse, run_job
from harness.sweep.states import STOPPED

log = logging.getLogger("harness")


def main(line: CommandLine) -> None:
    """Run the sweep of a command line; exits as `Board.exit_code` says, and with 75 where it was stopped.

    Raises `UserError` before the first job.
    """
    line, folder = named(line)
    grid = grid_of(line)
    for note in [] if grid is None else grid.notes:
        print(note, flush=True)
    if grid is None and value_of(line.overrides, "check") == "true":
        raise UserError("check=true cannot say which jobs this sweeper will try. Check one of them: drop -m")
    if grid is not None and grid.jobs[0].config.check:
        from harness.sweep.check_grid import check_grid

        with reader_may_leave():
            raise SystemExit(check_grid(grid))
    here = trains_here(line)
    _check_folder(folder)
    board = Board(folder, None if grid is None else grid.labels)
    ended_well = True
    try:
        with board.watching(), nullcontext() if here else forwarding(folder):
            _hydra(line)
    except SystemExit as stop:
        if stop.code == EXIT_STOPPED:  # who stops a sweep does not wait for a report
            print(board.table(board.look(anew=True)), flush=True)
            raise
        ended_well = stop.code in (None, EXIT_DONE)  # else Hydra, a sweeper or a launcher has failed
    lines = board.look(anew=True)  # once: another launch may go on while the report is made
    print(board.table(lines), flush=True)
    _report(folder)
    code = board.exit_code(lines)
    if not ended_well and code != EXIT_FAILED:  # the same command would fail again, whatever its jobs are
        code = EXIT_FAILED
    if code != EXIT_DONE:
        raise SystemExit(code)


def _check_folder(folder: Path) -> None:
    """Make the sweep's folder; `UserError` where it cannot be made or written to."""
    try:
        place = folder / ".locks"
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(
            f"{shown(folder)}, the sweep's folder, cannot be made or written to ({error.filename}: "
            f"{error.strerror}): no job could keep what it has trained. Remove what is in the way, or choose "
            "another folder: sweep.name=NAME, or hydra.sweep.dir=FOLDER"
        ) from None


def _report(folder: Path) -> None:
    """Compare what there is; that this fails must not hide how the jobs ended."""
    try:
        print(f"\n{report_text.text(report.write_report(folder))}", flush=True)
    except Exception as error:
        log.error("no report: %s: %s", type(error).__name__, error)


def _hydra(line: CommandLine) -> None:
    register()
    sys.argv = [sys.argv[0], *line.words(), "hydra.output_subdir=null"]
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(task)()


def task(cfg: DictConfig) -> float:
    """One job, in the process that a launcher chose; what it returns is a sweeper's objective."""
    if workers.is_one():
        return workers.in_turn(functools.partial(run_composed, cfg)).objective
    ended = run_composed(cfg)
    if ended.state == STOPPED:
        raise SystemExit(EXIT_STOPPED)
    return ended.objective


def run_composed(cfg: DictConfig) -> Ended:
    """Bring the job that Hydra has composed, for the sweep in its output directory, to its end."""
    os.chdir(HydraConfig.get().runtime.cwd)
    register()  # a launcher's process has the composed config, and no resolver of ours
    folder, words = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    try:
        config = to_dataclass(cfg)
    except UserError as error:  # of a sweeper that looks for its own jobs: a grid was checked before
        return refuse(folder, words, error)
    own = [word for word in words if key_of(word) in config.sweep.keys]
    return run_job(config, folder, own, composed_files(cfg))
