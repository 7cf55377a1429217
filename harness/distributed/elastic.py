"""A job that its launcher starts again, after a crash or with other hosts: the words of its first start, as
they are meant now."""

from __future__ import annotations

import os
import re

from harness.checkpoints import checkpoint
from harness.commandline import overrides
from harness.commandline.overrides import CommandLine, key_of
from harness.distributed.meeting import Meeting
from harness.distributed.rendezvous import outlives_restarts
from harness.errors import UserError

_PLACED = ("hydra.run.dir", "resume", "resume_accept")


def as_meant_now(line: CommandLine, meeting: Meeting) -> CommandLine:
    """The command line of this start: at a later one of the same job it goes on where the job was.

    What it was resumed from counts until the job has a checkpoint of its own. Raises `UserError` where a
    later start could not know the directory of the first.
    """
    word = overrides.value_of(line.overrides, "resume")
    if line.multirun:
        return line
    if not outlives_restarts() and (os.environ.get("TORCHELASTIC_MAX_RESTARTS") or "0") != "0":
        if word != "auto":
            raise UserError(
                f"--max-restarts={os.environ['TORCHELASTIC_MAX_RESTARTS']}: this launcher's store does not "
                "outlive a restart (TORCHELASTIC_USE_AGENT_STORE is not True), so a job started again "
                "could not know that it is the same. Say it in words that hold for each start: resume=auto "
                "run.name=NAME"
            )
        return line
    path = meeting.earlier
    if path is None:
        return line
    place = f"hydra.run.dir={overrides.quote(str(path))}"
    if not checkpoint.complete_steps(path) and word not in (None, "", "null", "auto"):
        return CommandLine(line.flags, [*_without(line.overrides, "hydra.run.dir"), place])
    # Another order of the data was accepted for a branch, which this directory is by now.
    accepted = re.split(r"[\s,\[\]'\"]+", overrides.value_of(line.overrides, "resume_accept") or "")
    kept = ["resume_accept=[data]"] if "data" in accepted else []
    return CommandLine(line.flags, [*_without(line.overrides, *_PLACED), *kept, "resume=auto", place])


def _without(words: list[str], *keys: str) -> list[str]:
    return [word for word in words if key_of(word) not in keys]
