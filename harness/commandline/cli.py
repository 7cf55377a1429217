"""`train.py`: a command line becomes a run, or the jobs of a sweep.

Exit codes: 0 done, 1 failed, 2 the user's mistake (no traceback), 75 stopped after saving: run it again,
130 stopped at once.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.checkpoints import checkpoint
from harness.commandline import overrides
from harness.commandline.composition import composed_files, to_dataclass
from harness.commandline.helptext import wants_help
from harness.commandline.hydra_app import run_app
from harness.commandline.script_words import reader_may_leave
from harness.config import TrainConfig
from harness.distributed import elastic, ranks_output, rendezvous
from harness.distributed.meeting import Meeting
from harness.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER, UserError


def main() -> None:
    """`python train.py` and the console script `harness-train`; a rank of a run, where torchrun starts it."""
    try:
        with rendezvous.meeting() as meeting:
            if meeting.ended is not None:
                if meeting.ranks.leads:
                    print(
                        "not tried again: an earlier start of this job said above why it ended, and another "
                        f"would end like it (exit code {meeting.ended})",
                        file=sys.stderr,
                    )
                raise SystemExit(meeting.ended)
            ranks_output.only_of_rank_0(meeting.ranks)
            _main(meeting)
    except UserError as error:  # of the meeting itself
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USER) from None


def _main(meeting: Meeting) -> None:
    try:
        line, said_auto = prepared(sys.argv[1:])
        if line.multirun and not line.only_shows:
            from harness.sweep import parent

            parent.main(line)
            return
        if line.multirun and not wants_help(line):
            raise UserError(
                "-m runs a sweep, and the other flag only shows something: of a grid, check=true shows what "
                "would be trained; of one configuration, drop -m and give each key one value"
            )
    except UserError as error:
        if meeting.is_to_say(error):
            print(f"{ranks_output.prefix(meeting.ranks)}error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USER) from None
    except OSError as error:  # a run directory that may not be looked into
        if meeting.is_to_say(error):
            print(
                f"{ranks_output.prefix(meeting.ranks)}error: {error.filename}: {error.strerror}",
                file=sys.stderr,
            )
        raise SystemExit(EXIT_FAILED) from None
    run_app("train", functools.partial(_train, said_auto=said_auto), line)


def prepared(argv: list[str]) -> tuple[overrides.CommandLine, bool]:
    """The words as Hydra is to read them, with a resumed run's own; whether `resume=auto` was said."""
    from harness.resuming import resume_words

    line = overrides.split(argv)
    line.overrides = overrides.quote_paths(line.overrides, multirun=line.multirun)
    line = elastic.as_meant_now(line, rendezvous.current())
    said_auto = overrides.value_of(line.overrides, "resume") == "auto"
    line = resume_words.prepare(line)
    return overrides.CommandLine(line.flags, overrides.one_budget(line.overrides)), said_auto


def _train(cfg: DictConfig, *, said_auto: bool) -> float | None:
    """Run a composed configuration; `said_auto`: its run's own words were replayed if it has a checkpoint."""
    config = to_dataclass(cfg)
    _refuse_sweep(config)
    path = Path(rendezvous.current().agree("path", HydraConfig.get().runtime.output_dir))
    if config.resume == "auto" and not said_auto and checkpoint.complete_steps(path):
        raise UserError(
            f"resume=auto found checkpoints in {path}, but the run's own words were not replayed. Say both "
            "on the command line, in plain words: resume=auto run.name=NAME"
        )
    if config.check:
        from harness.planning.check import check_run

        with reader_may_leave():
            check_run(config, path)
        return None
    from harness.launch import launch

    outcome = launch(config, path, composed_files(cfg))
    if outcome.stopped:
        raise SystemExit(EXIT_STOPPED)
    return outcome.val_loss


def _refuse_sweep(config: TrainConfig) -> None:
    """Raise `UserError` where one run was started of an experiment that describes many."""
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:  # at once, as Hydra goes on to the next job after an exception
        print(
            "error: hydra.mode=MULTIRUN is no sweep yet: add -m, which also names its jobs", file=sys.stderr
        )
        raise SystemExit(EXIT_USER)
    given = {overrides.key_of(word) for word in settings.overrides.task}
    open_keys = [key for key in settings.sweeper.get("params") or {} if overrides.key_of(key) not in given]
    if open_keys and config.resume is None:
        experiment = settings.runtime.choices.get("experiment")
        raise UserError(
            f"experiment={experiment} describes a sweep over {', '.join(open_keys)}: add -m. For one run "
            f"give each a value: {' '.join(f'{key}=VALUE' for key in open_keys)}"
        )
