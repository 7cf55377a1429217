"""This project's loaders, over the sets that it writes: four shards, npy or HDF5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from harness.config_loaders import LoaderConfig, SlidingWindowConfig
from harness.loaders import make_loader
from harness.storage import open_split
from peers import BATCH_SIZE, SEED, SEQ_LEN, Pair, Reader


def write(tokens: np.ndarray, folder: Path) -> None:
    """The sets of a stream, and the plain tokens for the peers that read those."""
    from parts.bench_sets import write_sets  # and with it what prepares sets, which reading does not need

    write_sets(folder, tokens, SEQ_LEN + 1, storages=("npy", "hdf5"), layouts=("stream",))


class Loader(Reader):
    """`sequential`, or `sliding_window` in its order by permutation: each window once an epoch."""

    def __init__(self, folder: Path, *, shuffle: bool, storage: str, prefetch: int) -> None:
        sizes: dict[str, Any] = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "prefetch": prefetch}
        config = SlidingWindowConfig(**sizes, seed=SEED) if shuffle else LoaderConfig(**sizes)
        self.loader = make_loader(config, open_split(folder / f"{storage}-stream", "train"))
        self.epoch = 0

    def next_batch(self) -> Pair:
        try:
            batch = self.loader.next_batch()
        except StopIteration:
            self.epoch += 1
            self.loader.start_epoch(self.epoch)
            batch = self.loader.next_batch()
        return batch.inputs, batch.targets

    def state(self) -> bytes:
        return json.dumps(self.loader.state_dict()).encode()

    def seek(self, state: bytes) -> None:
        self.loader.load_state_dict(json.loads(state))

    def close(self) -> None:
        self.loader.close()
