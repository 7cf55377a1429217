"""Losses that jump: a robust z-score against the losses just before."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

WINDOW = 128  # losses that a loss is compared with
ENOUGH = 32  # fewer say too little
# MAD of a normal distribution times this is its standard deviation (1 / the normal quantile of 3/4).
_MAD_TO_SIGMA = 1.4826
# In nats. Losses that hardly differ (a set learnt by heart, a model that starts from its reference) would
# make any rise look immense.
_LEAST_SIGMA = 0.01


class Spike(NamedTuple):
    """A loss `zscore` robust standard deviations above the `median` of the losses before it."""

    zscore: float
    median: float


class SpikeDetector:
    """Judges each loss in nats by the last `WINDOW` ones: `(loss - median) / (1.4826 * MAD)`, upward only.

    The median absolute deviation is not moved by the spikes themselves, as a standard deviation would be.
    They enter the window too: a loss that stays high is the new normal after half a window. `threshold`
    None: off.
    """

    def __init__(self, threshold: float | None, before: Iterable[float] = ()) -> None:
        self.threshold = threshold
        self._losses: deque[float] = deque(before, maxlen=WINDOW)

    def judge(self, loss: float) -> Spike | None:
        """Take a finite loss into the window; a `Spike` where it stands out of the ones before."""
        spike = self._compare(loss)
        self._losses.append(loss)
        return spike

    def _compare(self, loss: float) -> Spike | None:
        if self.threshold is None or len(self._losses) < ENOUGH:
            return None
        median = statistics.median(self._losses)
        if loss <= median:
            return None
        mad = statistics.median(abs(value - median) for value in self._losses)
        zscore = (loss - median) / max(_MAD_TO_SIGMA * mad, _LEAST_SIGMA)
        return Spike(zscore, median) if zscore >= self.threshold else None
