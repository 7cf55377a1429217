"""Whether it pays to tell the storage what is read next: only where reads wait for it."""

from __future__ import annotations

# A read from the page cache takes about 1 ns a token, one that waits for a local disk 50 and more.
_CALL_SECONDS = 300e-6
_TOKEN_SECONDS = 10e-9

_PROOF = 3  # slow reads in a row: a busy processor delays one now and then
_SHORT, _LONG = 64, 4096


class SlowStorage:
    """Watches how long reads take: slow ones ask for hints, during which nothing can be learnt.

    A hinted read is fast on slow storage too, so hints go on for 64 reads before some are tried without, and
    twice as long each time those were slow. Where the storage is fast again, they cost one such stretch.
    """

    def __init__(self) -> None:
        self._hinted_reads = 0
        self._stretch = _SHORT
        self._slow = 0
        self._fast = 0

    def wants_hints(self, seconds: float, tokens: int) -> bool:
        """Whether to give hints now, after a read of `tokens` that took `seconds`."""
        if self._hinted_reads:
            self._hinted_reads -= 1
            return self._hinted_reads > 0
        slow = seconds > _CALL_SECONDS + _TOKEN_SECONDS * tokens
        self._slow, self._fast = (self._slow + 1, 0) if slow else (0, self._fast + 1)
        if self._slow == _PROOF:
            self._hinted_reads, self._stretch, self._slow = self._stretch, min(2 * self._stretch, _LONG), 0
        elif self._fast == _SHORT:
            self._stretch = _SHORT
        return self._hinted_reads > 0
