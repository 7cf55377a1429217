"""h5py's slices of the HDF5 shards that the project itself writes: contiguous chunks of 65,536 tokens."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import torch

from peers import BATCH_SIZE, BATCH_TOKENS, SEED, SEQ_LEN, Pair, Pieces, Reader, in_a_row, shifted


class Slices(Reader):
    """Files that stay open; a slice a batch in order, or a slice a window at random with replacement.

    At random the chunk cache is off: with it each window of 2 KiB would copy a chunk of 128 KiB into the
    cache first, which halves the speed. Windows lie in one shard, as batches do.
    """

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        paths = sorted((folder / "hdf5-stream").glob("train_*.h5"))
        cache = {"rdcc_nbytes": 1} if shuffle else {}
        self.files = [h5py.File(path, "r", **cache) for path in paths]
        self.sets = [file["tokens"] for file in self.files]
        self.shuffle = shuffle
        self.rng = np.random.default_rng(SEED)
        self.places = Pieces(map(len, self.sets))
        self.batch = 0

    def next_batch(self) -> Pair:
        if self.shuffle:
            windows = np.stack([self._window() for _ in range(BATCH_SIZE)])
            return shifted(torch.from_numpy(windows.astype(np.int64)))
        shard, at = self.places[self.batch]
        self.batch += 1
        return in_a_row(self.sets[shard][at : at + BATCH_TOKENS + 1])

    def _window(self) -> np.ndarray:
        tokens = self.sets[self.rng.integers(len(self.sets))]
        at = self.rng.integers(len(tokens) - SEQ_LEN)
        window: np.ndarray = tokens[at : at + SEQ_LEN + 1]
        return window

    def state(self) -> bytes | None:
        return None if self.shuffle else str(self.batch).encode()

    def seek(self, state: bytes) -> None:
        self.batch = int(state)

    def close(self) -> None:
        for file in self.files:
            file.close()
