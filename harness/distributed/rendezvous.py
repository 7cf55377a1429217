"""Where the processes of one run meet: in the store of their launcher, or in rank 0's where that has none.

The keys of each start have a prefix of their own, as a launcher that starts a job again keeps its store, and
with it what the ranks of the start before had left there. torch is imported only where there is a launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness.distributed.meeting import JOB, Meeting, RanksMeeting
from harness.distributed.ranks import Ranks, declared
from harness.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

MEET_S = 300.0  # for every rank to come
_CAME, _MET = "harness/came/{}", "harness/met"

_ALONE = Meeting()
_current = _ALONE


def current() -> Meeting:
    """The meeting of this process."""
    return _current


@contextlib.contextmanager
def meeting(meet_s: float = MEET_S) -> Iterator[Meeting]:
    """The meeting of this process, as its launcher describes it; the one that there is, inside of another.

    An error that leaves the block is told to the other ranks. Raises `UserError` where they do not come.
    """
    global _current
    ranks = declared()
    if _current is not _ALONE or not (ranks.several or "TORCHELASTIC_RUN_ID" in os.environ):
        yield _current
        return
    # It says in C++, with a stack, what is said here in words: that another rank is gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    raw = _open_store(ranks, meet_s)
    store, job = _met(ranks, raw, meet_s)
    hosts = ranks.leads and not outlives_restarts()
    _current = met = RanksMeeting(ranks, raw, store, job, hosts=hosts)
    try:
        yield met
    except BaseException as error:
        met.leave(error)
        raise
    finally:
        met.close()
        _current = _ALONE


def outlives_restarts() -> bool:
    """Whether the store is the launcher's own, which it keeps when it starts a job again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(ranks: Ranks, meet_s: float) -> Store:
    from torch.distributed import DistError, TCPStore

    try:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=ranks.leads and not outlives_restarts(),
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=meet_s),
        )
    except (DistError, ValueError) as error:
        raise _unmet(ranks, meet_s, str(error).partition("\n")[0]) from None


def _met(ranks: Ranks, raw: Store, meet_s: float) -> tuple[Store, dict[str, Any]]:
    """The part of the store that is this start's, and what earlier starts of the job have left of it.

    Each rank draws a number, and takes a part that is given out for the very numbers of now. Rank 0 gives it
    out again where it had read what a rank of an earlier start had drawn.
    """
    from torch.distributed import PrefixStore

    mine, end = uuid.uuid4().hex, time.monotonic() + meet_s
    came = [_CAME.format(rank) for rank in range(ranks.size)]
    raw.set(came[ranks.rank], mine)
    job = json.loads(raw.get(JOB)) if raw.check([JOB]) else {}
    given: list[str] = []
    while time.monotonic() < end:
        if ranks.leads and raw.check(came):
            drawn = [text.decode() for text in raw.multi_get(came)]
            if drawn != given:
                raw.set(_MET, json.dumps([drawn, job]))
                given = drawn
        drawn, job = json.loads(raw.get(_MET)) if raw.check([_MET]) else ([], job)
        if len(drawn) == ranks.size and drawn[ranks.rank] == mine:
            store = PrefixStore(f"harness/{drawn[0]}", raw)
            store.set(f"met/{ranks.rank}", "yes")
            if not ranks.leads or store.check([f"met/{rank}" for rank in range(ranks.size)]):
                return store, job
        time.sleep(0.02)
    missing = [str(rank) for rank in range(ranks.size) if not raw.check([came[rank]])]
    raise _unmet(
        ranks, meet_s, f"no word of rank {', '.join(missing)}" if missing else "rank 0 did not answer"
    )


def _unmet(ranks: Ranks, meet_s: float, why: str) -> UserError:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return UserError(
        f"rank {ranks.rank} of {ranks.size} did not meet the others at {place} (MASTER_ADDR, MASTER_PORT) "
        f"within {meet_s:g} s: {why}. Look whether all {ranks.size} processes run, and whether that host and "
        "port can be reached from this one"
    )
