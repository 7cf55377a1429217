"""Words of the small scripts: a path first, then `key=value` options of one dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from harness.errors import EXIT_AT_ONCE, EXIT_DONE, EXIT_USER, UserError, did_you_mean

T = TypeVar("T")
_EXIT_PIPE = 141  # 128 + SIGPIPE


def parse(argv: list[str], options: type[T], positional: str, what: str) -> tuple[Path, T]:
    """The path and the options; `--help` prints them with their defaults and exits.

    A field with `metadata={"word": "data.path"}` goes by that word.
    """
    fields = {field.metadata.get("word", field.name): field for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    if not argv or "-h" in argv or "--help" in argv:
        print(f"{what}\n\nusage: {Path(sys.argv[0]).name} {positional} [key=value ...]\n")
        for name, field in fields.items():
            print(f"  {name}={'null' if field.default is None else field.default}")
        raise SystemExit(0 if argv else 2)
    first, rest = argv[0], argv[1:]
    if first.partition("=")[0] in fields:
        raise UserError(f"give the {positional} first, then key=value options; got {first}")
    values = {}
    for word in rest:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"give one {positional}, then key=value options; got {first} and {word}")
        if key not in fields:
            raise UserError(f"there is no option {key}{did_you_mean(key, fields)}")
        name = fields[key].name
        values[name] = _value(key, text, typing.get_type_hints(options)[name])
    return Path(first), options(**values)


def _value(key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    if text == "null" and type(None) in kinds:
        return None
    if str in kinds:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) != (bool in kinds):
        value = None
    if int in kinds and isinstance(value, int):
        return value
    if float in kinds and isinstance(value, int | float):
        return float(value)
    if bool in kinds and isinstance(value, bool):
        return value
    wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
    raise UserError(f"{key}={text} must be {wanted}")


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit with 141, like every command, once whoever reads the output has closed it, as `| head` does."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        raise SystemExit(_EXIT_PIPE) from None


def words_or_help(text: str) -> list[str]:
    """The command line's words; where there are none, or they ask for help, prints `text` and exits."""
    words = sys.argv[1:]
    if words and not {"-h", "--help"} & {*words}:
        return words
    with reader_may_leave():
        print(as_started(text))
    raise SystemExit(EXIT_DONE if words else EXIT_USER)


def as_started(text: str) -> str:
    """A help text whose usage lines name the script, by the name of the command that was started."""
    script = re.search(r"^usage: (\w+\.py) ", text, flags=re.MULTILINE)
    return text if script is None else text.replace(script[1], Path(sys.argv[0]).name)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main; a user's mistake is one message and exit code 2, Ctrl-C is 130."""
    try:
        with reader_may_leave():
            main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USER) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_AT_ONCE) from None
