"""Another storage is the same tokens: there and back again gives the same set."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from harness.config import PrepareScriptConfig, layout
from harness.config_groups import (
    ContrastiveRowsConfig,
    DataConfig,
    Hdf5DataConfig,
    LoaderConfig,
    PaddedRowsConfig,
    PrepareConfig,
)
from harness.errors import UserError
from harness.prepare import prepare
from harness.prepare.convert import convert, target_directory
from harness.storage.manifest import Manifest, load_manifest
from harness.storage.verify import verify_set
from tests.helpers_prepare import snapshot, text, texts, write_texts

LOADERS = [kind(seq_len=16) for kind in (LoaderConfig, PaddedRowsConfig, ContrastiveRowsConfig)]
HDF5, LZF = Hdf5DataConfig(chunk_tokens=128), Hdf5DataConfig(chunk_tokens=128, compression="lzf")


def prepared(folder: Path, data: DataConfig, loader: LoaderConfig) -> Path:
    corpus = folder / "corpus"
    if not corpus.exists():
        write_texts(corpus, texts(30))
    path = folder / f"{data.name}-{layout(loader)}"
    config = PrepareScriptConfig(
        data=dataclasses.replace(data, path=str(path)),
        corpus=text(corpus),
        loader=loader,
        prepare=PrepareConfig(val_fraction=0.3, shard_tokens=1000, workers=1),
    )
    prepare(config, report=lambda line: None)
    return path


def quietly(source: Path, target: Path, data: DataConfig) -> Manifest:
    return convert(source, target, data, report=lambda line: None)


def files(folder: Path) -> dict[str, str]:
    """The shards and the tokenizer's files by their hashes, and the manifest's digest."""
    others = ("metadata.json", "shards.json")
    shards = {name: digest for name, digest in snapshot(folder).items() if name not in others}
    return shards | {"manifest": load_manifest(folder).metadata_sha256}


@pytest.mark.parametrize("loader", LOADERS, ids=layout)
def test_a_converted_set_is_the_one_a_preparation_makes(loader: LoaderConfig, tmp_path: Path) -> None:
    source = prepared(tmp_path, DataConfig(), loader)
    for number, data in enumerate((HDF5, LZF)):
        there = quietly(source, tmp_path / f"there{number}", data)
        back = quietly(there.directory, tmp_path / f"back{number}", DataConfig())
        assert there.content_sha256 == back.content_sha256 == load_manifest(source).content_sha256
        assert files(back.directory) == files(source)
        assert verify_set(there.directory).ok
        assert verify_set(back.directory).ok
    (tmp_path / "directly").mkdir()
    directly = prepared(tmp_path / "directly", HDF5, loader)
    assert files(directly) == files(tmp_path / "there0")


def test_a_damaged_source_is_not_converted(tmp_path: Path) -> None:
    source = prepared(tmp_path, DataConfig(), LOADERS[0])
    shard = source / load_manifest(source).splits["train"].shards[1].file
    data = bytearray(shard.read_bytes())
    data[300] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="the source is damaged") as caught:
        quietly(source, tmp_path / "target", HDF5)
    assert str(shard) in str(caught.value)
    assert [path.name for path in tmp_path.glob("target*")] == ["target.lock"]


def test_nothing_is_replaced_by_a_conversion(tmp_path: Path) -> None:
    source = prepared(tmp_path, DataConfig(), LOADERS[0])
    target = quietly(source, tmp_path / "target", HDF5).directory
    before = snapshot(target)
    assert quietly(source, target, HDF5).metadata_sha256 == load_manifest(target).metadata_sha256
    with pytest.raises(UserError, match="already holds another set"):
        quietly(source, target, LZF)
    with pytest.raises(UserError, match="is the set that is to be converted"):
        quietly(source, source, HDF5)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a prepared set"):
        quietly(source, tmp_path / "notes", HDF5)
    assert snapshot(target) == before


def test_the_target_is_where_a_run_would_look_for_it(tmp_path: Path) -> None:
    stream = load_manifest(prepared(tmp_path, DataConfig(), LOADERS[0]))
    assert target_directory(stream, LZF) == tmp_path / "hdf5-lzf-stream"
    rows = load_manifest(prepared(tmp_path, DataConfig(), LOADERS[1]))
    assert target_directory(rows, HDF5) == tmp_path / "hdf5-rows17"
    assert target_directory(rows, Hdf5DataConfig(path="elsewhere")) == Path("elsewhere")


def test_a_set_in_the_targets_place_must_be_whole_and_mean_the_same(tmp_path: Path) -> None:
    source = prepared(tmp_path, DataConfig(), LOADERS[0])
    target = quietly(source, tmp_path / "target", HDF5).directory
    renamed = Path(shutil.copytree(target, tmp_path / "renamed"))
    raw = json.loads((renamed / "shards.json").read_text())
    raw["tokenizer"]["vocab_size"] = 300
    (renamed / "shards.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"already holds another set:\n  tokenizer: there .*300.*257"):
        quietly(source, renamed, HDF5)
    shard = target / load_manifest(target).splits["train"].shards[1].file
    shard.unlink()
    with pytest.raises(UserError, match="not whole") as caught:
        quietly(source, target, HDF5)
    assert str(shard) in str(caught.value)
