"""A sweep as a file, `sweep.jsonl`: a line a job, for schedulers that start each job by its number.

A job that is run from its line is the very job that `train.py -m` would run, in the same directory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commandline.commands import command, shown
from harness.commandline.overrides import CommandLine
from harness.errors import UserError
from harness.files import write_atomic
from harness.sweep.grid import Grid

_KINDS: dict[str, type] = {
    "index": int, "jobs": int, "identity": str, "label": str, "name": str, "folder": str, "cwd": str,
    "flags": list, "words": list,
}  # fmt: skip


@dataclass(frozen=True)
class PlannedJob:
    """A line of a plan. `jobs`: how many it has; `index`: which this is, from 0; `label`: its own words.

    `flags` are Hydra's, such as `--config-dir`. `words` and a relative `folder` (of the sweep) are meant from
    the working directory `cwd` that the plan was made in.
    """

    index: int
    jobs: int
    identity: str
    label: str
    name: str
    folder: str
    cwd: str
    flags: list[str]
    words: list[str]

    @property
    def line(self) -> CommandLine:
        return CommandLine(list(self.flags), list(self.words))

    def enter(self) -> Path:
        """Go to the folder that relative paths are meant from; the sweep's folder.

        Where there is no such folder, as in a container, they are meant from the working directory.
        """
        if os.path.isdir(self.cwd):
            os.chdir(self.cwd)
        return Path(self.folder).absolute()


def write_plan(path: Path, grid: Grid, *, overwrite: bool = False) -> list[PlannedJob]:
    """Write the plan of a sweep, each job once, atomically.

    `UserError` where `path` holds something else than an older plan of this sweep, unless `overwrite`.
    """
    here = Path.cwd()
    folder = grid.folder.relative_to(here) if grid.folder.is_relative_to(here) else grid.folder
    labels, place = grid.labels, (grid.name, str(folder), str(here), _flags(grid.line))
    jobs = [
        PlannedJob(index, len(labels), job.sha256, labels[job.sha256], *place, job.words)
        for index, job in enumerate(grid.unique)
    ]
    if not overwrite:
        _check_replaced(path, jobs[0])
    write_atomic(path, "".join(json.dumps(dataclasses.asdict(job)) + "\n" for job in jobs))
    return jobs


def _flags(line: CommandLine) -> list[str]:
    """Where the configuration is read from; any other flag is not for a job."""
    flags = []
    for long, short in (("--config-dir", "-cd"), ("--config-name", "-cn"), ("--config-path", "-cp")):
        value = line.flag_value(long, short)
        flags += [] if value is None else [long, value]
    return flags


def _check_replaced(path: Path, new: PlannedJob) -> None:
    if not path.exists():
        return
    try:
        old = read_plan(path)[0]
        same = (old.name, old.folder, old.cwd) == (new.name, new.folder, new.cwd)
        what = f"the plan of the sweep {old.name} in {Path(old.cwd, old.folder)}"
    except UserError:
        same, what = False, "no plan that can be read"
    if not same:
        raise UserError(
            f"{shown(path)} holds {what}, not of {new.name} in {Path(new.cwd, new.folder)}: jobs that are "
            "started from it would be others. Write this plan elsewhere, --output FILE, or say --overwrite"
        )


def read_plan(path: Path) -> list[PlannedJob]:
    """All jobs of a plan; `UserError` with the line where it is damaged."""
    return [_parsed(path, number, line) for number, line in enumerate(_lines(path), 1)]


def read_job(path: Path, index: int) -> PlannedJob:
    """Job `index` of a plan; the other lines are not looked at."""
    lines = _lines(path)
    if not 0 <= index < len(lines):
        raise UserError(
            f"--index {index} is not in {shown(path)}: it has {len(lines)} jobs, 0 to {len(lines) - 1}"
        )
    job = _parsed(path, index + 1, lines[index])
    if (job.index, job.jobs) != (index, len(lines)):
        raise UserError(
            f"{shown(path)}, line {index + 1} is job {job.index} of {job.jobs}, but the plan has "
            f"{len(lines)} lines: some were lost or moved. {_again()}"
        )
    return job


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{shown(path)} is no plan ({error}). {_again()}") from None
    except OSError as error:
        raise UserError(f"the plan {shown(path)} cannot be read: {error.strerror}. {_again()}") from None
    if not lines:
        raise UserError(f"the plan {shown(path)} is empty. {_again()}")
    return lines


def _again() -> str:
    return f"Make it again: {command('sweep', 'plan', 'WORDS')}"


def _parsed(path: Path, number: int, line: str) -> PlannedJob:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{shown(path)}, line {number} is damaged ({error}). {_again()}") from None
    if not isinstance(value, dict) or set(value) != set(_KINDS):
        raise UserError(
            f"{shown(path)}, line {number} must be an object with the keys {', '.join(_KINDS)}. {_again()}"
        )
    for key, kind in _KINDS.items():
        items = value[key] if type(value[key]) is list else []
        if type(value[key]) is not kind or not all(isinstance(item, str) for item in items):
            raise UserError(
                f"{shown(path)}, line {number}: {key}={value[key]!r} has the wrong type. {_again()}"
            )
    return PlannedJob(**value)


def launch_lines(path: Path, count: int) -> dict[str, str]:
    """How schedulers start every job of a plan: their names and what to paste."""
    run = command("sweep", "run", str(shown(path)), "--index")
    # exec, for a container's first process is who gets the signal, and a shell would keep it to itself
    indexed = json.dumps(["sh", "-c", f"exec {run} $JOB_COMPLETION_INDEX"])
    return {
        "SLURM": f"sbatch --array=0-{count - 1} --wrap {shlex.quote(f'{run} $SLURM_ARRAY_TASK_ID')}",
        "Kubernetes": f"completionMode: Indexed, completions: {count}, command: {indexed}",
        "GNU parallel": f"seq 0 {count - 1} | parallel -j 2 {run} {{}}",
    }
