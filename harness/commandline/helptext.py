"""`--help`: every group, option and key with its default and what it means, read from the YAML files.

Hydra's own help takes over a second to list groups and drops the comments.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness.commandline.commands import command_alone
from harness.commandline.overrides import CommandLine

_INTRODUCTION = {
    "train": (
        "Train a GPT on prepared tokens.",
        [
            (("train", "data=npy", "loader=sequential"), "start a run"),
            (("train", "resume=RUN_OR_CHECKPOINT"), "go on with one"),
            (("train", "-m", "loader.seq_len=64,128"), "a run for each"),
            (("train", "--cfg", "job", "--resolve"), "the configuration a run would use"),
        ],
    ),
    "prepare": (
        "Turn text into token shards.",
        [
            (("prepare_data", "corpus=text", "corpus.path=FOLDER"), "each file a document"),
            (("prepare_data", "corpus=jsonl", "corpus.path=FOLDER", "tokenizer=gpt2"), ""),
        ],
    ),
}


def wants_help(line: CommandLine) -> bool:
    return "--help" in line.flags or "-h" in line.flags


def help_text(conf: Path, config_name: str) -> str:
    """The whole help of `train.yaml` or `prepare.yaml`; a `(default)` marks what is taken without a word."""
    what, examples = _INTRODUCTION[config_name]
    shown = [(command_alone(*words), note) for words, note in examples]
    width = max(len(words) for words, _ in shown)
    main = (conf / f"{config_name}.yaml").read_text()
    parts = [what, "\n".join(f"  {words:<{width}}  {note}".rstrip() for words, note in shown)]
    parts.append("Groups: group=option, each with its keys and their defaults (group.key=value)")
    parts += [_group(conf / group, default) for group, default in _defaults(main)]
    parts.append("Keys beside the groups\n\n" + _body(main.partition("\nhydra:")[0]))
    parts.append("Own configuration files: --config-dir DIR. Shell completion and more: --hydra-help")
    return "\n\n".join(part for part in parts if part)


def _defaults(main: str) -> list[tuple[str, str]]:
    """The groups of a root file, in its order, with their default options."""
    return re.findall(r"^  - (\w+): (\w+)$", main, flags=re.MULTILINE)


def _group(folder: Path, default: str) -> str:
    options = sorted(folder.glob("*.yaml"), key=lambda path: (path.stem != default, path.stem))
    lines = []
    for path in options:
        mark = "  (default)" if path.stem == default else ""
        lines.append(f"  {folder.name}={path.stem}{mark}")
        if folder.name != "experiment":
            lines += [f"      {line}" for line in _body(path.read_text()).splitlines()]
    return "\n".join(lines)


def _body(text: str) -> str:
    """A YAML file's keys and comments without its defaults list and its `name`."""
    without_defaults = re.sub(r"^defaults:\n(?:  - .*\n)+", "", text, flags=re.MULTILINE)
    lines = [line for line in without_defaults.splitlines() if not re.match(r"name:|# @package", line)]
    return "\n".join(lines).strip("\n")
