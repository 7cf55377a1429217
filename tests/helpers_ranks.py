"""Ranks as processes of their own, forked from the server that has torch imported."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config import TrainConfig
from harness.distributed.ranks import TIMEOUT_S, declared, joined
from harness.launch import launch
from tests.helpers_forks import CONTEXT

_SECONDS = 60


@dataclass
class Error:
    """An error that a rank ended with. `rank`, `fields`: of a `PeerFailed`."""

    kind: str
    text: str
    rank: int | None
    fields: dict[str, Any]


@dataclass
class Answers:
    """What each rank returned, or the error that it ended with; None for one that was killed."""

    values: list[Any]
    errors: list[Any] = field(default_factory=list, compare=False)


def side_by_side(
    size: int,
    act: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = TIMEOUT_S,
    ends: list[int] | None = None,
    joins: bool = True,
) -> Answers:
    """`act(ranks, *arguments)` in `size` processes that have joined; `act(*arguments)` where they join in it.

    `ends`: only these end by themselves.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [
            CONTEXT.Process(
                target=_rank, args=(rank, size, address, folder, timeout_s if joins else None, act, arguments)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for rank in ends or range(size):
            processes[rank].join(_SECONDS)
        hung = [rank for rank in ends or range(size) if processes[rank].exitcode is None]
        for process in processes:
            if process.exitcode is None:
                process.kill()
                process.join()
        assert not hung, f"ranks {hung} did not end in {_SECONDS} s"
        results = [_read(Path(folder) / str(rank)) for rank in range(size)]
    errors = [result if isinstance(result, Error) else None for result in results]
    values = [None if isinstance(result, Error) else result for result in results]
    return Answers(values, errors)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _rank(
    rank: int,
    size: int,
    address: dict[str, str],
    folder: str,
    timeout_s: float | None,
    act: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo"
    )
    result: Any
    try:
        if timeout_s is None:
            result = act(*arguments)
        else:
            with joined(declared(), "cpu", timeout_s=timeout_s) as ranks:
                result = act(ranks, *arguments)
    except BaseException as error:
        traceback.print_exc()
        fields = getattr(error, "fields", {})
        result = Error(type(error).__name__, str(error), getattr(error, "rank", None), fields)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    os._exit(0)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _launched(config: TrainConfig, path: Path, prepare: Callable[[], object]) -> dict[str, Any]:
    prepare()
    outcome = launch(config, path)
    return {"step": outcome.step, "val_loss": outcome.val_loss, "stopped": outcome.stopped}


def train_side_by_side(
    size: int, config: TrainConfig, path: Path, prepare: Callable[[], object] = bool
) -> Answers:
    """`config` trained in the directory `path` by `size` processes, each of which calls `prepare` before."""
    return side_by_side(size, _launched, config, path, prepare, joins=False)
