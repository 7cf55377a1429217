"""What every loader hands out, and what every loader can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Batch(NamedTuple):
    """One optimizer step's data for one rank; it is never changed after it was handed out.

    `inputs`, `targets`: int64 `(B, T)`, ignored targets -100. `cursor`: the loader's `state_dict()` after
    this batch, so what is saved is what was trained on, however far a prefetch has read ahead.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    cursor: dict[str, Any]


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
