"""torchdata's StatefulDataLoader over the same windows as torch's DataLoader."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from peers import BATCH_SIZE, SEED, Pair, Reader, endless
from peers.plain import Windows


class Stateful(Reader):
    """A dataset of windows without state of its own, so that a sampler's position is all that has to move."""

    def __init__(self, folder: Path, *, shuffle: bool, workers: int) -> None:
        self.loader = StatefulDataLoader(
            Windows(folder),
            BATCH_SIZE,
            shuffle=shuffle,
            num_workers=workers,
            drop_last=True,
            generator=torch.Generator().manual_seed(SEED),
        )
        self.batches = endless(self.loader)

    def next_batch(self) -> Pair:
        inputs, targets = next(self.batches)
        return inputs, targets

    def state(self) -> bytes:
        return pickle.dumps(self.loader.state_dict())

    def seek(self, state: bytes) -> None:
        self.loader.load_state_dict(pickle.loads(state))
        self.batches = endless(self.loader)

    def close(self) -> None:
        del self.batches, self.loader  # ends the workers
