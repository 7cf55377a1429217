"""`scripts/sweep.py`: a sweep for any scheduler: its plan as a file, a job of it by number, how far it is."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commandline.commands import command, shown
from harness.commandline.script_words import run_script
from harness.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER, UserError, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.sweep.plan import PlannedJob

_PLAN = "sweep.jsonl"


def main() -> None:
    """Exit codes of `run`: 0 done, 1 failed, 2 a wrong command or plan, 75 stopped or run elsewhere."""
    run_script(_main)


def _main() -> None:
    commands = {"plan": _plan, "run": _run, "status": _status}
    if len(sys.argv) < 2 or "-h" in sys.argv or "--help" in sys.argv:
        print(_help())
        raise SystemExit(EXIT_DONE if len(sys.argv) > 1 else EXIT_USER)
    name, words = sys.argv[1], sys.argv[2:]
    if name not in commands:
        raise UserError(f"there is no command {name}{did_you_mean(name, commands)}: plan, run or status")
    commands[name](words)


def _help() -> str:
    lines = [
        (command("sweep", "plan", "loader.seq_len=64,128", "seed=0,1"), f"write {_PLAN}, a line a job"),
        (command("sweep", "run", _PLAN, "--index", "0"), "bring a job of it to its end"),
        (command("sweep", "status", _PLAN), "how far the jobs are; also of multirun/NAME"),
    ]
    width = max(len(words) for words, _ in lines)
    return "\n".join(
        [
            "Run the jobs of a sweep one by one, under any scheduler.\n",
            *(f"  {words:<{width}}  {what}" for words, what in lines),
            "\nplan takes the words of train.py -m, and",
            f"  --output FILE  where to write it ({_PLAN})",
            "  --overwrite    also where FILE is the plan of another sweep",
            "run's exit codes: 0 done, now or before; 1 failed; 2 a mistake in the command or the plan;",
            "75 stopped after saving, or being trained by another process: start it again.",
        ]
    )


def _option(words: list[str], name: str, default: str | None = None) -> tuple[str | None, list[str]]:
    """The value of `NAME VALUE` or `NAME=VALUE` among the words, and the words without it."""
    rest, value = [], default
    remaining = iter(words)
    for word in remaining:
        if word == name:
            value = next(remaining, None)
            if value is None:
                raise UserError(f"{name} needs a value")
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def _plan(words: list[str]) -> None:
    from harness.commandline import cli
    from harness.sweep.grid import grid_of
    from harness.sweep.plan import launch_lines, write_plan

    output, words = _option(words, "--output", _PLAN)
    assert output is not None
    overwrite = "--overwrite" in words
    words = [word for word in words if word not in ("--overwrite", "-m", "--multirun")]
    line, _ = cli.prepared(["-m", *words])
    grid = grid_of(line)
    if grid is None:
        raise UserError(
            f"the sweeper of these words decides on its jobs as they end, so no plan can list them: "
            f"{command('train', '-m', *line.overrides)}"
        )
    if any(job.config.check for job in grid.jobs):
        raise UserError(
            f"check=true trains nothing, so there is nothing to plan: {command('train', '-m', *words)}"
        )
    path = Path(output)
    jobs = write_plan(path, grid, overwrite=overwrite)
    for note in grid.notes:
        print(note)
    print(f"{shown(path.absolute())}: {len(jobs)} jobs of the sweep {grid.name}, in {shown(grid.folder)}")
    for scheduler, text in launch_lines(path, len(jobs)).items():
        print(f"  {scheduler:<12}  {text}")
    print(f"and at last: {command('report', str(shown(grid.folder)))}")


def _run(words: list[str]) -> None:
    from harness.commandline import hydra_app
    from harness.commandline.overrides import CommandLine, quote
    from harness.sweep.plan import read_job

    index, words = _option(words, "--index")
    if len(words) != 1 or index is None or not index.isdecimal():
        raise UserError(
            f"run takes a plan and a job's number: {command('sweep', 'run', _PLAN, '--index', '0')}"
        )
    plan = Path(words[0]).absolute()
    job = read_job(plan, int(index))
    folder = job.enter()
    if str(Path.cwd()) != job.cwd:
        print(f"there is no folder {job.cwd} here: relative paths are meant from {Path.cwd()}")
    line = job.line
    # One run for Hydra, in the sweep's folder: the job's own directory follows from its identity.
    place = [f"hydra.run.dir={quote(str(folder))}", "hydra.mode=RUN"]
    hydra_app.run_app(
        "train",
        functools.partial(_task, job=job, plan=plan),
        CommandLine(line.flags, [*line.overrides, *place]),
    )


def _task(cfg: DictConfig, *, job: PlannedJob, plan: Path) -> None:
    from harness.commandline.composition import to_dataclass
    from harness.sweep import parent
    from harness.sweep.identity import identity
    from harness.sweep.states import DONE, FAILED

    sha256 = identity(to_dataclass(cfg))
    if sha256 != job.identity:
        raise UserError(
            f"{shown(plan)}, job {job.index} was planned as {job.identity}, and its words are {sha256} now: "
            "the defaults, an experiment's file or the harness have changed since, so it would be another "
            f"job. Make the plan again: {command('sweep', 'plan', 'WORDS')}"
        )
    state = parent.run_composed(cfg).state
    if state != DONE:
        raise SystemExit(EXIT_FAILED if state == FAILED else EXIT_STOPPED)


def _status(words: list[str]) -> None:
    from harness.sweep.board import Board
    from harness.sweep.plan import read_plan

    if len(words) != 1:
        raise UserError("status takes one folder or plan: " + command("sweep", "status", "multirun/NAME"))
    path = Path(words[0])
    if path.is_dir():
        board = Board(path.absolute(), None)
    else:
        jobs = read_plan(path)
        board = Board(jobs[0].enter(), {job.identity: job.label for job in jobs})
    print(board.table(board.look(anew=True)))
