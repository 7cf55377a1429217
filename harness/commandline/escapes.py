r"""Characters that a command line cannot hold, written as \n, \r, \t and \\ in values that understand it."""

from __future__ import annotations

import re

_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\"}
_WRITTEN = {character: escape for escape, character in _ESCAPES.items()}


def unescape(text: str) -> str:
    r"""The text that `text` writes; real newlines may stand beside `\n`. `ValueError` for another escape."""

    def character(match: re.Match[str]) -> str:
        if match[0] not in _ESCAPES:
            raise ValueError(f"{match[0]} is none of {' '.join(_ESCAPES)}")
        return _ESCAPES[match[0]]

    return re.sub(r"\\.?", character, text, flags=re.DOTALL)


def escape(text: str) -> str:
    """The one way on a single line to write `text` so that `unescape` gives it back."""
    return "".join(_WRITTEN.get(character, character) for character in text)
