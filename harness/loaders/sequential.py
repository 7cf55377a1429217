"""The token stream in file order: a cursor that advances by a batch and never wraps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import UserError
from harness.loaders.batch import Batch, Origin, check_epoch, check_sizes
from harness.loaders.lookahead import LookAhead
from harness.loaders.masking import BoundaryMask
from harness.loaders.state import check_state
from harness.storage import TokenStore
from harness.storage.reading import Reading, begin_windows

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor, torch.Tensor]

FORMAT_VERSION = 1


class TokenDataLoader:
    """Batches of `batch_size * seq_len` consecutive tokens and one more, the last target.

    `batch_size` is global: rank r of W gets rows `[r*B/W, (r+1)*B/W)`, and the cursor is the same on every
    rank. `mask_boundary` as in `BoundaryMask`. Raises `UserError` where the split is too small for one batch.
    """

    def __init__(
        self,
        dataset: TokenStore,
        batch_size: int,
        seq_len: int,
        *,
        mask_boundary: str = "none",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_sizes(batch_size, seq_len, rank, world_size)
        if dataset.total_tokens < batch_size * seq_len + 1:
            raise too_small(dataset, batch_size, seq_len)
        self.dataset = dataset
        self.batch_size = batch_size
        self.seq_len = seq_len
        self._mask = BoundaryMask(mask_boundary, dataset.manifest)
        self._rows = batch_size // world_size
        self._shift = rank * self._rows * seq_len
        self._position = 0
        self._settings = {
            "format_version": FORMAT_VERSION,
            "position": 0,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "split": dataset.split,
            "metadata_sha256": dataset.metadata_sha256,
        }
        self._at_positions = dataset.positional()
        # None once the first read was quick: what follows is read ahead by the system by itself.
        self._ahead: LookAhead[Pair] | None = LookAhead()

    @property
    def position(self) -> int:
        """Tokens consumed of this epoch, over all ranks."""
        return self._position

    @property
    def batches_per_epoch(self) -> int:
        """Batches from the start of the stream to its end."""
        return self.batches_from(0)

    @property
    def advance(self) -> int:
        """Tokens of a batch, over all ranks."""
        return self.batch_size * self.seq_len

    def batches_from(self, position: int) -> int:
        """Batches from the token `position` to the end of the stream."""
        return max(0, self.dataset.total_tokens - 1 - position) // self.advance

    @property
    def dropped_tokens(self) -> int:
        """Targets at the end of the stream that do not fill a batch."""
        return (self.dataset.total_tokens - 1) % (self.batch_size * self.seq_len)

    @property
    def skipped_tokens(self) -> int:
        """None: every token but the first is a target."""
        return 0

    def next_batch(self) -> Batch:
        """This rank's rows of the next global batch, int64 `(B/W, T)`, and the cursor after it.

        Raises StopIteration, before anything is read, where fewer than `B*T + 1` tokens are left.
        """
        size = self.batch_size * self.seq_len
        if self._position + size + 1 > self.dataset.total_tokens:
            raise StopIteration
        if self._ahead is None:
            inputs, targets = self.read_at(self._position)
        else:
            inputs, targets = self._ahead.read(self, self._position)
            if not self._ahead.active:
                self._ahead = None
        self._position += size
        return Batch(inputs, self._mask(inputs, targets), self.state_dict())

    @property
    def rows(self) -> int:
        """As in `lookahead.Source`: this rank's part of a batch is one read."""
        return 1

    @property
    def batch_tokens(self) -> int:
        """Tokens of this rank's part of a batch."""
        return self._rows * self.seq_len

    def read_at(self, place: int) -> Pair:
        """As in `lookahead.Source`."""
        return self.dataset.get_batch(place + self._shift, self._rows, self.seq_len)

    def begin_at(self, place: int, *, readers: bool) -> Reading[Pair]:
        """As in `lookahead.Source`."""
        starts, shape = np.array([place + self._shift]), (self._rows, self.seq_len)
        reading = begin_windows(self._at_positions, starts, self.batch_tokens + 1, readers=readers)

        def pair(window: np.ndarray[Any, Any]) -> Pair:
            inputs, targets = self.dataset.split_windows(window, starts)
            return inputs.reshape(shape), targets.reshape(shape)

        return reading.then(pair)

    def probe_at(self, place: int, sample: int = 0) -> int:
        """As in `lookahead.Source`."""
        self._at_positions.read_tokens(place + self._shift, self.seq_len)
        return self.seq_len

    def origins(self, position: int) -> list[Origin]:
        """Where this rank's rows of the batch at `position` come from."""
        first = position + self._shift
        starts = range(first, first + self._rows * self.seq_len, self.seq_len)
        return [
            Origin("token", start, start, self.dataset.locate(start, self.seq_len + 1)) for start in starts
        ]

    def reset(self) -> None:
        """Back to the start of the stream."""
        self._position = 0

    def start_epoch(self, epoch: int) -> None:
        """Back to the start of the stream: the order is the same in every epoch."""
        check_epoch(epoch)
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """The cursor: six plain JSON values."""
        return {**self._settings, "position": self._position}

    def validate_state_dict(self, state: dict[str, Any]) -> int:
        """The position in `state`; `UserError` naming each field that does not fit. Changes nothing."""
        return check_state(state, self.state_dict(), end=self.dataset.total_tokens)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, if `validate_state_dict` takes it."""
        self._position = self.validate_state_dict(state)


def too_small(dataset: TokenStore, batch_size: int, seq_len: int) -> UserError:
    """The error of a split with fewer than `B*T + 1` tokens."""
    tokens = dataset.total_tokens
    if tokens > seq_len:
        asked, advice = (
            f"loader.batch_size={batch_size} with ",
            f"loader.batch_size<={(tokens - 1) // seq_len}",
        )
    else:
        asked, advice = "", f"loader.seq_len<={tokens - 1} with loader.batch_size=1"
    needed = batch_size * seq_len + 1
    smaller = f"Use {advice} or prepare" if tokens > 1 else "Prepare"
    return UserError(
        f"{asked}loader.seq_len={seq_len} needs {needed} tokens, but {dataset.split} has {tokens} "
        f"({dataset.manifest.path}): an epoch would have no batch. "
        f"{smaller} more text: python scripts/prepare_data.py corpus=..."
    )
