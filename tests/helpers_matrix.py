"""Every storage and every loader over one small corpus: the pairs that the proofs go through."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.config import PrepareScriptConfig, TrainConfig, layout, set_directory
from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    DataConfig,
    Hdf5DataConfig,
    LoaderConfig,
    PaddedRowsConfig,
    PrepareConfig,
    SlidingWindowConfig,
)
from harness.prepare import prepare
from tests.helpers_prepare import text, texts, write_texts
from tests.helpers_runs import tiny_config

STORAGES = {
    "npy": DataConfig(),
    "hdf5": Hdf5DataConfig(chunk_tokens=100),
    "hdf5-gzip": Hdf5DataConfig(chunk_tokens=100, compression="gzip"),
}
SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 8}
LOADERS: dict[str, LoaderConfig] = {
    "sequential": LoaderConfig(**SIZES),
    "permutation": SlidingWindowConfig(stride=13, **SIZES),
    "ordered": SlidingWindowConfig(sampling="ordered", mask_boundary="target", **SIZES),
    "uniform": SlidingWindowConfig(sampling="uniform", **SIZES),
    "padded_rows": PaddedRowsConfig(**SIZES),
    "block_shuffle": BlockShuffleConfig(window_tokens=320, **SIZES),
    "contrastive_rows": ContrastiveRowsConfig(**SIZES),
}


@dataclasses.dataclass(frozen=True)
class Sets:
    """A corpus of `documents` texts in `folder`, and the sets prepared from it below `data.root`."""

    folder: Path
    documents: int
    shard_tokens: int

    @property
    def root(self) -> Path:
        return self.folder / "data"

    @property
    def prepare(self) -> PrepareConfig:
        return PrepareConfig(val_fraction=0.3, shard_tokens=self.shard_tokens, workers=1)

    def make(self, storages: Iterable[str] = STORAGES, loaders: Iterable[str] = LOADERS) -> Sets:
        """Prepare one set for each storage and each layout that a loader reads."""
        corpus = text(write_texts(self.folder / "corpus", texts(self.documents)))
        layouts = {layout(LOADERS[name]): LOADERS[name] for name in loaders}
        for storage in storages:
            for loader in layouts.values():
                data = dataclasses.replace(STORAGES[storage], root=str(self.root))
                config = PrepareScriptConfig(data=data, corpus=corpus, prepare=self.prepare, loader=loader)
                prepare(config, report=lambda line: None)
        return self

    def config(self, storage: str, loader: str, **changes: Any) -> TrainConfig:
        """A tiny run of that pair; `changes` as of `tiny_config`."""
        return tiny_config(
            self.root,
            data=dataclasses.replace(STORAGES[storage], root=str(self.root)),
            loader=dataclasses.replace(LOADERS[loader]),
            corpus=text(self.folder / "corpus"),
            prepare=self.prepare,
            **changes,
        )

    def directory(self, storage: str, loader: str) -> Path:
        return set_directory(self.config(storage, loader))
