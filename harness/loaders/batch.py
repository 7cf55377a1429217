"""What every loader hands out, and what every loader can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from harness.errors import UserError

if TYPE_CHECKING:
    import torch

    from harness.storage.extents import Piece

# A target that does not count: the model's own, held equal by a test, for neither imports the other.
IGNORE = -100


class Batch(NamedTuple):
    """One optimizer step's data for one rank; it is never changed after it was handed out.

    `inputs`, `targets`: int64 `(B, T)`, ignored targets -100. `cursor`: the loader's `state_dict()` after
    this batch, so what is saved is what was trained on, however far a prefetch has read ahead.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    cursor: dict[str, Any]


class Origin(NamedTuple):
    """Where a row of a batch comes from: the sample's number in the split, and the pieces of its shards.

    `sample`: of a stream in file order the number of its first token, else of its window, row or pair.
    `name` says which. `start`: its first token in the split; None for rows.
    """

    name: str
    sample: int
    start: int | None
    pieces: list[Piece]


class Loader(Protocol):
    """An order of reading. `batch_size` is global; a rank gets its rows, the cursor is the same for all."""

    batch_size: int
    seq_len: int

    @property
    def batches_per_epoch(self) -> int:
        """Batches from position 0 to the end of an epoch."""

    @property
    def dropped_tokens(self) -> int:
        """Targets at the end of an epoch that do not fill a batch."""

    @property
    def skipped_tokens(self) -> int:
        """Targets that no epoch reads at all."""

    @property
    def position(self) -> int:
        """How much of the epoch's global order is consumed."""

    def next_batch(self) -> Batch:
        """The next batch; StopIteration at the end of the epoch, without wrapping."""

    def reset(self) -> None:
        """Back to position 0 of the same epoch."""

    def start_epoch(self, epoch: int) -> None:
        """To position 0 of `epoch` (from 0)."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain JSON values."""

    def validate_state_dict(self, state: dict[str, Any]) -> int:
        """The position in `state`, with nothing changed; `UserError` where it belongs to another run."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, after `validate_state_dict`."""


class SeekableLoader(Loader, Protocol):
    """A loader that is no reader ahead: any batch's place follows by arithmetic, without reading."""

    @property
    def advance(self) -> int:
        """How far a batch moves the position."""

    def batches_from(self, position: int) -> int:
        """Batches from `position` to the end of an epoch."""

    def origins(self, position: int) -> list[Origin]:
        """Where the rows of the batch that starts at `position` of this epoch come from, in order."""


def check_sizes(batch_size: int, seq_len: int, rank: int = 0, world_size: int = 1) -> None:
    """Raise `UserError` unless all are integers in range and the ranks share a batch evenly."""
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("world_size", world_size)):
        if type(value) is not int or value < 1:
            raise UserError(f"{name}={value!r} must be an integer of at least 1")
    if type(rank) is not int or not 0 <= rank < world_size:
        raise UserError(
            f"rank={rank!r} must be an integer from 0 to {world_size - 1} (world_size={world_size})"
        )
    if batch_size % world_size:
        raise UserError(
            f"loader.batch_size={batch_size} cannot be shared by {world_size} processes: it is the global "
            f"batch and each process takes the same number of rows. Use loader.batch_size="
            f"{batch_size + world_size - batch_size % world_size} or another multiple of {world_size}, or as "
            f"many processes as divide {batch_size}"
        )


def check_epoch(epoch: int) -> None:
    """Raise `UserError` unless `epoch` is an integer from 0."""
    if type(epoch) is not int or epoch < 0:
        raise UserError(f"epoch={epoch!r} must be an integer of at least 0")
