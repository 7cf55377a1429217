"""JSON that means one thing: duplicate keys, NaN and values of the wrong type are refused by name."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from typing import Any

from harness.errors import did_you_mean

# How alike an unknown key and an absent known one must be to be called a slip.
_SLIP = 0.8


def parse_json(text: str) -> Any:
    """Parse `text`; raise ValueError on duplicate keys, NaN, infinities and anything that is not JSON."""
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark, which is not JSON: save it as UTF-8 without one")
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice, with {seen[key]!r} and {value!r}")
            seen[key] = value
    return result


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal} is not a finite number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)


class Fields:
    """One JSON object with the dotted name of its place, for messages that name field and value.

    `fail(what)` must raise; it adds the file, the reason and the remedy.
    """

    def __init__(self, value: Any, name: str, fail: Callable[[str], Exception]) -> None:
        self.name = name
        self._fail = fail
        if not isinstance(value, dict):
            raise fail(f"{name or 'the whole file'} is {_shown(value)}, expected an object")
        self.values: dict[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def path(self, key: str) -> str:
        """The dotted name of `key`, such as `splits.train.total_tokens`."""
        return f"{self.name}.{key}" if self.name else key

    def error(self, key: str, what: str) -> Exception:
        """The exception for a value of `key` that has the right type and still cannot be."""
        return self._fail(f"{self.path(key)} is {_shown(self.values.get(key))}, {what}")

    def only(self, *known: str) -> None:
        """Refuse a key that is a slip of one in `known`; any other unknown key is let through.

        Foreign and later writers may add keys, and the digest covers them; but a misspelt optional key would
        otherwise switch its check off without a word.
        """
        for key in self.values.keys() - set(known):
            absent = [word for word in known if word not in self.values]
            if meant := difflib.get_close_matches(key, absent, n=1, cutoff=_SLIP):
                raise self._fail(f"unknown key {self.path(key)}; did you mean {meant[0]}?")

    def fields(self, key: str) -> Fields:
        """The object at `key`."""
        if key not in self.values:
            raise self._wrong(key, "an object")
        return Fields(self.values[key], self.path(key), self._fail)

    def items(self, key: str) -> list[Fields]:
        """The list of objects at `key`, each named `KEY[i]`."""
        values = self.values.get(key)
        if not isinstance(values, list):
            raise self._wrong(key, "a list")
        return [Fields(value, f"{self.path(key)}[{i}]", self._fail) for i, value in enumerate(values)]

    def integer(self, key: str, low: int) -> int:
        """The integer at `key`, at least `low`; true, false and 1.0 are no integers."""
        value = self.values.get(key)
        if type(value) is int and value >= low:
            return value
        raise self._wrong(key, f"an integer of at least {low}")

    def optional_integer(self, key: str, low: int) -> int | None:
        """As `integer`, or None where the key is absent or null."""
        return None if self.values.get(key) is None else self.integer(key, low)

    def text(self, key: str) -> str:
        """The string at `key`."""
        value = self.values.get(key)
        if isinstance(value, str):
            return value
        raise self._wrong(key, "a string")

    def sha256(self, key: str) -> str | None:
        """64 lower-case hexadecimal digits at `key`, or None where the key is absent or null."""
        if self.values.get(key) is None:
            return None
        value = self.text(key)
        if len(value) != 64 or value.strip("0123456789abcdef"):
            raise self._wrong(key, "a SHA-256 of 64 lower-case hexadecimal digits")
        return value

    def _wrong(self, key: str, expected: str) -> Exception:
        """The exception for a value that is missing or not what is expected."""
        if key not in self.values:
            return self._fail(f"{self.path(key)} is missing{did_you_mean(key, self.values)}")
        return self._fail(f"{self.path(key)} is {_shown(self.values[key])}, expected {expected}")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    shown = json.dumps(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
