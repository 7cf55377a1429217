"""Which of two ways of reading is the faster one here, judged by what reads have cost."""

from __future__ import annotations

# A median of three ignores one slow read and follows a second one.
_KEPT = 3

# Seconds of a direct read below which starting threads cannot pay.
_SLOW = 2e-3

# The other way must be this much cheaper, so that noise does not flip back and forth.
_CLEARLY = 0.8

# Trying the other way again may take this share of the time.
_TRIAL_SHARE = 0.05


class ReadMode:
    """Direct or parallel, from observed seconds a row: direct at first, the other when it is clearly cheaper.

    Each way is known by the median of its last three reads. Parallel is tried once direct reads are slow, and
    the way that lost is tried again when the expected cost is at most a twentieth of the time since.
    """

    def __init__(self) -> None:
        self.parallel = False
        self._costs: dict[bool, tuple[float, ...]] = {False: (), True: ()}
        self._since_trial = 0.0

    def choose(self, rows: int) -> bool:
        """Whether the next read, of `rows` rows, goes in parallel."""
        current, other = self._cost(self.parallel), self._cost(not self.parallel)
        if current is None or (not self.parallel and current * rows < _SLOW):
            return self.parallel
        if other is None or other * rows <= self._since_trial * _TRIAL_SHARE:
            return not self.parallel
        return self.parallel

    def record(self, parallel: bool, rows: int, seconds: float) -> None:
        """A read of `rows` rows, at least one, that went `parallel` and took `seconds`."""
        self._costs[parallel] = (*self._costs[parallel], seconds / rows)[-_KEPT:]
        if parallel == self.parallel:
            self._since_trial += seconds
        else:
            self._since_trial = 0.0
        current, other = self._cost(self.parallel), self._cost(not self.parallel)
        if current is not None and other is not None and other < _CLEARLY * current:
            self.parallel = not self.parallel
            self._since_trial = 0.0

    def _cost(self, parallel: bool) -> float | None:
        costs = self._costs[parallel]
        return sorted(costs)[_KEPT // 2] if len(costs) == _KEPT else None
