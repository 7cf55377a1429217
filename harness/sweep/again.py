"""The command that trains a run again, as a run of its own."""

from __future__ import annotations

import yaml

from harness.commandline.commands import command, override, shown
from harness.commandline.overrides import CommandLine, key_of
from harness.resuming.resume_words import config_flags
from harness.sweep.comparison import Entry
from harness.sweep.records import Record, load_yaml

# What belongs to the run that was, or to its sweep. A branch keeps the checkpoint that it began with.
_OF_THE_RUN = ("run.name", "resume_accept", "check")
_OF_THE_SWEEP = ("sweep", "hydra")
_BUDGETS = ("trainer.max_steps", "trainer.max_tokens")


def own_command(record: Record) -> str:
    """A command line with the run's own words, ready for a shell; empty where they are not known."""
    path = record.path / ".hydra"
    if not (path / "overrides.yaml").is_file():
        return ""
    left_out = {*_OF_THE_RUN, *([] if record.status.get("parent") else ["resume"])}
    words = [word for word in record.words if not _is_left_out(word, left_out)]
    named = [word for word in words if key_of(word) in _BUDGETS]
    if len(named) > 1:  # naming one unsets the other
        words = [word for word in words if word not in [f"{key}=null" for key in _BUDGETS]]
    return command("train", *_flags(record), *words)


def onward_command(entry: Entry) -> str:
    """A command line that goes on with a job, in a directory of its own, to twice its tokens."""
    tokens = int(entry.values["tokens"] or 0)
    words = [override("resume", str(shown(entry.path))), "run.name=NEW_NAME"]
    return command("train", *words, f"trainer.max_tokens={2 * tokens}")


def _is_left_out(word: str, keys: set[str]) -> bool:
    key = key_of(word)
    return key in keys or key.partition(".")[0] in _OF_THE_SWEEP


def _flags(record: Record) -> list[str]:
    """The run's own --config-dir and --config-name."""
    path = record.path / ".hydra" / "hydra.yaml"
    try:
        text = path.read_text()
        if "provider: command-line" not in text and "config_name: train\n" in text:
            return []  # as nearly always, and the file is a long one
        return config_flags(CommandLine([], []), load_yaml(path) or {})
    except (OSError, ValueError, yaml.YAMLError):
        return []
