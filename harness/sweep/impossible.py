"""Which jobs of a grid cannot be composed, and why: one message, so that a grid is mended in one go."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.commandline import hints
from harness.commandline.commands import shell_word
from harness.commandline.composition import config_dir
from harness.commandline.overrides import CommandLine, value_of
from harness.config import TrainConfig, get
from harness.errors import UserError
from harness.sweep.composing import NotComposed
from harness.sweep.sweep_words import label

_SHOWN = 10  # jobs


@dataclass(frozen=True)
class Failure:
    index: int
    words: list[str]
    error: NotComposed | UserError


def reworded(error: NotComposed, line: CommandLine) -> str:
    """What is wrong with words that Hydra cannot compose, in the words that single runs get."""
    return hints.reword(str(error), config_dir(), "train", line).removeprefix("error: ")


def reworded_shared(error: NotComposed, line: CommandLine) -> str:
    """The same of the words that all jobs share, which Hydra reads before any value is chosen."""
    text = reworded(error, line)
    key = _overridden(text)
    value = None if key is None else value_of(line.overrides, key)
    group = "" if key is None else key.partition(".")[0]
    if value is None or not re.search("[,(]", value_of(line.overrides, group) or ""):
        return text
    return (
        f"{key} is read before one of the swept {group}s is chosen, and the default one has no such key. If "
        f"all of them have it, write {shell_word(f'{key}=choice({value})')}"
    )


def report(
    failures: list[Failure], count: int, swept: list[str], possible: list[TrainConfig], line: CommandLine
) -> str:
    """Each cause with its jobs; `possible` are the configurations of the jobs that compose."""
    by_cause: dict[str, list[Failure]] = {}
    for failure in failures[:_SHOWN]:
        by_cause.setdefault(_cause(failure, possible, line), []).append(failure)
    lines = [f"{len(failures)} of the sweep's {count} jobs cannot be composed, so none is started:"]
    for cause, jobs in by_cause.items():
        lines += [f"  {text}" for text in cause.splitlines()]
        lines += [f"    job {job.index}: {label(job.words, swept)}" for job in jobs]
    if len(failures) > _SHOWN:
        lines.append(f"  and {len(failures) - _SHOWN} more jobs")
    return "\n".join(lines)


def _cause(failure: Failure, possible: list[TrainConfig], line: CommandLine) -> str:
    error = failure.error
    if isinstance(error, UserError):
        return re.sub(r"^\d+ problems? in the configuration:\n", "", str(error)).replace("  - ", "")
    text = reworded(error, CommandLine(line.flags, failure.words))
    key = _overridden(text)
    return text if key is None else _of_another_option(key, possible) or text


def _overridden(text: str) -> str | None:
    """The key that a composed configuration does not have."""
    found = re.search(r"Could not override '([^'=]+)'", text)
    return found[1] if found is not None else None


def _of_another_option(key: str, possible: list[TrainConfig]) -> str | None:
    """Where other jobs have the key: a group was swept together with what only some of its options know."""
    group = key.partition(".")[0]
    having = sorted({get(config, group).name for config in possible if get(config, key) is not None})
    if not having:
        return None
    return (
        f"{key} is a key of {group}={','.join(having)} alone, and a sweep gives it to every {group}. Write "
        "each combination into a small file, conf/experiment/NAME.yaml, and sweep over experiment=NAME1,NAME2"
    )
