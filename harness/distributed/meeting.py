"""What the ranks of a run tell each other without a collective: by way of a store, which rendezvous.py opens.

So it works before there is a process group, however long one of them takes, and in a thread. What does not
come is waited for by looking, and that ends with the failure of any rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.distributed.peers import Peers
from harness.distributed.ranks import ALONE, TIMEOUT_S, Ranks
from harness.errors import EXIT_STOPPED, EXIT_USER, FailedAlike, PeerFailed
from harness.preemption import Stopped
from harness.run_files import failure

if TYPE_CHECKING:
    from torch.distributed import Store

LEAVE_S = 3.0  # for the others to hear of a failure, before its rank ends and the launcher ends them
GRACE_S = 8.0  # for a main thread to end once another rank has failed, and what it holds is done
HOLD_S = TIMEOUT_S  # for all that a rank holds then,
STALL_S = 60.0  # and for it to move at all
_LEADER_S = 1.0  # for rank 0 to say what this rank would, and maybe more of it
_LOOK_S = 0.2
JOB = "harness/job"  # what the store keeps of the job, whichever start of it


class Meeting:
    """The ranks of one start of a job; this class is that of one process, which has nobody to wait for.

    `earlier`: the directory in which an earlier start of this job ran. `ended`: the exit code of a start that
    its launcher takes for a crash, and that would end like that again. `failed`: the first failure of a rank,
    once it is heard of here. `record` is called with it where the main thread does not end soon, maybe more
    than once. Values travel as JSON.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.failed: PeerFailed | None = None
        self.earlier: Path | None = None
        self.ended: int | None = None
        self.record: Callable[[PeerFailed], object] = _nothing

    def gather(self, name: str, value: Any = None) -> list[Any]:
        """The value of every rank, by rank, on every rank. Raises `PeerFailed` where one fails meanwhile.

        The n-th call with a `name` on one rank meets the n-th of the others.
        """
        return [value]

    def agree(self, name: str, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def on_host(self, name: str) -> list[int]:
        """The ranks of this process's host, itself among them, ascending; every rank calls it."""
        return [self.ranks.rank]

    @contextlib.contextmanager
    def one_by_host(self, name: str) -> Iterator[bool]:
        """True for the first rank of each host, whose others wait until it is done, however long that is."""
        yield True

    @contextlib.contextmanager
    def holding(self, moves: Callable[[], object] | None = None) -> Iterator[None]:
        """What is done inside is not cut off by the failure of another rank; for any thread.

        What rank 0 does there the other ranks wait for before they end, for a launcher ends all others soon
        after the first. `moves` gives another value as long as that gets on: what stands still for `STALL_S`
        is waited for no more.
        """
        yield

    def keep(self, path: Path) -> None:
        """Remember for later starts of this job that it runs in `path`."""

    def end(self, code: int) -> None:
        """Remember for later starts of this job that they have nothing to do but to exit with `code`."""

    def is_to_say(self, error: BaseException) -> bool:
        """Whether this process is the one to say `error`: each failure is said once, where it came first.

        The others are told of it here, too.
        """
        return True

    def cause(self, error: BaseException) -> BaseException:
        """What really ended this process, where `error` is only what the end of another rank looks like.

        The others are told of it here. From here on they wait for what rank 0 has to say.
        """
        return error


@dataclass(eq=False)
class _Hold:
    """Something that is held; see `Meeting.holding`."""

    moves: Callable[[], object] | None
    _seen: object = None
    _since: float = field(default_factory=time.monotonic)

    def gets_on(self) -> bool:
        """Whether it has moved of late, as far as can be told."""
        if self.moves is not None and (seen := self.moves()) != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return self.moves is None or time.monotonic() - self._since < STALL_S


class RanksMeeting(Meeting):
    """The same where a launcher started this process, maybe with others.

    `raw` is the store of the job, `store` that of this start in it; `job` is what earlier starts have left.
    `hosts`: the store is this process's own, and goes with it.
    """

    def __init__(self, ranks: Ranks, raw: Store, store: Store, job: dict[str, Any], *, hosts: bool) -> None:
        super().__init__(ranks)
        self._raw, self.store, self._job, self._hosts = raw, store, job, hosts
        self.peers = Peers(store, ranks.rank, ranks.size)
        self.earlier = Path(job["path"]) if "path" in job else None
        self.ended = job.get("ended")
        self._counts: dict[str, int] = {}
        self._holds: list[_Hold] = []
        self._ends, self._lock = False, threading.RLock()
        self._beats, self._beat, self._beat_at = 0, b"", time.monotonic()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def gather(self, name: str, value: Any = None) -> list[Any]:
        keys = self._of_all(self._next(name))
        self.store.set(keys[self.ranks.rank], json.dumps(value))
        self._until(keys)
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def agree(self, name: str, value: Any) -> Any:
        key = self._next(name)
        if self.ranks.leads:
            self.store.set(key, json.dumps(value))
        self._until([key])
        return json.loads(self.store.get(key))

    def on_host(self, name: str) -> list[int]:
        # Two hosts may have one name, and a launcher knows its number. Not LOCAL_RANK 0: it may be unset.
        host = f"{os.environ.get('GROUP_RANK', '')}-{socket.gethostname()}"
        hosts = self.gather(f"{name}/hosts", host)
        return [rank for rank, other in enumerate(hosts) if other == host]

    @contextlib.contextmanager
    def one_by_host(self, name: str) -> Iterator[bool]:
        leader = self.on_host(name)[0]
        key, first = f"{self._next(name)}/{leader}", leader == self.ranks.rank
        if not first:
            self._until([key])
        yield first
        if first:
            self.store.set(key, "done")

    @contextlib.contextmanager
    def holding(self, moves: Callable[[], object] | None = None) -> Iterator[None]:
        hold = _Hold(moves)
        with self._lock:
            self._holds.append(hold)
        try:
            yield
        finally:
            with self._lock:
                self._holds.remove(hold)

    def keep(self, path: Path) -> None:
        if self.ranks.leads:
            self._keep(path=str(path))

    def end(self, code: int) -> None:
        self._keep(ended=code)

    def is_to_say(self, error: BaseException) -> bool:
        try:
            if not isinstance(error, PeerFailed):
                self.peers.explain(error)
            elif error.fields:
                if failure.exit_code(error) != EXIT_STOPPED:  # which nobody says
                    self._wait(["said"], LEAVE_S)  # or the launcher would end who is to say it
                return False
            code = failure.exit_code(error)
            if code == EXIT_USER or failure.reason_of(error) == "diverged":
                self.end(code)
            if failure.in_words(error) is not None and not self.ranks.leads:
                self._wait(["said"], _LEADER_S)
            me = str(self.ranks.rank)
            said: bytes = self.store.compare_set("said", "", me)
            if said.decode() == me:
                _tell_launcher(error)
            return said.decode() == me
        except RuntimeError:  # the store is gone, and with it whoever could say anything else
            return True

    def cause(self, error: BaseException) -> BaseException:
        self._ends = True
        with contextlib.suppress(RuntimeError):
            self._say_alive()  # before the others hear why, and end
        with self.holding(), contextlib.suppress(RuntimeError):
            while isinstance(error, FailedAlike) and not self.peers.failed(0) and self._leader_lives():
                time.sleep(_LOOK_S)
        return self.peers.explain(error) or error

    def leave(self, error: BaseException) -> None:
        """Before this process ends with `error`: where that came first, every rank hears of it before.

        Rank 0 is the last to end, if it is busy with its own end or with what it holds.
        """
        with contextlib.suppress(RuntimeError):
            if isinstance(error, Stopped) or not isinstance(error, SystemExit):
                self.peers.explain(error)
            self._note("heard")
            first = self.peers.first_rank()
            if first == self.ranks.rank:
                self._wait(self._of_all("heard"), LEAVE_S)
            if first is not None:
                time.sleep(2 * _LOOK_S)  # for the first to print it, and rank 0 to turn to what follows
        with self.holding():
            while self._leader_is_busy():
                time.sleep(_LOOK_S)

    def close(self) -> None:
        """Look no more for the failure of others; a store of this process stays until all others are done."""
        self._closed.set()
        self._watcher.join()
        with contextlib.suppress(RuntimeError):
            self._note("left")
            if self._hosts:
                self._wait(self._of_all("left"), LEAVE_S)

    def _keep(self, **fields: Any) -> None:
        self._job |= fields
        self._raw.set(JOB, json.dumps(self._job))

    def _note(self, what: str) -> None:
        self.store.set(f"{what}/{self.ranks.rank}", "yes")

    def _of_all(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in range(self.ranks.size)]

    def _watch(self) -> None:
        """Once a rank has failed, this process ends, whatever its main thread waits in, but for what it holds
        and for what rank 0 does."""
        while self.failed is None:
            if self._closed.wait(_LOOK_S):
                return
            try:
                self._say_alive()
                self.failed = self.peers.first()
            except RuntimeError:
                self.failed = PeerFailed(
                    "the store in which the ranks meet is gone: rank 0, or its launcher", 0, {}
                )
        with contextlib.suppress(RuntimeError):
            self._note("heard")
        heard = free = time.monotonic()
        while time.monotonic() - free < GRACE_S or self._leader_is_busy():
            if self._closed.wait(_LOOK_S):
                return
            with contextlib.suppress(RuntimeError):
                self._say_alive()
            now = time.monotonic()
            if self._is_held() and now - heard < HOLD_S:
                free = now
                if now - heard >= GRACE_S:  # a launcher may not have the patience
                    self.record(self.failed)
        try:
            self.record(self.failed)
        finally:
            os._exit(failure.exit_code(self.failed))

    def _say_alive(self) -> None:
        """Of rank 0, for the others: that it lives, and whether it is busy with what must not be cut off."""
        if self.ranks.leads:
            with self._lock:
                is_busy = self._is_held() or self._ends
                self._beats += 1
                self.store.set("alive", f"{self._beats} {'busy' if is_busy else 'free'}")

    def _is_held(self) -> bool:
        with self._lock:
            return True in [hold.gets_on() for hold in self._holds]  # each is looked at

    def _leader_lives(self) -> bool:
        """Whether another rank 0 than this one has said so of late."""
        if self.ranks.leads or self.store.check(["left/0"]):
            return False
        beat: bytes = self.store.get("alive") if self.store.check(["alive"]) else b""
        if beat != self._beat:
            self._beat, self._beat_at = beat, time.monotonic()
        return time.monotonic() - self._beat_at < LEAVE_S

    def _leader_is_busy(self) -> bool:
        try:
            return self._leader_lives() and self._beat.endswith(b"busy")
        except RuntimeError:  # the store is gone, and rank 0 with it
            return False

    def _next(self, name: str) -> str:
        self._counts[name] = self._counts.get(name, 0) + 1
        return f"{name}/{self._counts[name]}"

    def _until(self, keys: list[str]) -> None:
        while not self._wait(keys, _LOOK_S):
            if (failed := self.peers.first()) is not None:
                raise failed

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether all `keys` are there within so many seconds."""
        end, pause = time.monotonic() + seconds, 0.002
        while not (there := bool(self.store.check(keys))) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)
        return there


def _tell_launcher(error: BaseException) -> None:
    """A line for the report of the job's end that torchrun makes."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        line = f"{str(error).strip().partition(chr(10))[0]} (said above in full)"
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _nothing(failed: PeerFailed) -> None:
    pass
