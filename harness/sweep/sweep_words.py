"""What can be wrong with the words of a sweep before Hydra reads them: what shells do to lists of values."""

from __future__ import annotations

import itertools
import re

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from harness.commandline.commands import shell_word
from harness.commandline.overrides import key_of
from harness.errors import UserError

MOST_JOBS = 10_000
_NAME = re.compile(r"\w[\w.+-]{0,99}")


def check_words(words: list[str]) -> None:
    """Raise `UserError` for a word that is no `KEY=VALUES`, mostly the rest of one that a shell has split."""
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        after = words[index + 1] if index + 1 < len(words) else ""
        if word.rstrip().endswith(",") and "=" in word:
            joined = f"{word.rstrip()}{after.strip()}" if after and "=" not in after else word.rstrip(", ")
            raise UserError(
                f"{word!r} ends with a comma: a shell makes two words of values with a blank between them. "
                f"Write them without: {shell_word(joined)}"
            )
        key, equals, _ = word.partition("=")
        if key != key.strip() or (equals and not key.strip("+~")):
            raise UserError(
                f"{word!r} has a blank{_where(key)} where none may be: write KEY=VALUE1,VALUE2 without "
                "blanks around = and commas"
            )
        if not equals and not word.startswith("~"):
            neighbour = f" after {before!r}" if before else ""
            raise UserError(
                f"{word!r}{neighbour} is no KEY=VALUE: a shell splits a word at its blanks. Write "
                "KEY=VALUE1,VALUE2 without blanks, or in quotes: 'KEY=VALUE1,VALUE2'"
            )


def _where(key: str) -> str:
    return f" beside the key {key.strip()}" if key.strip("+~ ") else " or nothing before ="


def repeated(words: list[str]) -> list[str]:
    """A line for each key that is given twice with different values, as a shell makes of `seed={0,1}`."""
    lines, given = [], dict[str, str]()
    for word in words:
        key, _, value = word.partition("=")
        if given.setdefault(key, value) != value:
            both = f"{key}={given[key]},{value}"
            hint = f". To sweep over both: {both}" if re.fullmatch(r"[\w./=+-]+,[\w./+-]+", both) else ""
            lines.append(f"{key_of(word)} is given twice, {given[key]} and {value}: the last counts{hint}")
        given[key] = value
    return lines


def count_values(override: Override) -> int:
    """How many values a swept word stands for, at most `MOST_JOBS` + 1; `UserError` if none can be listed."""
    word = override.input_line
    if not override.is_discrete_sweep():
        raise UserError(
            f"{word} has no list of values, which Hydra's own sweeper needs. Name them, as in "
            f"{override.get_key_element()}=1e-4,3e-4,1e-3, or choose a sweeper that searches: "
            "hydra/sweeper=optuna"
        )
    try:
        count = sum(1 for _ in itertools.islice(override.sweep_iterator(), MOST_JOBS + 1))
    except (HydraException, ValueError) as error:  # a range whose step is 0
        raise UserError(f"{word}: {error}") from None
    if count == 0:
        raise UserError(f"{word} stands for no value at all, so the sweep would have no job")
    return count


def telling(words: list[str], swept: list[str]) -> list[str]:
    """Those of a job's words that tell it from the others; all of them where it is the only one."""
    return [word for word in words if key_of(word) in swept] or words


def label(words: list[str], swept: list[str]) -> str:
    """The same as a line, short also where there is one job."""
    return " ".join(telling(words, swept)) if swept else "the only job"


def check_name(name: str) -> None:
    """Raise `UserError` for a `sweep.name` that is no single, plain folder name."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"sweep.name={name!r} must be the name of one folder in multirun/: letters, digits and . _ + -, "
            "at most 100, the first a letter, a digit or _. Words with it are typed in a shell"
        )
