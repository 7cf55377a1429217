"""A set that grows: what it held stays byte for byte, what is new comes behind it, nothing is added twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config_groups import (
    ContrastiveRowsConfig,
    DataConfig,
    Hdf5DataConfig,
    LoaderConfig,
    PaddedRowsConfig,
)
from harness.prepare import Summary, prepare
from harness.storage.manifest import load_manifest
from tests.helpers_prepare import (
    config_of,
    text,
    texts,
    write_texts,
)

SETTINGS: dict[str, Any] = {"shard_tokens": 1000, "val_fraction": 0.3}
KINDS = {
    "npy": (DataConfig(), LoaderConfig()),
    "hdf5": (Hdf5DataConfig(chunk_tokens=64), LoaderConfig()),
    "gzip": (Hdf5DataConfig(chunk_tokens=64, compression="gzip"), LoaderConfig()),
    "rows": (DataConfig(), PaddedRowsConfig(row_width=17, seq_len=16)),
    "hdf5-rows": (Hdf5DataConfig(), PaddedRowsConfig(row_width=17, seq_len=16)),
    "pairs": (DataConfig(), ContrastiveRowsConfig(row_width=17, seq_len=16)),
}


def made(directory: Path, corpus: Any, kind: str = "npy", **settings: Any) -> tuple[Summary, list[str]]:
    config = config_of(directory, corpus, **SETTINGS | settings)
    data, config.loader = KINDS[kind]
    config.data = type(data)(**vars(data) | {"path": str(directory)})
    said: list[str] = []
    return prepare(config, report=said.append), said


def shard_files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix in (".npy", ".h5")}


@pytest.mark.parametrize("kind", KINDS)
def test_old_shards_are_a_prefix_byte_for_byte(tmp_path: Path, kind: str) -> None:
    folder = write_texts(tmp_path / "texts", texts(60))
    corpus = text(folder)
    first, _ = made(tmp_path / "set", corpus, kind)
    old, before = shard_files(tmp_path / "set"), load_manifest(tmp_path / "set").splits
    for index, document in enumerate(texts(40, seed=1)):
        (folder / f"new{index}.txt").write_text(document)
    second, said = made(tmp_path / "set", corpus, kind, append=True)
    assert said == [f"{tmp_path / 'set'}: adding 40 of 100 files of the corpus"]
    assert second.digest != first.digest
    assert old.items() < shard_files(tmp_path / "set").items()
    for name, split in load_manifest(tmp_path / "set").splits.items():
        assert split.shards[: len(before[name].shards)] == before[name].shards
        assert len(split.shards) > len(before[name].shards)
    again, said = made(tmp_path / "set", corpus, kind, append=True)
    assert (again.digest, again.already_there) == (second.digest, True)
    assert said == [f"{tmp_path / 'set'}: nothing to add, the set has all 100 files of the corpus"]
