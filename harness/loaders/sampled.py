"""What all loaders of numbered samples share: a seeded order of them, cut into batches and into ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from harness.errors import UserError
from harness.loaders.batch import Batch, Origin, check_epoch, check_sizes
from harness.loaders.masking import BoundaryMask
from harness.loaders.permutation import EPOCH_SEEDS, Ids, Permutation, epoch_key
from harness.loaders.state import check_state
from harness.storage.manifest import Manifest

FORMAT_VERSION = 1

# Samples whose order is computed at once: NumPy's cost a call is then spread over many batches. The first
# block is small, because a start and a resume wait for it.
_FIRST_BLOCK, _ORDER_BLOCK = 64, 8192

_NO_IDS: Ids = np.empty(0, np.int64)


class PreparedSplit(Protocol):
    """What the base needs to know of the data; `TokenStore` and every other store is one."""

    split: str
    metadata_sha256: str
    manifest: Manifest


class SampledLoader(ABC):
    """Batches of `batch_size` samples, each once an epoch, in an order that (seed, epoch) decides.

    A subclass sets `strategy` and `sample_words`, and reads samples by number in `_read`. `samples` is their
    number; `batch_size` is global: rank r of W gets the samples `[r*B/W, (r+1)*B/W)` of each batch, and the
    cursor is the same on every rank. The last `samples mod B` of the order are dropped. Raises `UserError`
    where there are fewer samples than `batch_size`, and for arguments that cannot be.
    """

    strategy: ClassVar[str]
    sample_words: ClassVar[str] = "rows"  # what a sample is called in messages

    def __init__(
        self,
        store: PreparedSplit,
        samples: int,
        batch_size: int,
        seq_len: int,
        *,
        seed: int = 0,
        epoch_seed: str = "mixed",
        mask_boundary: str = "none",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_sizes(batch_size, seq_len, rank, world_size)
        if type(seed) is not int or seed < 0:
            raise UserError(f"loader.seed={seed!r} must be an integer of at least 0")
        if epoch_seed not in EPOCH_SEEDS:
            raise UserError(f"loader.epoch_seed={epoch_seed!r} must be one of {', '.join(EPOCH_SEEDS)}")
        self.store = store
        self.samples = samples
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.epoch_seed = epoch_seed
        self._mask = BoundaryMask(mask_boundary, store.manifest)
        self._rows = batch_size // world_size
        self._shift = rank * self._rows
        if samples < batch_size:
            raise self._too_few(world_size)
        self._go_to(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """The epoch whose order is read, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch's order consumed, over all ranks."""
        return self._position

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches an epoch."""
        return self.batches_from(0)

    @property
    def advance(self) -> int:
        """Samples of a batch, over all ranks."""
        return self.batch_size

    def batches_from(self, position: int) -> int:
        """Whole batches from the place `position` to the end of an epoch's order."""
        return max(0, self.samples - position) // self.batch_size

    @property
    def dropped_tokens(self) -> int:
        """Targets of the last samples of an epoch's order, which do not fill a batch."""
        return self.samples % self.batch_size * self.seq_len

    @property
    def skipped_tokens(self) -> int:
        """Targets that are in no sample, whatever the epoch."""
        return 0

    def next_batch(self) -> Batch:
        """This rank's rows of the next global batch, int64 `(B/W, T)`, and the cursor after it.

        Raises StopIteration, before anything is read, where fewer than `batch_size` samples are left.
        """
        import torch

        if self._position + self.batch_size > self.samples:
            raise StopIteration
        inputs, targets = self._read(self._ids(self._position))
        if not isinstance(inputs, torch.Tensor):
            inputs, targets = torch.from_numpy(inputs), torch.from_numpy(targets)
        self._position += self.batch_size
        return Batch(inputs, self._mask(inputs, targets), self.state_dict())

    def origins(self, position: int) -> list[Origin]:
        """Where this rank's rows of the batch at `position` of this epoch come from."""
        return self._origins(self.order(position + self._shift, self._rows).tolist())

    def order(self, start: int, count: int) -> Ids:
        """Sample numbers at the places `[start, start + count)` of this epoch's order: int64 `(count,)`."""
        return Permutation(self.samples, self._key()).take(start, count)

    def reset(self) -> None:
        """Back to position 0 of the same epoch."""
        self._position = 0

    def start_epoch(self, epoch: int) -> None:
        """To position 0 of `epoch`; `UserError` for a negative one."""
        check_epoch(epoch)
        self._go_to(epoch, position=0)

    def state_dict(self) -> dict[str, Any]:
        """The cursor: plain JSON values."""
        return {**self._settings, "epoch": self._epoch, "position": self._position}

    def validate_state_dict(self, state: dict[str, Any]) -> int:
        """The position in `state`; `UserError` naming each field that does not fit. Changes nothing."""
        return check_state(state, self.state_dict(), end=self.samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, its epoch included, if `validate_state_dict` takes it."""
        position = self.validate_state_dict(state)
        self._go_to(state["epoch"], position)

    @abstractmethod
    def _read(self, ids: Ids) -> tuple[Any, Any]:
        """Inputs and targets of the samples `ids`, int64 `(n, T)` tensors or arrays, freshly allocated.

        `ids` is a view of what is kept: it must not be changed.
        """

    @abstractmethod
    def _origins(self, ids: list[int]) -> list[Origin]:
        """Where the rows of the samples `ids` come from, in the order of a batch's rows."""

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The cursor's fields in their order; epoch and position are any."""
        return {
            "format_version": FORMAT_VERSION,
            "strategy": self.strategy,
            "epoch": 0,
            "position": 0,
            "seed": self.seed,
            "epoch_seed": self.epoch_seed,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "split": self.store.split,
            "metadata_sha256": self.store.metadata_sha256,
            **self._extra_state(),
        }

    def _extra_state(self) -> dict[str, Any]:
        """The settings of the strategy that decide the order, as plain JSON values."""
        return {}

    def _key(self) -> int:
        return epoch_key(self.seed, self._epoch, self.epoch_seed, self.strategy)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._blocks = {False: (0, _NO_IDS), True: (0, _NO_IDS)}

    def _ids(self, batch_start: int, *, ahead: bool = False) -> Ids:
        """This rank's samples of the batch that starts at a place of the order.

        They come out of a block of the order that is kept; reading and looking ahead have one each.
        """
        start = batch_start + self._shift
        first, block = self._blocks[ahead]
        if not first <= start <= start + self._rows <= first + len(block):
            size = min(max(self._rows, _ORDER_BLOCK if len(block) else _FIRST_BLOCK), self.samples - start)
            first, block = self._blocks[ahead] = start, self.order(start, size)
        return block[start - first : start - first + self._rows]

    def _too_few(self, world_size: int) -> UserError:
        fits = self.samples - self.samples % world_size
        smaller = f"Use loader.batch_size<={fits} or prepare" if fits else "Prepare"
        return UserError(
            f"loader.batch_size={self.batch_size} needs {self.batch_size} {self.sample_words}, but "
            f"{self.store.split} has {self.samples} ({self.store.manifest.path}): an epoch would have no "
            f"batch. {smaller} more text: python scripts/prepare_data.py corpus=..."
        )
