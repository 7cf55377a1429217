"""`resume=PATH|auto` before Hydra composes: the run's own words are replayed, then the new ones.

A checkpoint that is the run's newest goes on in the run's directory. Any other one, or one resumed under
another `run.name` or with another order of the data, starts a branch: a new directory, the original stays as
it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from harness.checkpoints import checkpoint
from harness.commandline import overrides
from harness.commandline.commands import shown
from harness.commandline.overrides import CommandLine, key_of
from harness.config import PATH_KEYS
from harness.errors import UserError
from harness.resuming import auto_resume


def prepare(line: CommandLine) -> CommandLine:
    """The command line with a resumed run's overrides in it; unchanged where nothing is resumed."""
    word = overrides.value_of(line.overrides, "resume")
    if word in (None, "null", ""):
        return line
    assert word is not None
    if line.multirun:
        raise UserError(f"resume={word} goes on with one run and cannot be swept: drop -m")
    target = overrides.run_directory(line.overrides)
    if word == "auto":
        if target is None or "${" in str(target):
            raise UserError(
                "resume=auto needs to know which run: add a plain run.name=NAME or hydra.run.dir=FOLDER"
            )
        if not checkpoint.complete_steps(target):
            return CommandLine(line.flags, [*_without_resume(line.overrides), "resume=auto"])
        # Which checkpoint is whole shows when their files are read, and all have the same words.
        return _replayed(line, target, ["resume=auto"])
    path = auto_resume.find_named(word)
    run_dir, words = path.parent.parent, [f"resume={overrides.quote(str(path))}"]
    if target is None and checkpoint.is_newest(path) and not _reorders(line):
        words.append(f"hydra.run.dir={overrides.quote(str(run_dir))}")
    return _replayed(line, run_dir, words)


def _reorders(line: CommandLine) -> bool:
    """Whether a change of the data's order is accepted, which only a branch can make."""
    accepted = overrides.value_of(line.overrides, "resume_accept") or ""
    return not set(re.split(r"[\s,\[\]'\"]+", accepted)) <= {"", "data", "null"}


def _replayed(line: CommandLine, run_dir: Path, last: list[str]) -> CommandLine:
    """The words of the run in `run_dir`, the new ones, then `last`."""
    composed = _read_yaml(run_dir / ".hydra" / "hydra.yaml", dict)
    old = _own_words(run_dir / ".hydra" / "overrides.yaml")
    config = _read_yaml(run_dir / "config.yaml", dict)
    places = overrides.path_overrides({key: _value(config, key) for key in PATH_KEYS})
    words = overrides.replay(old, _without_resume(line.overrides), places)
    return CommandLine([*config_flags(line, composed), *line.flags], [*words, *last, "hydra.mode=RUN"])


def _own_words(path: Path) -> list[str]:
    """The overrides that the run was started with."""
    words = _read_yaml(path, list)
    for word in words:
        if not isinstance(word, str) or not ("=" in word or word.startswith("~")):
            raise UserError(f"{path} must hold overrides, KEY=VALUE, not {word!r}. {_mend(path)}")
    return words


def config_flags(line: CommandLine, composed: dict[str, Any]) -> list[str]:
    """The run's `--config-dir` and `--config-name`, where it had them and the new command names none."""
    flags = []
    if line.flag_value("--config-dir", "-cd") is None:
        for source in _get(composed, "hydra", "runtime", "config_sources") or []:
            if _get(source, "provider") == "command-line":
                flags += ["--config-dir", str(_get(source, "path"))]
    name = _get(composed, "hydra", "job", "config_name")
    if isinstance(name, str) and name != "train" and line.flag_value("--config-name", "-cn") is None:
        flags += ["--config-name", name]
    return flags


def _without_resume(words: list[str]) -> list[str]:
    return [word for word in words if key_of(word) != "resume"]


def _value(config: dict[str, Any], key: str) -> Any:
    return _get(config, *key.split("."))


def _get(node: Any, *keys: str) -> Any:
    """The value below nested keys, None where the path ends early."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _read_yaml(path: Path, kind: type) -> Any:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it holds the words of the run to resume. "
            f"A checkpoint is resumed from inside its run directory. {_mend(path)}"
        ) from None
    if not isinstance(value, kind):
        raise UserError(f"{path} must hold a {kind.__name__}, not {type(value).__name__}. {_mend(path)}")
    return value


def _mend(path: Path) -> str:
    """How a run goes on whose file `path` is lost: its settings are compared with the checkpoint's anyway."""
    if path.name == "config.yaml":
        return f"Each checkpoint has a copy of it: copy checkpoints/step-N/config.yaml to {shown(path)}"
    empty, what = (
        ("[]", "overrides") if path.name == "overrides.yaml" else ("{}", "--config-dir, if it had one")
    )
    return (
        f"Put the file back from a copy; or write {empty} into it, and say the run's own {what} again on the "
        "command line: checkpoints/step-N/config.yaml has every setting"
    )
