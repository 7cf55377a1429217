"""`trainer.max_minutes`: a run stops by itself while there is time left to save it.

The minutes are those of this process, from the first line of the command to its end, so imports, preparation
and building the model count: that is what a scheduler counts, and a run that goes on has them anew. The clock
is monotonic; setting the date moves nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from harness.preemption import STARTED

BYTES_PER_S = 50e6  # of a disk that nothing was saved to yet; most are faster
END_S = 6.0  # for trackers and the process's end, after the save
_STEPS = 20  # of the last ones the longest counts: on CUDA one of several waits for the device


class TimeLimit:
    """Says when one more step, a save and the end would no longer fit into `minutes`; never where it is None.

    `save_bytes` is the size of a checkpoint; `late`: steps that are still made once this says to stop. A
    process makes one step whatever the time: a command that is run again and again gets on even where all of
    its minutes go into getting ready.
    """

    def __init__(
        self,
        minutes: float | None,
        save_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        late: int = 0,
    ) -> None:
        self.minutes, self._clock, self._late = minutes, clock, late
        self._save_bytes, self._steps = save_bytes, deque[float](maxlen=_STEPS)
        self.reason = ""

    def stepped(self, seconds: float) -> None:
        """A step took `seconds`, the wait for its batch included."""
        self._steps.append(seconds)

    def is_near(self, save_s: float | None, *, saving: bool) -> bool:
        """Whether to stop now; then `reason` says why.

        `save_s` is what a save took, None where none is known; `saving`: one is under way and comes first.
        """
        if self.minutes is None or not self._steps:
            return False
        if save_s is None:
            save_s = self._save_bytes / BYTES_PER_S
        kept = save_s * (2 if saving else 1) + max(self._steps) * (1 + self._late) + END_S
        spent = self._clock() - STARTED
        if spent + kept < 60 * self.minutes:
            return False
        self.reason = (
            f"trainer.max_minutes={self.minutes:g} ({spent / 60:.2f} minutes of this process are over, "
            f"{kept:.1f} s are kept to save and end)"
        )
        return True
