"""Every storage with every loader: the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.auditing.data_chain import batch_sha256
from harness.config_groups import LoaderConfig
from harness.loaders import make_loader
from harness.storage import open_split
from harness.storage.manifest import load_manifest
from tests.helpers_matrix import LOADERS, STORAGES, Sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return Sets(tmp_path_factory.mktemp("sets"), documents=40, shard_tokens=900).make()


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
def test_every_storage_gives_the_same_batches(name: str, sets: Sets) -> None:
    paths = [sets.directory(storage, name) for storage in STORAGES]
    first, *others = [batch_hashes(path, LOADERS[name]) for path in paths]
    assert len(first) > 10
    assert len(set(first)) >= len(first) // 2  # an order that is the same in each epoch repeats itself
    assert all(other == first for other in others)
    digests = [load_manifest(path) for path in paths]
    assert digests[0].content_sha256 is not None
    assert len({manifest.content_sha256 for manifest in digests}) == 1
    assert len({manifest.metadata_sha256 for manifest in digests}) == len(STORAGES)
    assert any(len(split.shards) > 1 for split in digests[0].splits.values())
