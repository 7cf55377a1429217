"""megatron-core: IndexedDataset in order, and GPTDataset, which always shuffles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from torch.utils.data import DataLoader

from peers import BATCH_SIZE, BATCH_TOKENS, SEED, SEQ_LEN, Pair, Pieces, Reader, in_a_row

_DOCUMENT = 1 << 20  # tokens: few long documents, so that nearly every sample is one slice


def write(tokens: np.ndarray, folder: Path) -> None:
    """The .bin and .idx files, and the cache of indices, which a first start would have to build."""
    builder = IndexedDatasetBuilder(str(folder / "train.bin"), dtype=np.uint16)
    for start in range(0, len(tokens), _DOCUMENT):
        document = tokens[start : start + _DOCUMENT]
        builder.add_document(document, [len(document)])
    builder.finalize(str(folder / "train.idx"))
    _dataset(folder)


class Indexed(Reader):
    """`IndexedDataset.get`: a slice of a document a batch, cast to int64. Its position is one's own."""

    def __init__(self, folder: Path, *, shuffle: bool) -> None:
        assert not shuffle
        self.dataset = IndexedDataset(str(folder / "train"))
        self.places = Pieces(self.dataset.sequence_lengths.tolist())
        self.batch = 0

    def next_batch(self) -> Pair:
        document, at = self.places[self.batch]
        self.batch += 1
        return in_a_row(self.dataset.get(document, at, BATCH_TOKENS + 1))

    def state(self) -> bytes:
        return str(self.batch).encode()

    def seek(self, state: bytes) -> None:
        self.batch = int(state)


class Gpt(Reader):
    """Samples of GPTDataset in the order of its shuffled index, through torch's DataLoader as its recipes do.

    No attention mask is made, as for a causal kernel; the loss mask and the positions, which it makes for
    every sample, are. Its state is the number of consumed samples, where its sampler goes on.
    """

    def __init__(self, folder: Path, *, shuffle: bool, workers: int) -> None:
        assert shuffle
        self.dataset, self.workers = _dataset(folder), workers
        self._start(0)

    def _start(self, consumed: int) -> None:
        self.consumed = consumed
        order = self._order(consumed)
        self.batches = iter(DataLoader(self.dataset, batch_sampler=order, num_workers=self.workers))

    def _order(self, consumed: int) -> Any:
        return _Consecutive(len(self.dataset) // BATCH_SIZE, consumed // BATCH_SIZE)

    def next_batch(self) -> Pair:
        batch = next(self.batches)
        self.consumed += BATCH_SIZE
        return batch["tokens"], batch["labels"]

    def state(self) -> bytes:
        return str(self.consumed).encode()

    def state_after(self, batches: int) -> bytes:
        return str(batches * BATCH_SIZE).encode()

    def seek(self, state: bytes) -> None:
        self._start(int(state))

    def close(self) -> None:
        del self.batches  # ends the workers


class _Consecutive:
    """Batches of consecutive indices, from `first` on, over and over: what its pre-training sampler does."""

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __iter__(self) -> Iterator[list[int]]:
        batch = self.first
        while True:
            at = batch % self.count * BATCH_SIZE
            yield list(range(at, at + BATCH_SIZE))
            batch += 1


def _dataset(folder: Path) -> GPTDataset:
    logging.getLogger("megatron").setLevel(logging.ERROR)
    tokens = (folder / "train.bin").stat().st_size // 2
    tokenizer = SimpleNamespace(eod=0, pad=-1, vocab_size=50_257, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LEN,
        blend=([str(folder / "train")], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.0,
    )
    sizes = [(tokens - 1) // SEQ_LEN, 0, 0]
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    dataset: GPTDataset = built[0]
    return dataset
