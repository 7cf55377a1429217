"""grain, over ArrayRecord files and over a source of windows of a memory map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter
from grain.sources import ArrayRecordDataSource

from peers import BATCH_SIZE, SEED, SEQ_LEN, TOKENS_FILE, Pair, Reader, shifted

_SHARDS = 4


def write(tokens: np.ndarray, folder: Path) -> None:
    """A window a record, a record a group, as is advised for random access."""
    starts = range(0, len(tokens) - SEQ_LEN, SEQ_LEN)
    for shard, part in enumerate(np.array_split(np.array(starts), _SHARDS)):
        writer = ArrayRecordWriter(str(folder / f"train-{shard}.array_record"), "group_size:1")
        for start in part:
            writer.write(tokens[start : start + SEQ_LEN + 1].tobytes())
        writer.close()


class _Windows:
    """A source of windows: a memory map behind `len` and `[]`."""

    def __init__(self, file: Path) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> np.ndarray:
        window: np.ndarray = self.tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1]
        return window


class _Batches(Reader):
    """Batches are made before `to_iter_dataset`, so that its threads make whole batches: made behind it, they
    are made by the caller's thread from single elements, which was 1.2 to 3 times slower."""

    def _read(self, windows: Any, shuffle: bool, options: grain.ReadOptions) -> None:
        windows = windows.seed(SEED)
        windows = windows.shuffle() if shuffle else windows
        batches = windows.batch(BATCH_SIZE, drop_remainder=True)
        self.batches = iter(batches.repeat().to_iter_dataset(options))

    def next_batch(self) -> Pair:
        return shifted(torch.from_numpy(next(self.batches)))

    def state(self) -> bytes:
        return json.dumps(self.batches.get_state()).encode()

    def state_after(self, batches: int) -> bytes:
        return json.dumps(self.batches.get_state() | {"next_index": batches}).encode()

    def seek(self, state: bytes) -> None:
        self.batches.set_state(json.loads(state))

    def close(self) -> None:
        del self.batches  # ends the threads


class ArrayRecord(_Batches):
    """grain's 16 threads, and as many batches ahead: the 500 of its default would be 128 MB of batches."""

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        source = ArrayRecordDataSource(sorted(map(str, folder.glob("*.array_record"))))
        records = grain.MapDataset.source(source).map(lambda record: np.frombuffer(record, np.uint16))
        self._read(records, shuffle, grain.ReadOptions(num_threads=16, prefetch_buffer_size=16))


class Memmap(_Batches):
    """No threads, as grain's documentation advises for data that is in memory."""

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        source = grain.MapDataset.source(_Windows(folder / TOKENS_FILE))
        self._read(source, shuffle, grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
