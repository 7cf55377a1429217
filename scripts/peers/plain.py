"""Reading without a library, and by PyTorch's own loader: what most training scripts do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from peers import BATCH_SIZE, BATCH_TOKENS, SEED, SEQ_LEN, TOKENS_FILE, Pair, Reader, endless, in_a_row


class Memmap(Reader):
    """A slice of a map that stays open, cast to int64: the least code there is. Its position is one's own."""

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        assert not shuffle
        self.tokens = np.memmap(folder / TOKENS_FILE, dtype=np.uint16, mode="r")
        self.batch = 0

    def next_batch(self) -> Pair:
        at = self.batch * BATCH_TOKENS
        self.batch = (self.batch + 1) % ((len(self.tokens) - 1) // BATCH_TOKENS)
        return in_a_row(self.tokens[at : at + BATCH_TOKENS + 1])

    def state(self) -> bytes:
        return str(self.batch).encode()

    def seek(self, state: bytes) -> None:
        self.batch = int(state)


class NamedMemmap(Memmap):
    """The same with a state that says which data it belongs to: the SHA-256 of this project's manifest of the
    same tokens, whose shards' headers are read, too. Nothing else is checked: what naming the data takes at
    least."""

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        super().__init__(folder, shuffle=shuffle)
        manifest = json.loads((folder / "npy-stream" / "metadata.json").read_bytes())
        self.digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        for shard in manifest["splits"]["train"]["shards"]:
            with open(folder / "npy-stream" / shard["file"], "rb", buffering=0) as file:
                assert file.read(128).startswith(b"\x93NUMPY")

    def state(self) -> bytes:
        return json.dumps({"batch": self.batch, "digest": self.digest}).encode()

    def seek(self, state: bytes) -> None:
        saved = json.loads(state)
        assert saved["digest"] == self.digest
        self.batch = saved["batch"]


class NanoGPT(Reader):
    """A new map for each batch, starts at random with replacement, a tensor a row, stacked.

    As in `get_batch` of https://github.com/karpathy/nanoGPT, which opens anew so that pages that were read do
    not count as the process's memory. There is no epoch and no position, so nothing to resume from.
    """

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        assert shuffle
        self.file = folder / TOKENS_FILE

    def next_batch(self) -> Pair:
        tokens = np.memmap(self.file, dtype=np.uint16, mode="r")
        starts = torch.randint(len(tokens) - SEQ_LEN, (BATCH_SIZE,))  # used one by one, as tensors, as there
        return self._rows(tokens, starts), self._rows(tokens, starts + 1)

    def _rows(self, tokens: np.ndarray, starts: torch.Tensor) -> torch.Tensor:
        rows = [tokens[start : start + SEQ_LEN].astype(np.int64) for start in starts]
        return torch.stack([torch.from_numpy(row) for row in rows])


class Windows(Dataset[Pair]):
    """The windows of a file, one at a time, a token shared between neighbours."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.memmap(folder / TOKENS_FILE, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> Pair:
        window = self.tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


class TorchLoader(Reader):
    """`torch.utils.data.DataLoader`, its workers' prefetch as it comes. It has no state: to resume is to
    read again from the start of the epoch, in the order of a generator whose seed one's own code keeps."""

    def __init__(self, folder: Path, *, shuffle: bool, workers: int) -> None:
        self.windows, self.shuffle, self.workers = Windows(folder), shuffle, workers
        self._start()

    def _start(self) -> None:
        loader = DataLoader(
            self.windows,
            BATCH_SIZE,
            shuffle=self.shuffle,
            num_workers=self.workers,
            drop_last=True,
            generator=torch.Generator().manual_seed(SEED),
        )
        self.batches = endless(loader)
        self.read = 0

    def next_batch(self) -> Pair:
        self.read += 1
        inputs, targets = next(self.batches)
        return inputs, targets

    def state(self) -> bytes:
        return str(self.read).encode()

    def seek(self, state: bytes) -> None:
        self.close()
        self._start()
        for _ in range(int(state)):
            self.next_batch()

    def close(self) -> None:
        del self.batches  # ends the workers
