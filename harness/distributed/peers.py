"""Which rank failed, and why, as the others hear of it: they only see that a connection is gone.

A rank that fails leaves its cause in the ranks' store before it ends. One that sees a collective fail says
so there too, and looks for a cause; where there is none, the rank that says nothing is the one that was
killed, or hangs. The store is the launcher's; without one it is rank 0's, and gone with it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import FailedAlike, PeerFailed
from harness.run_files import failure

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 5.0  # for the others to see and say it too
_POLL_S = 0.05
_FAILED, _LOST, _PLACE = "failed/{}", "lost/{}", "place/{}"
_FIRST = "first"
# How torch says, as a plain RuntimeError, that a collective came to nothing.
_COLLECTIVE = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out waiting")


class Peers:
    """What this rank tells the others of its end, and learns of theirs, through the ranks' `store`."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._known: PeerFailed | None = None
        self._set(_PLACE, {"host": socket.gethostname(), "pid": os.getpid()})

    def first(self) -> PeerFailed | None:
        """The first rank that left a cause, from where it does not matter; None where all get on."""
        rank = self.first_rank()
        if rank is None:
            return None
        self._known = self._failure_of(rank)
        return self._known

    def failed(self, rank: int) -> bool:
        """Whether that rank left a cause."""
        return self._has(_FAILED, rank)

    def first_rank(self) -> int | None:
        return int(self._store.get(_FIRST)) if self._store.check([_FIRST]) else None

    def explain(self, error: BaseException) -> PeerFailed | None:
        """Tell the others of `error`; where it is only what another rank's end looks like from here, that."""
        if isinstance(error, PeerFailed):
            return None
        try:
            if isinstance(error, FailedAlike) and self._has(_FAILED, 0):
                return self._failure_of(0)
            if not is_of_a_collective(error):
                self._set(_FAILED, failure.fields(error))
                self._store.compare_set(_FIRST, "", str(self._rank))
                return None
            self._set(_LOST, {})
            return self._find(error)
        except Exception as gone:  # the store is no more; nothing may hide the error itself
            if not is_of_a_collective(error):
                return None
            if self._known is not None:  # heard before it went
                return self._known
            return PeerFailed(
                f"{_seen(error)}; and the ranks' store, which rank 0 holds unless torchrun does, does not "
                f"answer ({type(gone).__name__}): rank 0 ended, or its host. Its own output says why",
                0, {},
            )  # fmt: skip

    def _find(self, error: BaseException) -> PeerFailed:
        others = [rank for rank in range(self._size) if rank != self._rank]
        deadline = time.monotonic() + GRACE_S
        while True:
            silent = [rank for rank in others if not self._has(_LOST, rank)]
            for rank in silent:  # after that look: a cause is left before a connection closes
                if self._has(_FAILED, rank):
                    return self._failure_of(rank)
            if len(silent) == 1 or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        gone = [rank for rank in silent if self._is_gone(rank)] or silent
        if not gone:
            return PeerFailed(f"{_seen(error)}, and no rank says that it failed: the network?", None, {})
        names = ", ".join(map(self._name, gone))
        return PeerFailed(
            f"{names} left no word: killed (for memory?), cut off, or hanging. {_seen(error)}",
            gone[0] if len(gone) == 1 else None, {},
        )  # fmt: skip

    def _failure_of(self, rank: int) -> PeerFailed:
        fields = self._get(_FAILED, rank)
        return PeerFailed(f"{self._name(rank)} failed: {fields['error']}", rank, fields)

    def _name(self, rank: int) -> str:
        place = self._get(_PLACE, rank) if self._has(_PLACE, rank) else {"pid": "?", "host": "?"}
        return f"rank {rank} (pid {place['pid']} on {place['host']})"

    def _is_gone(self, rank: int) -> bool:
        """Whether its process is known to be no more; of another host nothing is known."""
        if not self._has(_PLACE, rank):
            return False
        place = self._get(_PLACE, rank)
        process = Path("/proc") / str(place["pid"])
        if place["host"] != socket.gethostname() or not process.parent.joinpath("self").exists():
            return False
        try:
            return (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (OSError, IndexError):
            return True

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._store.set(key.format(self._rank), json.dumps(value))

    def _has(self, key: str, rank: int) -> bool:
        return self._store.check([key.format(rank)])

    def _get(self, key: str, rank: int) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._store.get(key.format(rank)))
        return value


def is_of_a_collective(error: BaseException) -> bool:
    """Whether it says only that what the ranks do together came to nothing."""
    import torch.distributed as dist

    if failure.reason_of(error) == "out_of_memory":  # of this rank: NCCL takes memory, too
        return False
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(words in str(error) for words in _COLLECTIVE)


def _seen(error: BaseException) -> str:
    """What torch says in its first sentence, without the place in its sources."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    sentence = re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0]
    return f"This rank saw: {sentence}"
