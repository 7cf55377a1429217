"""When to stop and to save, where one process's clock or signals decide: all ranks do it after the same step.

Alone a wish counts at once. Of several ranks each says before a step what it wishes, and hears what any of
them wished before the step before: that all-reduce runs on the hosts beside the step, and nobody waits for
it. So what is asked happens one step later than it would alone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.distributed.ranks import Ranks

if TYPE_CHECKING:
    from harness.preemption import StopRequest

_OTHER = 1000  # a reason to stop that is no signal


class Agreement:
    """`stopped`: the ranks have agreed to stop; it stays so. `late`: that a save by the clock is due; None
    alone, where the clock is asked itself.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._answer: Callable[[], list[int]] | None = None
        self._is_saved = False
        self.stopped = False
        self.late = False if ranks.several else None

    def stops(self, stop: StopRequest, *, late: bool) -> bool:
        """Say whether this rank asks to stop, and is `late` with a save; hear whether all stop now.

        A collective. Where another rank asked, `stop.name` says so.
        """
        if not self._ranks.several:
            self.stopped = stop.name is not None
            return self.stopped
        before = self._answer
        self._answer = self._ranks.largest_later([_code(stop.name), int(late)])
        if before is not None:
            self._hear(before(), stop)
        return self.stopped

    def saved(self) -> None:
        """A save is made; who wished for it before did not know."""
        if self._ranks.several:
            self.late, self._is_saved = False, True

    def end(self) -> None:
        """Take the last answer, so that none is under way when the ranks part."""
        if self._answer is not None:
            self._answer()
            self._answer = None

    def _hear(self, answer: list[int], stop: StopRequest) -> None:
        code, late = answer
        self.late = self.late or (late > 0 and not self._is_saved)
        self._is_saved = False
        if code:
            self.stopped = True
            stop.name = stop.name or _name(code)


def _code(name: str | None) -> int:
    if name is None:
        return 0
    return signal.Signals[name].value if name in signal.Signals.__members__ else _OTHER


def _name(code: int) -> str:
    return "trainer.max_minutes" if code == _OTHER else f"{signal.Signals(code).name} to another rank"
