"""A checkpoint in shards: each rank's part of every tensor in files of its own, and where each part lies.

    shards.json                            dtype, shape and pieces of each tensor; the optimizer's settings
    model-00000-of-00002.safetensors       rank 0's pieces of the weights
    optimizer-00000-of-00002.safetensors   and of what the optimizer has learnt

They take the place of model.safetensors and optimizer.pt. A weight is called `model.NAME`, what the optimizer
keeps of it `optimizer.NAME.KEY`. Each file's own header says which rank of how many wrote it, at which step.
Reading needs no process group: one process has the whole tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SHARDS = "shards.json"
MODEL_PART, OPTIMIZER_PART = "model", "optimizer"
_AN_OLDER = ", or convert the step by the version that wrote it: scripts/convert_checkpoint.py"
_PART = re.compile(r"(model|optimizer)-(\d{5})-of-(\d{5})\.safetensors")


def part_file(part: str, rank: int, ranks: int) -> str:
    """The name of a rank's file; `part` is MODEL_PART or OPTIMIZER_PART."""
    return f"{part}-{rank:05d}-of-{ranks:05d}.safetensors"


def part_files(ranks: int) -> list[str]:
    """The files of all ranks."""
    return [part_file(part, rank, ranks) for part in (MODEL_PART, OPTIMIZER_PART) for rank in range(ranks)]


def ranks_of(names: Iterable[str]) -> int:
    """How many ranks wrote the step that holds these files: the number that one of them gives, or 0."""
    return max((int(match[3]) for name in names if (match := _PART.fullmatch(name))), default=0)


def model_sha256(entries: dict[str, dict[str, Any]]) -> str:
    """One digest of the weights: SHA-256 over the digests, as hex, of the ranks' files of them.

    `entries` are those of checkpoint.json. The same weights in other pieces have another one.
    """
    files = (part_file(MODEL_PART, rank, ranks_of(entries)) for rank in range(ranks_of(entries)))
    return hashlib.sha256("".join(entries[name]["sha256"] for name in files).encode()).hexdigest()


def metadata_of(rank: int, ranks: int, step: int) -> dict[str, str]:
    """What a rank's files of a step say of themselves."""
    return {"rank": str(rank), "world_size": str(ranks), "step": str(step)}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: where it begins, its shape, and the rank in whose file it lies."""

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class Stored:
    """A tensor on disk; `dtype` is torch's name of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def first_rows(self, rows: int) -> Stored:
        """The tensor without what comes after its first `rows` rows."""
        pieces = (
            Piece(p.rank, p.offsets, (min(p.shape[0], rows - p.offsets[0]), *p.shape[1:]))
            for p in self.pieces
            if p.offsets[0] < rows
        )
        return Stored(self.dtype, (min(rows, self.shape[0]), *self.shape[1:]), tuple(pieces))


@dataclass(frozen=True)
class ShardIndex:
    """What shards.json says. `param_groups`: the optimizer's, with the names of parameters in `params`."""

    ranks: int
    tensors: dict[str, Stored]
    param_groups: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        tensors = {
            name: {
                "dtype": stored.dtype,
                "shape": stored.shape,
                "pieces": [vars(piece) for piece in stored.pieces],
            }
            for name, stored in self.tensors.items()
        }
        return {"ranks": self.ranks, "tensors": tensors, "param_groups": self.param_groups}


def index_from_json(value: dict[str, Any]) -> ShardIndex:
    """The index in what shards.json holds. Raises `ValueError` where it is none or a tensor has a gap."""
    try:
        tensors = {name: _stored(entry) for name, entry in value["tensors"].items()}
        groups = [{key: _tuple(item) for key, item in group.items()} for group in value["param_groups"]]
        groups = [group | {"params": list(group["params"])} for group in groups]
        index = ShardIndex(int(value["ranks"]), tensors, groups)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no index of shards ({type(error).__name__}: {error})") from None
    for name, stored in tensors.items():
        if (problem := _problem(stored, index.ranks)) is not None:
            raise ValueError(f"{name} {problem}")
    return index


def _in_words(metadata: dict[str, str] | None) -> str:
    """What a file says of itself."""
    if metadata is None:
        return "an older version, which wrote neither rank nor world_size nor step into it"
    return ", ".join(f"{key} {value}" for key, value in sorted(metadata.items()))


def _stored(entry: dict[str, Any]) -> Stored:
    pieces = (Piece(p["rank"], tuple(p["offsets"]), tuple(p["shape"])) for p in entry["pieces"])
    return Stored(entry["dtype"], tuple(entry["shape"]), tuple(pieces))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _problem(stored: Stored, ranks: int) -> str | None:
    """What is wrong with the pieces of a tensor: they must lie in it and make up all of it."""
    for piece in stored.pieces:
        inside = len(piece.offsets) == len(piece.shape) == len(stored.shape) and all(
            0 <= start <= start + size <= whole
            for start, size, whole in zip(piece.offsets, piece.shape, stored.shape, strict=True)
        )
        if not inside or not 0 <= piece.rank < ranks:
            return f"of shape {stored.shape} has the piece {piece} outside of it or of {ranks} ranks"
    known, whole = sum(math.prod(piece.shape) for piece in stored.pieces), math.prod(stored.shape)
    if known != whole:
        return f"has {known} of its {whole} elements in the pieces of {ranks} ranks"
    both = _overlapping(stored.pieces)
    return None if both is None else f"has the pieces {both[0]} and {both[1]}, which overlap, and so a gap"


def _overlapping(pieces: Iterable[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces with an element in common."""
    ordered = sorted((piece for piece in pieces if 0 not in piece.shape), key=lambda piece: piece.offsets)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.offsets[0] >= one.offsets[0] + one.shape[0]:
                break  # and so do all that follow
            boxes = zip(one.region, other.region, strict=True)
            if all(a.start < b.stop and b.start < a.stop for a, b in boxes):
                return one, other
    return None


class Shards:
    """The tensors of a step's shards, read by boxes; to be used as a context, which closes the files."""

    def __init__(self, path: Path, index: ShardIndex, step: int) -> None:
        self.path, self.index, self.step = path, index, step
        self._stack = contextlib.ExitStack()
        self._opened: dict[tuple[str, int], Any] = {}

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def stored(self) -> dict[str, Stored]:
        return self.index.tensors

    def read(self, name: str, piece: Piece, region: tuple[slice, ...]) -> Tensor:
        """The box `region` of a piece, on the CPU; of a scalar `region` is empty.

        Raises `UserError` where its file is another rank's or of another step, `ValueError` where the file
        has a piece of another shape.
        """
        part, _, _ = name.partition(".")
        key = (part, piece.rank)
        if key not in self._opened:
            self._opened[key] = self._open(*key)
        file = self._opened[key]
        tensor: Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        return tensor

    def _open(self, part: str, rank: int) -> Any:
        from safetensors import safe_open

        name = part_file(part, rank, self.index.ranks)
        file = self._stack.enter_context(safe_open(self.path / name, framework="pt"))
        found, expected = file.metadata(), metadata_of(rank, self.index.ranks, self.step)
        if found != expected:
            raise UserError(
                f"{self.path / name} is of {_in_words(found)}, and stands here for {_in_words(expected)}: "
                "put together of other shards the model would be none that was ever trained. Put back the "
                f"file that was saved with this step{_AN_OLDER if found is None else ''}"
            )
        for tensor in self.names(part):
            for piece in self.index.tensors[tensor].pieces:
                shape = file.get_slice(tensor).get_shape() if piece.rank == rank else list(piece.shape)
                if shape != list(piece.shape):
                    raise ValueError(f"{name} has {tensor} as {shape}, {SHARDS} as {list(piece.shape)}")
        return file

    def whole(self, name: str) -> Tensor:
        """A tensor put together from all its pieces."""
        import torch

        stored = self.index.tensors[name]
        result = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for piece in stored.pieces:
            if 0 not in piece.shape:
                result[piece.region] = self.read(name, piece, tuple(slice(0, size) for size in piece.shape))
        return result

    def names(self, part: str) -> Iterator[str]:
        """The tensors of a part."""
        return (name for name in self.index.tensors if name.startswith(part + "."))

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by their names in it."""
        return {name.removeprefix(MODEL_PART + "."): self.whole(name) for name in self.names(MODEL_PART)}

    def optimizer_state(self) -> dict[str, Any]:
        """What optimizer.pt of a plain checkpoint holds: parameters are numbered as the groups have them."""
        ordered = [name for group in self.index.param_groups for name in group["params"]]
        number = {name: i for i, name in enumerate(ordered)}
        state: dict[int, dict[str, Tensor]] = {}
        for name in self.names(OPTIMIZER_PART):
            parameter, _, key = name.removeprefix(OPTIMIZER_PART + ".").rpartition(".")
            state.setdefault(number[parameter], {})[key] = self.whole(name)
        groups = [
            group | {"params": [number[name] for name in group["params"]]}
            for group in self.index.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}
