"""The one exception a user can cause.

Every message follows one form: what is wrong, with both values; why it matters; the
override or command that mends it. The entry points turn a `UserError` into exit code 2
without a traceback; anything else is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# What the process says when it ends; DESIGN 4b.
EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_STOPPED, EXIT_AT_ONCE = 0, 1, 2, 75, 130


class UserError(ValueError):
    """Something the user can mend: a bad config, a damaged file, a missing set."""


class RunFailed(Exception):
    """A run that cannot go on, by no fault of its user or of ours: exit code 1, in words, no traceback.

    `reason` is a word of failure.py for status.json.
    """

    def __init__(self, message: str, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


class FailedAlike(RunFailed):
    """On another rank than the first: all ranks fail at the same place, and rank 0 says why."""


class PeerFailed(RunFailed):
    """The run ended because rank `rank` did. `fields`: what status.json would say of its error there
    (`failure.fields`); empty where it left no word.
    """

    def __init__(self, message: str, rank: int | None, fields: dict[str, Any]) -> None:
        super().__init__(message, reason=fields.get("reason", "lost"))
        self.rank, self.fields = rank, fields


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
