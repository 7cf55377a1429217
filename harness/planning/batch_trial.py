"""One step of a run at one micro-batch, in a process of its own: what it takes, or that it does not fit.

A process that is thrown away gives all of its memory back, on a GPU too; and where a host has too little, it
is the only one that is killed.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from harness.build import build_learner
from harness.config import TrainConfig
from harness.errors import RunFailed, UserError
from harness.hardware.device import select_device
from harness.hardware.peak_memory import PeakMemory, process_bytes
from harness.optim import make_state
from harness.planning.dry_step import dry_step
from harness.planning.memory_estimate import room_on
from harness.planning.step_cost import random_batch
from harness.run_files import failure

_KILLED = (-signal.SIGKILL, -signal.SIGABRT)  # by the system; by an allocator that knows no exceptions


class Trial(NamedTuple):
    """A micro-batch that fits. `seconds`: of a whole step without the optimizer's part; `peak_mb`: the most
    memory, as `PeakMemory` has it.
    """

    micro_batch: int
    seconds: float
    peak_mb: float


_Told = Trial | Exception | None  # by the process of a trial


def trial(config: TrainConfig, vocab_size: int, memory: float | None) -> Trial | None:
    """Try `trainer.micro_batch_size` of `config` on random tokens; None where it does not fit.

    `memory`: the bytes that the process may take in all; None: what the device has to give. Raises what is
    the user's mistake, and `RunFailed` where the step fails for another reason.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_become, args=(sender, config, vocab_size, memory))
    process.start()
    sender.close()
    told: _Told = None
    try:
        told = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode not in _KILLED:
            raise RunFailed(f"the process of a trial ended with exit code {process.exitcode}") from None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
        receiver.close()
    if isinstance(told, Exception):
        raise told
    return told


def preload() -> None:
    """Have what every trial imports imported once, for all of them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, "torch._dynamo"])


def _become(sender: Connection, config: TrainConfig, vocab_size: int, memory: float | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for the trial ends it
    told: _Told
    try:
        told = _measured(config, vocab_size, memory)
    except UserError as error:
        told = error
    except Exception as error:
        if failure.reason_of(error) == "out_of_memory":
            told = None
        else:
            told = RunFailed("".join(traceback.format_exception(error)))
    with suppress(OSError):
        sender.send(told)


def _measured(config: TrainConfig, vocab_size: int, memory: float | None) -> Trial:
    device = select_device(config.device)
    limit(device, memory)
    learner, peak = build_learner(config, vocab_size, device, None), PeakMemory(device)
    make_state(learner.optimizer)  # which is there in every step but the first
    dry = dry_step(config, learner, device, *random_batch(config, vocab_size))
    micro = config.trainer.micro_batch_size
    assert micro is not None
    return Trial(micro, dry.seconds, peak.megabytes())


def limit(device: torch.device, memory: float | None) -> None:
    """Have allocations fail beyond `memory` bytes of this process; None: beyond what there is."""
    if device.type == "cuda":
        if memory is not None:
            share = memory / torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        return
    room, data, resident = room_on(device), process_bytes("VmData"), process_bytes("VmRSS")
    if room is None or data is None or resident is None:
        return  # a system that does not say: it kills, which is understood too
    import resource

    room = room if memory is None else round(memory) - resident
    if room <= 0:  # small steps find what they need in what the process has, and would seem to fit
        raise MemoryError(f"{resident:,} bytes are taken before the first step, {room:,} are left")
    # What is private and writable: what is allocated counts at once, not when it is first written to.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data + room
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))
