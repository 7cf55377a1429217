"""litdata's TokensLoader: chunks of tokens, cut into blocks when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from peers import BATCH_SIZE, SEED, SEQ_LEN, TOKENS_FILE, Pair, Reader, endless, shifted

_BLOCK = SEQ_LEN + 1
_CHUNK = 8192 * _BLOCK  # tokens: 16 MiB, a whole number of blocks, since the rest of a chunk is dropped


def write(tokens: np.ndarray, folder: Path) -> None:
    """One worker that appends chunk after chunk, so that they stay in order."""
    file = folder.parent / "ours" / TOKENS_FILE
    starts = list(range(0, len(tokens) - _BLOCK + 1, _CHUNK))
    optimize(
        partial(_chunk, file),
        starts,
        str(folder),
        chunk_size=_CHUNK,
        item_loader=TokensLoader(),
        num_workers=1,
        keep_data_ordered=True,
        reorder_files=False,
        verbose=False,
    )


def _chunk(file: Path, start: int) -> Iterator[torch.Tensor]:
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    count = min(_CHUNK, (len(tokens) - start) // _BLOCK * _BLOCK)
    yield torch.from_numpy(np.array(tokens[start : start + count]))


class Tokens(Reader):
    """Blocks of 1025 tokens, which do not overlap: a block's last token is never an input."""

    def __init__(self, folder: Path, *, shuffle: bool, workers: int) -> None:
        dataset = StreamingDataset(
            str(folder), item_loader=TokensLoader(_BLOCK), shuffle=shuffle, drop_last=True, seed=SEED
        )
        self.loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, drop_last=True)
        self.batches = endless(self.loader)

    def next_batch(self) -> Pair:
        return shifted(next(self.batches))

    def state(self) -> bytes:
        return json.dumps(self.loader.state_dict()).encode()

    def seek(self, state: bytes) -> None:
        self.loader.load_state_dict(json.loads(state))
        self.batches = endless(self.loader)

    def close(self) -> None:
        del self.batches, self.loader  # ends the workers
