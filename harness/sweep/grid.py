"""The whole grid of `train.py -m WORDS`, composed and checked before its first job runs.

The jobs are those of Hydra's basic sweeper, in its order. What cannot be composed, or breaks a rule of the
configuration, is named with its key and its job while nothing has been trained yet.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from harness.commandline.commands import command_alone, override, torchrun_command
from harness.commandline.overrides import CommandLine, key_of, value_of
from harness.config import TrainConfig, tokens_per_step, total_steps
from harness.config_record import flatten, to_dict
from harness.errors import UserError
from harness.sweep import composing, impossible, sweep_words
from harness.sweep.identity import IGNORED, identity

_SHOWN = 10  # duplicates
_MANY = 200  # jobs, which take ten seconds to compose
_LONGEST_NAME = 100  # characters
_INSTEAD = {"data.root": ", or sweep over data.path", "model.name": ", or sweep over model"}


@dataclass(frozen=True)
class Job:
    """One job: `index` from 0 in Hydra's order, all its words, its configuration and its identity."""

    index: int
    words: list[str]
    config: TrainConfig
    sha256: str


@dataclass(frozen=True)
class Grid:
    """The jobs of the sweep `name` in `folder`, all that Hydra will make of the command line `line`.

    Two jobs of one identity are one, which is trained once. `swept`: the keys that have lists of values.
    `notes`: lines that its user has to know.
    """

    name: str
    folder: Path
    jobs: list[Job]
    swept: list[str]
    line: CommandLine
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> dict[str, str]:
        """What tells each job from the others, by its identity."""
        return {job.sha256: sweep_words.label(job.words, self.swept) for job in self.unique}

    @property
    def unique(self) -> list[Job]:
        """The jobs without those that an earlier one already is."""
        first: dict[str, Job] = {}
        for job in self.jobs:
            first.setdefault(job.sha256, job)
        return list(first.values())


def named(line: CommandLine) -> tuple[CommandLine, Path]:
    """The command line with `sweep.name` and `sweep.keys` in it, and its folder, whatever the sweeper.

    The name is what the words or an experiment's file say, else the experiment, else the swept keys: the same
    for a grid that has grown.
    """
    line, sweep = _opened(line)
    return line, sweep.folder


def trains_here(line: CommandLine) -> bool:
    """Whether the command line's jobs are trained by this process, not by those that a launcher starts.

    Raises `UserError` where they would go to a queue that this machine does not have.
    """
    sweep = _opened(line)[1]
    if sweep.lacks_slurm:
        raise UserError(
            "hydra/launcher=submitit_slurm, but there is no srun on this machine, so no SLURM to take the "
            "jobs. Start the sweep where srun is, or train here: hydra/launcher=submitit_local"
        )
    return sweep.is_launched_here


def grid_of(line: CommandLine) -> Grid | None:
    """Every job of the command line; None where another sweeper than Hydra's basic one decides what to run.

    Raises `UserError` for whatever would stop a job from being composed, with all such jobs in one message.
    """
    line, sweep = _opened(line)
    if not sweep.is_basic:
        return None
    overrides = sweep.overrides()
    _check_size(overrides)
    keys = _swept(overrides)
    ((*words,),) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    jobs = _composed(sweep, words, keys, line)
    notes = [*sweep_words.repeated(line.overrides), *_duplicates(jobs, keys), *_uneven(jobs, keys)]
    assert sweep.name is not None
    return Grid(sweep.name, sweep.folder, jobs, keys, line, notes)


def _opened(line: CommandLine) -> tuple[CommandLine, composing.SweepConfig]:
    """The named command line, and what all of its jobs share."""
    _refuse_several_processes(line)
    sweep_words.check_words(line.overrides)
    try:
        sweep = composing.open_sweep(line)
        overrides = sweep.overrides()
    except composing.NotComposed as error:
        raise UserError(impossible.reworded_shared(error, line)) from None
    _check_keys(overrides)
    _check_subdir(sweep.subdir)
    name = _name(sweep, overrides) if sweep.name is None else sweep.name
    sweep_words.check_name(name)
    words = [] if sweep.name is not None else [f"sweep.name={name}"]
    if value_of(line.overrides, "sweep.keys") is None:
        words.append(override("sweep.keys", list(dict.fromkeys([*sweep.params, *_swept(overrides)]))))
    sweep.say(name, words)
    return CommandLine(line.flags, [*line.overrides, *words]), sweep


def _name(sweep: composing.SweepConfig, overrides: list[Override]) -> str:
    """The experiment, else the last parts of the swept keys."""
    keys = _swept(overrides)
    if sweep.experiment is not None and "experiment" not in keys:
        return sweep.experiment.replace("/", "-")
    return "-".join(sorted(re.split(r"[./@]", key)[-1] for key in keys))[:_LONGEST_NAME] or "sweep"


def _refuse_several_processes(line: CommandLine) -> None:
    """A sweep starts processes by itself; torchrun makes one run of several."""
    count = os.environ.get("WORLD_SIZE") or "1"
    if count == "1":
        return
    one = [f"{key_of(word)}=VALUE" if _has_values(word) else word for word in line.overrides]
    raise UserError(
        f"a sweep was started as one of several processes (WORLD_SIZE={count}): each would launch all of its "
        f"jobs. Start it alone, without torchrun, and each job trains on one device:\n"
        f"  {command_alone('train', *line.words())}\n"
        "To train its jobs on several devices each, start them one after the other:\n"
        f"  {torchrun_command(os.environ.get('LOCAL_WORLD_SIZE', count), *one)}"
    )


def _has_values(word: str) -> bool:
    try:
        return any(one.is_sweep_override() for one in OverridesParser.create().parse_overrides([word]))
    except HydraException:  # which says so once it is started alone
        return False


def _check_keys(overrides: list[Override]) -> None:
    """Raise `UserError` for a swept key of which no result follows, or that goes on with a run."""
    for word in _last(overrides).values():
        key = key_of(word.get_key_element())
        if word.is_sweep_override() and key in ("resume", "resume_accept"):
            raise UserError(_no_resume(str(word.input_line)))
        if word.is_sweep_override() and _is_ignored(key):
            raise UserError(
                f"{word.input_line}: nothing that is trained follows from {key}, so its values would make "
                f"one and the same job. Give it one value{_INSTEAD.get(key, '')}"
            )


def _check_subdir(subdir: str) -> None:
    """Raise `UserError` where jobs would lie where neither another launch nor the report looks for them."""
    if os.path.normpath(subdir) != ".":
        raise UserError(
            f"hydra.sweep.subdir={subdir} cannot be chosen: it is . so that every launch finds the jobs of "
            "the others, each in a folder of its own by what it is. Leave it out; hydra.sweep.dir=FOLDER "
            "moves the whole sweep"
        )


def _swept(overrides: list[Override]) -> list[str]:
    """The keys that have several values, whatever the sweeper."""
    return [key_of(key) for key, word in _last(overrides).items() if word.is_sweep_override()]


def _last(overrides: list[Override]) -> dict[str, Override]:
    """The words that count, by key with its `+`: of two of one key the last."""
    return {word.get_key_element(): word for word in overrides}


def _is_ignored(key: str) -> bool:
    """Whether no result follows from the key, or from any key of the group."""
    below = [name for name, _ in flatten(to_dict(TrainConfig())) if name.startswith(f"{key}.")]
    return all(name in IGNORED for name in below or [key])


def _check_size(overrides: list[Override]) -> None:
    """Raise `UserError` where the jobs cannot be listed, or are too many to compose."""
    counts = [sweep_words.count_values(w) for w in _last(overrides).values() if w.is_sweep_override()]
    if math.prod(counts) > sweep_words.MOST_JOBS:
        raise UserError(
            f"the sweep over {', '.join(_swept(overrides))} has more than {sweep_words.MOST_JOBS:,} jobs, "
            "and each is composed before the first runs. Make several sweeps of it, or let a sweeper choose: "
            "hydra/sweeper=optuna"
        )


def _no_resume(word: str) -> str:
    return (
        f"{word} goes on with one run and cannot be part of a sweep: the sweep's command, given again, goes "
        "on with its jobs by itself. Leave it out"
    )


def _composed(
    sweep: composing.SweepConfig, words: list[list[str]], swept: list[str], line: CommandLine
) -> list[Job]:
    if len(words) >= _MANY:
        print(f"composing the sweep's {len(words):,} jobs, before the first of them begins", flush=True)
    jobs, failures = [], []
    for index, job_words in enumerate(words):
        try:
            config = sweep.job(index, job_words)
        except (composing.NotComposed, UserError) as error:
            failures.append(impossible.Failure(index, job_words, error))
            continue
        if config.resume is not None:
            raise UserError(_no_resume(f"resume={config.resume}"))
        jobs.append(Job(index, job_words, config, identity(config)))
    if failures:
        raise UserError(impossible.report(failures, len(words), swept, [job.config for job in jobs], line))
    return jobs


def _duplicates(jobs: list[Job], keys: list[str]) -> list[str]:
    """A line for each job that is an earlier one in other words."""
    first: dict[str, Job] = {}
    lines = []
    for job in jobs:
        known = first.setdefault(job.sha256, job)
        if known is not job:
            label = sweep_words.label(job.words, keys)
            lines.append(f"job {job.index} is job {known.index} again and is not trained twice: {label}")
    more = [f"and {len(lines) - _SHOWN} more such jobs"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + more


def _uneven(jobs: list[Job], keys: list[str]) -> list[str]:
    """That the jobs train on different numbers of tokens, where nobody sweeps over the budget."""
    steps = [tokens_per_step(job.config) for job in jobs]
    tokens = [total_steps(job.config) * step for job, step in zip(jobs, steps, strict=True)]
    if max(tokens) - min(tokens) < max(steps) or {"trainer.max_steps", "trainer.max_tokens"} & {*keys}:
        return []
    return [
        f"the jobs train on {min(tokens):,} to {max(tokens):,} tokens, as their steps differ in size, and "
        "are compared after the fewest. To give each as many, write "
        f"trainer.max_tokens={max(tokens)} and no trainer.max_steps"
    ]
