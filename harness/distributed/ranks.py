"""The processes that train one model side by side, and what they agree on: torch.distributed under torchrun.

Every rank runs the same program; rank 0 alone writes and talks. What the hosts say to one another goes
through gloo, so no device waits for it; and who waits there looks whether a rank has failed, which would
otherwise show only when its process is gone. A collective is called by every rank in the same order, in the
main thread, never in a signal handler. torch is imported only where there are several.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    import torch

    from harness.distributed.meeting import Meeting, RanksMeeting

# Seconds for a rank to take its part in what the others wait in. Rank 0 may verify data, sample text or wait
# for a disk meanwhile.
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` of a run. `local_rank`: its number on its host, and of its GPU there.

    Every method but the properties is a collective: all ranks call it, in the same order; alone it costs
    nothing.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and talks."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's plain Python value, on every rank."""
        return self.gather(value if self.leads else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Each rank's plain Python value, by rank, on every rank."""
        if not self.several:
            return [value]
        import torch
        import torch.distributed as dist

        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        (longest,) = self.largest_later([len(packed)])()
        own = torch.nn.functional.pad(packed, (0, longest - len(packed)))
        parts = [torch.empty_like(own) for _ in range(self.size)]
        _done(dist.all_gather(parts, own, group=_joined().hosts, async_op=True))
        return [pickle.loads(part.numpy().data) for part in parts]  # what follows the pickle is not read

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.largest_later([int(flag)])()[0]) if self.several else flag

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over the ranks, in place, on its own device; on CUDA the host does not wait."""
        if self.several:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def total(self, values: list[int]) -> list[int]:
        """Integers summed over the ranks, each by itself; the hosts wait for one another, no device does."""
        return self._reduced(values, "SUM")() if self.several else values

    def largest_later(self, values: list[int]) -> Callable[[], list[int]]:
        """Begin to find the largest over the ranks of each integer; what is returned waits for it."""
        return self._reduced(values, "MAX") if self.several else lambda: values

    def _reduced(self, values: list[int], how: str) -> Callable[[], list[int]]:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.int64)
        operation = getattr(dist.ReduceOp, how)
        work = dist.all_reduce(tensor, operation, group=_joined().hosts, async_op=True)

        def wait() -> list[int]:
            _done(work)
            result: list[int] = tensor.tolist()
            return result

        return wait


ALONE = Ranks()


@dataclass(frozen=True)
class _Joined:
    """`hosts`: the group of the hosts' own collectives, beside the one that gradients go through."""

    ranks: Ranks
    hosts: Any
    meeting: Meeting


_now: _Joined | None = None


def current() -> Ranks:
    """What `joined` made of this process; else `ALONE`."""
    return ALONE if _now is None else _now.ranks


def declared(environment: Mapping[str, str] = os.environ) -> Ranks:
    """What the launcher says this process is; `ALONE` where nothing is said.

    Raises `UserError` where it makes no sense.
    """
    size = _number(environment, "WORLD_SIZE", 1)
    if size <= 1:
        return ALONE
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise UserError(
                f"WORLD_SIZE={size} says that this is one of {size} processes, but {name} is not set: they "
                "could not find one another. Start them by torchrun --nproc-per-node=N train.py ..., or "
                "unset WORLD_SIZE to train on one device"
            )
    if not 1 <= (port := _number(environment, "MASTER_PORT", 0)) <= 65535:
        raise UserError(
            f"MASTER_PORT={port} must be from 1 to 65535: the {size} processes could not find one another. "
            "Leave out --master-port on one machine (torchrun --standalone), or name a free port on several"
        )
    rank = _number(environment, "RANK", 0)
    if not 0 <= rank < size:
        raise UserError(
            f"RANK={rank} must be from 0 to {size - 1} (WORLD_SIZE={size}): the processes could not find one "
            "another. torchrun sets both"
        )
    return Ranks(rank, size, _number(environment, "LOCAL_RANK", rank))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{name}={text} must be a whole number: torchrun sets it, and nobody else should")
    return int(text)


@contextlib.contextmanager
def joined(ranks: Ranks, device_type: str, *, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Meet the other ranks, and part from them at the end; alone there is nothing to do.

    `device_type` is that of the device this rank computes on. Inside, `current` gives `ranks`. An error that
    leaves the block is told to the others; where it is only that another rank is gone, `PeerFailed` says
    which one and why. After an error the process must end: what the others wait for cannot be taken back.
    """
    global _now
    if not ranks.several:
        yield ranks
        return
    from harness.distributed.meeting import RanksMeeting
    from harness.distributed.rendezvous import MEET_S, meeting

    with meeting(min(MEET_S, timeout_s)) as met:
        assert isinstance(met, RanksMeeting)
        try:
            _now = _join(ranks, device_type, timeout_s, met)
            yield ranks
            met.gather("done")  # whoever is done waits for what rank 0 still writes, and hears if that fails
        except BaseException as error:
            _now = None
            cause = met.cause(error)
            if cause is not error:
                raise cause from error
            raise
        _leave()


def _join(ranks: Ranks, device_type: str, timeout_s: float, met: RanksMeeting) -> _Joined:
    import torch
    import torch.distributed as dist

    on_cuda = device_type == "cuda"
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if on_cuda:
        options["device_id"] = torch.device("cuda", ranks.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        # A connection of its own: torch waits in it, and locks it meanwhile, for ranks that may have failed.
        store=met.store.clone(),  # type: ignore[attr-defined]
        rank=ranks.rank,
        world_size=ranks.size,
        **options,
    )
    hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return _Joined(ranks, hosts, met)


def _done(work: Any) -> None:
    """Wait for a collective of the hosts. Raises `PeerFailed` where a rank fails before it is done."""
    met, pause = _joined().meeting, 5e-5
    while not work.is_completed():
        if met.failed is not None:
            raise met.failed
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)
    work.wait()


def _leave() -> None:
    global _now
    import torch.distributed as dist

    _now = None
    dist.destroy_process_group()


def _joined() -> _Joined:
    assert _now is not None, "several ranks, and not inside of `joined`"
    return _now
