"""The words of a command line before Hydra sees them.

Hydra's grammar stumbles over `~`, `=` and `,` in paths, knows nothing of resuming, and cannot see that one
budget replaces the other. What happens here is text to text: nothing is composed and no heavy package loaded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from harness.config import PATH_KEYS

_FLAGS_WITH_VALUE = {
    "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c",
    "--info", "-i", "--experimental-rerun",
}  # fmt: skip
_FLAGS_THAT_SHOW = {
    "--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc",
}  # fmt: skip
_NAMES = ("run.name", "sweep.name")
_QUOTED_KEYS = (*PATH_KEYS, "resume", "hydra.run.dir", "hydra.sweep.dir", *_NAMES)
# What makes a value one of Hydra's lists, choices or ranges, and what Hydra reads without quotes.
_GRAMMAR = re.compile(r"[()\[\]{}'\"]")
_BARE = re.compile(r"[\w/+.$%*@?|:\\ -]*", re.ASCII)
_BUDGETS = ("trainer.max_steps", "trainer.max_tokens")


@dataclass
class CommandLine:
    """`flags` are Hydra's own (`-m`, `--cfg job`); `overrides` are the `key=value` words, in order."""

    flags: list[str]
    overrides: list[str]

    @property
    def multirun(self) -> bool:
        return "-m" in self.flags or "--multirun" in self.flags

    @property
    def only_shows(self) -> bool:
        """Whether it asks for something to read, and nothing is run."""
        return any(word.partition("=")[0] in _FLAGS_THAT_SHOW for word in self.flags)

    def flag_value(self, *names: str) -> str | None:
        """The value of the last of the flags `names` (`--config-dir DIR` or `--config-dir=DIR`)."""
        value = None
        for index, word in enumerate(self.flags):
            name, equals, inline = word.partition("=")
            if name in names:
                value = inline if equals else self.flags[index + 1] if index + 1 < len(self.flags) else None
        return value

    def words(self) -> list[str]:
        return [*self.flags, *self.overrides]


def split(argv: list[str]) -> CommandLine:
    """Sort a command line's words into Hydra's flags and overrides."""
    line, rest = CommandLine([], []), iter(argv)
    for word in rest:
        if not word.startswith("-"):
            line.overrides.append(word)
            continue
        line.flags.append(word)
        if word in _FLAGS_WITH_VALUE and (value := next(rest, None)) is not None:
            line.flags.append(value)
    return line


def key_of(override: str) -> str:
    """The dotted key of `key=value`, `+key=value`, `++key=value` or `~key`."""
    return override.partition("=")[0].lstrip("+~")


def value_of(overrides: list[str], key: str) -> str | None:
    """The raw text of the last override of `key`, without Hydra's quotes; None where it is absent."""
    found = None
    for override in overrides:
        name, equals, text = override.partition("=")
        if equals and name.lstrip("+") == key:
            found = _unquote(text)
    return found


def quote(value: str, *, interpolations: bool = False) -> str:
    """A value that Hydra reads back as this very text; with `interpolations`, `${...}` in it stays one."""
    # A quote is escaped, and so are backslashes before a quote: one in the text or the closing one.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return "'" + (escaped if interpolations else escaped.replace("${", "\\${")) + "'"


def _unquote(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        inside = text[1:-1].replace("\\${", "${")
        return re.sub(rf"(\\+)({text[0]}|$)", lambda m: m[1][: len(m[1]) // 2] + m[2], inside)
    return text


def _is_plain_text(text: str) -> bool:
    return bool(text) and text not in ("null", "auto", "???") and text[0] not in "'\"[{"


def quote_paths(overrides: list[str], *, multirun: bool) -> list[str]:
    """Expand `~` in the values of path keys and quote them and names; a sweep's commas stay Hydra's."""
    result = []
    for override in overrides:
        name, equals, text = override.partition("=")
        if equals and name.lstrip("+") in _QUOTED_KEYS and _is_plain_text(text):
            text = os.path.expanduser(text) if name.lstrip("+") not in _NAMES else text
            text = _quote_each(text) if multirun else quote(text, interpolations=True)
        result.append(f"{name}{equals}{text}")
    return result


def _quote_each(text: str) -> str:
    """Quotes around those of a sweep's values that Hydra cannot read without them: `größe`, `a=b`."""
    if _GRAMMAR.search(text):
        return text
    return ",".join(value if _BARE.fullmatch(value) else quote(value) for value in text.split(","))


def one_budget(overrides: list[str]) -> list[str]:
    """Naming one budget unsets the other, so `trainer.max_tokens=1e6`'s steps need no `max_steps=null`."""
    named = [key for key in _BUDGETS if (value_of(overrides, key) or "null") != "null"]
    if len(named) != 1:
        return overrides
    other = _BUDGETS[1 - _BUDGETS.index(named[0])]
    if value_of(overrides, other) is not None:
        return overrides
    return [*overrides, f"{other}=null"]


def replay(old: list[str], new: list[str], paths: dict[str, str]) -> list[str]:
    """The overrides of a resumed run: its own, then the absolute paths it used, then the new ones.

    Dropped from the old: keys that the new ones set (the last wins, and `+a` twice is an error), the keys
    below a group that the new ones choose again, the other budget, the run's name, and how it was resumed.
    """
    new_keys = {key_of(override) for override in new}
    groups = {key for key in new_keys if "." not in key}
    dropped = new_keys | {"resume", "resume_accept", "run.name"}
    if new_keys & set(_BUDGETS):
        dropped |= set(_BUDGETS)
    if "data.root" in new_keys:
        dropped.add("data.path")

    def is_kept(key: str) -> bool:
        return key not in dropped and not (key.partition(".")[0] in groups and "." in key)

    kept = [o for o in old if is_kept(key_of(o)) and key_of(o) not in paths]
    # The root stays where it was even when another storage below it is chosen.
    places = [
        f"{key}={value}" for key, value in paths.items() if is_kept(key) or key == "data.root" not in new_keys
    ]
    return [*kept, *places, *new]


def path_overrides(paths: dict[str, str | list[str] | None]) -> dict[str, str]:
    """Absolute paths of a run's config.yaml as quoted override values."""
    result = {}
    for key, value in paths.items():
        if isinstance(value, str):
            result[key] = quote(value)
        elif isinstance(value, list):
            result[key] = "[" + ",".join(quote(item) for item in value) + "]"
    return result


def run_directory(overrides: list[str]) -> Path | None:
    """The run directory that the command line itself names, by `hydra.run.dir` or `run.name`."""
    directory = value_of(overrides, "hydra.run.dir")
    if directory is not None:
        return Path(os.path.abspath(os.path.expanduser(directory)))
    name = value_of(overrides, "run.name")
    return named_run(name).absolute() if name not in (None, "null") else None


def named_run(name: str | None) -> Path:
    return Path("runs") / str(name)
