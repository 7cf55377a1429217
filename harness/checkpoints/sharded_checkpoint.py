"""A sharded model and its optimizer, to and from a checkpoint: torch's distributed checkpoint plans it.

Its planner decides which rank saves which piece, and which pieces a rank needs of a step that another number
of ranks wrote. The bytes are ours (`shard_files.py`): hashed as they are written, without pickles, and by a
thread if need be, for all that the ranks have to agree on is agreed before. Its own load is silent about what
it does not ask for; here names, shapes and dtypes are compared both ways first.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from harness.checkpoints.restore import POSITIONS
from harness.checkpoints.shard_files import MODEL_PART, OPTIMIZER_PART, Piece, ShardIndex, Stored
from harness.errors import UserError
from harness.optim import make_state

_MOST = 8  # problems that a message lists


@dataclass(frozen=True)
class Share:
    """What this rank writes of a step: tensors by name, on their device; `index` is None but on rank 0."""

    tensors: dict[str, Tensor]
    index: ShardIndex | None


class Sharing:
    """Who writes what of a run's steps: agreed on once, for nothing of it changes from step to step."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._own: list[str] = []
        self._pieces: dict[str, list[Piece]] | None = None

    @torch.no_grad()
    def share(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Share:
        """This rank's share of what both hold now, not copied. A collective."""
        state = named_state(model, optimizer)
        if state.keys() != self._named:  # the first time, and once the optimizer has taken a step
            self._plan(state)
        tensors = {name: _local(state[name]) for name in self._own}
        if self._pieces is None:
            return Share(tensors, None)
        stored = {name: _stored(tensor, self._pieces[name]) for name, tensor in state.items()}
        return Share(tensors, ShardIndex(dist.get_world_size(), stored, _named_groups(model, optimizer)))

    def _plan(self, state: dict[str, Tensor]) -> None:
        plan = _Plan()
        planner = DefaultSavePlanner(flatten_state_dict=False)
        _together(lambda: dcp.save(state, storage_writer=plan, planner=planner))
        self._named, self._own, self._pieces = set(state), plan.names, plan.pieces


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`model.NAME` and `optimizer.NAME.KEY`: the tensors themselves, sharded where they are."""
    weights = model.state_dict(keep_vars=True)  # so that nothing is made of thousands of tensors
    state = {f"{MODEL_PART}.{name}": tensor for name, tensor in weights.items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{OPTIMIZER_PART}.{names[parameter]}.{key}"] = value
    return state


def _named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        group | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _stored(tensor: Tensor, pieces: list[Piece]) -> Stored:
    return Stored(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(pieces))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


class _Plan(StorageWriter):
    """Writes nothing: keeps the names of what this rank would, and on rank 0 the pieces of all ranks."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.pieces: dict[str, list[Piece]] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.names = [item.index.fqn for item in plan.items]
        assert len(set(self.names)) == len(self.names), "a rank has one piece of a tensor"
        chunks = [item.tensor_data.chunk for item in plan.items if item.tensor_data is not None]
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [WriteResult(item.index, 0, chunk) for item, chunk in zip(plan.items, chunks, strict=True)]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.pieces = {}
        for rank, written in enumerate(results):
            for result in written:
                chunk: ChunkStorageMetadata = result.storage_data
                piece = Piece(rank, tuple(chunk.offsets), tuple(chunk.sizes))
                self.pieces.setdefault(result.index.fqn, []).append(piece)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Source(Protocol):
    """Tensors that can be read by boxes: a checkpoint's shards, or whole ones in memory."""

    @property
    def stored(self) -> dict[str, Stored]: ...

    def read(self, name: str, piece: Piece, region: tuple[slice, ...]) -> Tensor: ...


class Whole:
    """Tensors in memory, each of one piece."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def stored(self) -> dict[str, Stored]:
        return {
            name: _stored(tensor, [Piece(0, (0,) * tensor.dim(), tuple(tensor.shape))])
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, piece: Piece, region: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][region]


def load(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill a model and its optimizer, sharded or not, with the tensors of `named_state`. Every rank calls it.

    Of a table of positions that is longer than the model's, the first rows. Of the optimizer what it has
    learnt, no setting. Raises `ValueError` naming what is missing, unexpected, or of another shape or dtype.
    """
    rows = dict(model.named_parameters())[POSITIONS].shape[0]
    stored = {
        name: entry.first_rows(rows) if f".{POSITIONS}" in name and entry.shape else entry
        for name, entry in source.stored.items()
    }
    if any(name.startswith(OPTIMIZER_PART + ".") for name in stored):  # else it had taken no step
        make_state(optimizer)
    wanted = named_state(model, optimizer)
    _compare(stored, wanted)
    reader, planner = _Reader(source, stored), DefaultLoadPlanner(flatten_state_dict=False)
    _together(lambda: dcp.load(wanted, storage_reader=reader, planner=planner))


def _compare(stored: dict[str, Stored], wanted: dict[str, Tensor]) -> None:
    """Raise `ValueError` unless both have the same tensors; DCP would leave out what only one of them has."""
    problems = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    problems += [f"{name} is unexpected" for name in stored.keys() - wanted.keys()]
    for name in stored.keys() & wanted.keys():
        saved, ours = stored[name], _stored(wanted[name], [])
        if (saved.dtype, saved.shape) != (ours.dtype, ours.shape):
            problems.append(
                f"{name} is {saved.dtype} {list(saved.shape)}, the model's {ours.dtype} {list(ours.shape)}"
            )
    if problems:
        more = f" and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
        raise ValueError("; ".join(sorted(problems)[:_MOST]) + more)


class _Reader(StorageReader):
    """Hands DCP what `stored` says of a source, and then the boxes that it asks for."""

    def __init__(self, source: Source, stored: dict[str, Stored]) -> None:
        self._source, self._stored = source, stored

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(getattr(torch, entry.dtype)),
                    torch.Size(entry.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
                        for piece in entry.pieces
                    ],
                )
                for name, entry in self._stored.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, number = item.storage_index.fqn, item.storage_index.index
            assert number is not None, item
            bounds = zip(item.storage_offsets, item.lengths, strict=True)
            region = tuple(slice(start, start + size) for start, size in bounds)
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._source.read(name, self._stored[name].pieces[number], region))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _together(call: Callable[[], object]) -> None:
    """Call into DCP; what failed on a rank is raised on all, and not as the `BaseException` it makes."""
    try:
        with warnings.catch_warnings():  # without a process group it says so each time
            warnings.simplefilter("ignore", UserWarning)
            call()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, OSError | UserError | MemoryError):
            raise cause from error
        raise RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause
