"""Every storage with every loader: the same batches, and a resume that no batch and no weight shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.config import PrepareScriptConfig, TrainConfig, layout
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
from harness.data_chain import batch_sha256
from harness.loaders import make_loader
from harness.prepare import prepare
from harness.storage import open_split
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import text, texts, write_texts
from tests.helpers_runs import run, tiny_config, train_rows, weights

STORAGES = {
    "npy": DataConfig(),
    "hdf5": Hdf5DataConfig(chunk_tokens=100),
    "hdf5-gzip": Hdf5DataConfig(chunk_tokens=100, compression="gzip"),
}
SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 4}
LOADERS: dict[str, LoaderConfig] = {
    "sequential": LoaderConfig(**SIZES),
    "permutation": SlidingWindowConfig(stride=7, **SIZES),
    "ordered": SlidingWindowConfig(sampling="ordered", **SIZES),
    "uniform": SlidingWindowConfig(sampling="uniform", **SIZES),
    "padded_rows": PaddedRowsConfig(**SIZES),
    "block_shuffle": BlockShuffleConfig(window_tokens=320, **SIZES),
    "contrastive_rows": ContrastiveRowsConfig(**SIZES),
}
PREPARE = PrepareConfig(val_fraction=0.3, shard_tokens=900, workers=1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("corpus"), texts(40))


@pytest.fixture(scope="module")
def sets(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A set for each storage and layout, prepared from one corpus."""
    folder = tmp_path_factory.mktemp("sets")
    result = {}
    for storage, data in STORAGES.items():
        for name in ("sequential", "padded_rows", "contrastive_rows"):
            loader = LOADERS[name]
            path = folder / f"{storage}-{layout(loader)}"
            config = PrepareScriptConfig(
                data=dataclasses.replace(data, path=str(path)),
                corpus=text(corpus),
                prepare=PREPARE,
                loader=loader,
            )
            prepare(config, report=lambda line: None)
            result[storage, layout(loader)] = path
    return result


def batch_hashes(directory: Path, config: LoaderConfig, epochs: int = 2) -> list[str]:
    """The hash of every batch of the first epochs."""
    store = open_split(directory, "train")
    hashes = []
    with make_loader(config, store) as loader:
        for epoch in range(epochs):
            loader.start_epoch(epoch)
            hashes += [batch_sha256(loader.next_batch()) for _ in range(loader.batches_per_epoch)]
            with pytest.raises(StopIteration):
                loader.next_batch()
    store.close()
    return hashes


@pytest.mark.parametrize("name", LOADERS)
def test_every_storage_gives_the_same_batches(name: str, sets: dict[tuple[str, str], Path]) -> None:
    config = LOADERS[name]
    paths = [sets[storage, layout(config)] for storage in STORAGES]
    first, *others = [batch_hashes(path, config) for path in paths]
    assert len(first) > 10
    assert len(set(first)) >= len(first) // 2  # an order that is the same in each epoch repeats itself
    assert all(other == first for other in others)
    digests = [load_manifest(path) for path in paths]
    assert digests[0].content_sha256 is not None
    assert len({manifest.content_sha256 for manifest in digests}) == 1
    assert len({manifest.metadata_sha256 for manifest in digests}) == len(STORAGES)
    assert any(len(split.shards) > 1 for split in digests[0].splits.values())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LOADERS)
def test_resume_is_bit_exact_for_every_storage_and_loader(
    storage: str, name: str, sets: dict[tuple[str, str], Path], corpus: Path, tmp_path: Path
) -> None:
    def config(**changes: object) -> TrainConfig:
        config = tiny_config(sets[storage, layout(LOADERS[name])], evaluation__interval=4, **changes)
        config.data = dataclasses.replace(STORAGES[storage], path=config.data.path)
        config.corpus, config.prepare, config.loader = text(corpus), PREPARE, LOADERS[name]
        return config

    run(config(trainer__max_steps=8, schedule__total_steps=8), tmp_path / "straight")
    run(config(trainer__max_steps=3, schedule__total_steps=8), tmp_path / "run")
    resumed = config(trainer__max_steps=8, schedule__total_steps=8, resume=str(tmp_path / "run"))
    run(resumed, tmp_path / "run")
    assert train_rows(tmp_path / "run") == train_rows(tmp_path / "straight")
    assert weights(tmp_path / "run", 8) == weights(tmp_path / "straight", 8)
