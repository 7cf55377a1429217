"""mosaicml-streaming: samples of 1025 tokens in MDS shards, all of them local."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

# ruff: noqa: E402
# Its image datasets import torchvision, which ends in an error where that was built for another torch; and
# what they take counts for nothing where tokens are read.
sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from peers import BATCH_SIZE, SEED, SEQ_LEN, Pair, Reader, endless, shifted


def write(tokens: np.ndarray, folder: Path) -> None:
    """Windows that share a token with the next, as arrays of a fixed shape: its leanest encoding."""
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}) as writer:
        for start in range(0, len(tokens) - SEQ_LEN, SEQ_LEN):
            writer.write({"tokens": tokens[start : start + SEQ_LEN + 1]})


class Mds(Reader):
    """Its dataset and its loader, shuffled by its default algorithm, py1e; `batch_size` is told to both."""

    def __init__(self, folder: Path, *, shuffle: bool, workers: int) -> None:
        self.dataset = StreamingDataset(
            local=str(folder), shuffle=shuffle, shuffle_seed=SEED, batch_size=BATCH_SIZE
        )
        self.loader = StreamingDataLoader(
            self.dataset, batch_size=BATCH_SIZE, num_workers=workers, drop_last=True
        )
        self.batches = endless(self.loader)

    def next_batch(self) -> Pair:
        return shifted(next(self.batches)["tokens"])

    def state(self) -> bytes:
        return json.dumps(self.loader.state_dict()).encode()

    def state_after(self, batches: int) -> bytes:
        return json.dumps(self.dataset.state_dict(batches * BATCH_SIZE, from_beginning=True)).encode()

    def seek(self, state: bytes) -> None:
        self.loader.load_state_dict(json.loads(state))
        self.batches = endless(self.loader)

    def close(self) -> None:
        del self.batches, self.loader, self.dataset  # ends the workers, takes its shared memory back
