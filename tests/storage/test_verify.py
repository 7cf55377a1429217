"""Every flipped bit of a token, a mask or a file is found, and named by its file and place."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
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
from harness.files import write_atomic
from harness.prepare import prepare
from harness.storage import verify
from harness.storage.manifest import load_manifest
from harness.storage.verify import REMEMBERED, ensure_verified, is_remembered, verify_set
from tests.helpers_forks import ROOT, forked
from tests.helpers_prepare import text, texts, write_texts

STREAM, ROWS, PAIRS = (kind(seq_len=16) for kind in (LoaderConfig, PaddedRowsConfig, ContrastiveRowsConfig))
HDF5, GZIP = Hdf5DataConfig(chunk_tokens=128), Hdf5DataConfig(chunk_tokens=128, compression="gzip")
KINDS: dict[str, tuple[DataConfig, LoaderConfig]] = {
    f"{storage}-{layout(loader)}": (data, loader)
    for storage, data in (("npy", DataConfig()), ("hdf5", HDF5), ("hdf5-gzip", GZIP))
    for loader in (STREAM, ROWS, PAIRS)
}
PLAIN = [kind for kind in KINDS if "gzip" not in kind]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A set of several shards for each kind."""
    folder = tmp_path_factory.mktemp("sets")
    corpus = text(write_texts(folder / "corpus", texts(30)))
    result = {}
    for kind, (data, loader) in KINDS.items():
        result[kind] = folder / kind
        config = PrepareScriptConfig(
            data=dataclasses.replace(data, path=str(folder / kind)),
            corpus=corpus,
            loader=loader,
            prepare=PrepareConfig(val_fraction=0.3, shard_tokens=1000, workers=1),
        )
        prepare(config, report=lambda line: None)
    return result


@pytest.fixture
def copy(sets: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the set that the test is parametrized with."""
    return Path(shutil.copytree(sets[request.param], tmp_path / request.param))


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def data_ranges(directory: Path) -> list[tuple[Path, int, int]]:
    """Where tokens and masks lie: file, first byte, number of bytes."""
    ranges = []
    for path in sorted(directory.glob("*.npy")):
        size = path.stat().st_size
        ranges.append((path, 128, size - 128))
    for path in sorted(directory.glob("*.h5")):
        with h5py.File(path) as file:
            for dataset in file.values():
                if dataset.chunks is None:
                    ranges.append((path, dataset.id.get_offset(), dataset.nbytes))
                    continue
                for index in range(dataset.id.get_num_chunks()):
                    chunk = dataset.id.get_chunk_info(index)
                    used = min(dataset.chunks[0], dataset.shape[0] - chunk.chunk_offset[0])
                    ranges.append((path, chunk.byte_offset, used * dataset.dtype.itemsize))
    return [item for item in ranges if item[2]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_set_is_as_promised(kind: str, sets: dict[str, Path]) -> None:
    result = verify_set(sets[kind])
    assert result.faults == []
    assert result.shards >= 3
    assert result.files >= result.shards
    assert is_remembered(load_manifest(sets[kind]))


@pytest.mark.parametrize("copy", PLAIN, indirect=True)
def test_a_flipped_bit_of_any_token_or_mask_is_found_by_file_and_range(copy: Path) -> None:
    chance, ranges = random.Random(copy.name), data_ranges(copy)
    weights = [length for _, _, length in ranges]
    (copy / "provenance.json").unlink()  # the tokens' own hashes must find it
    for _ in range(100):
        path, first, length = chance.choices(ranges, weights)[0]
        position, bit = first + chance.randrange(length), chance.randrange(8)
        flip(path, position, bit)
        faults = verify_set(copy).faults
        assert any(path.name in fault and " of " in fault for fault in faults), (path, position, bit)
        assert all(path.name.split(".")[0] in fault for fault in faults)
        flip(path, position, bit)
    assert verify_set(copy).ok


@pytest.mark.parametrize("copy", [kind for kind in KINDS if "gzip" in kind], indirect=True)
def test_a_flipped_bit_of_a_compressed_chunk_is_found(copy: Path) -> None:
    chance, paths = random.Random(copy.name), sorted(copy.glob("*.h5"))
    for _ in range(20):
        path = chance.choice(paths)
        with h5py.File(path) as file:
            dataset = chance.choice([d for d in file.values() if d.id.get_num_chunks()])
            chunk = dataset.id.get_chunk_info(chance.randrange(dataset.id.get_num_chunks()))
        position, bit = chunk.byte_offset + chance.randrange(chunk.size), chance.randrange(8)
        flip(path, position, bit)
        assert any(path.name in fault for fault in verify_set(copy).faults), (path, position, bit)
        flip(path, position, bit)


@pytest.mark.parametrize("copy", KINDS, indirect=True)
def test_a_flipped_bit_anywhere_in_a_file_is_found_by_the_whole_files_hash(copy: Path) -> None:
    chance = random.Random(copy.name)
    paths = sorted(path for path in copy.iterdir() if path.suffix in (".npy", ".h5"))
    for _ in range(20):
        path = chance.choice(paths)
        position, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        flip(path, position, bit)
        faults = verify_set(copy).faults
        assert any(f"{path}: the whole file has SHA-256" in fault for fault in faults), (path, position)
        flip(path, position, bit)


@pytest.mark.parametrize("copy", ["npy-stream", "hdf5-rows"], indirect=True)
def test_every_fault_is_in_one_report(copy: Path) -> None:
    manifest = load_manifest(copy)
    train, val = (manifest.splits[split].shards for split in ("train", "val"))
    path, first, _ = next(item for item in data_ranges(copy) if item[0].name == train[0].file)
    flip(path, first, 0)
    (copy / train[1].file).unlink()
    os.truncate(copy / val[0].file, (copy / val[0].file).stat().st_size - 2)
    (copy / "train_00099.npy").write_bytes(b"left over")
    faults = "\n".join(verify_set(copy).faults)
    for name in (train[0].file, train[1].file, val[0].file, "train_00099.npy"):
        assert name in faults
    assert str(train[0].sha256) in faults or str(train[0].mask_sha256) in faults
    assert "belongs to no split" in faults


@pytest.mark.parametrize("copy", ["npy-rows"], indirect=True)
def test_a_mask_that_is_no_mask_and_a_wrong_count_are_found(copy: Path) -> None:
    shard = load_manifest(copy).splits["train"].shards[0]
    assert shard.mask_file is not None
    mask = np.load(copy / shard.mask_file)
    raw = bytearray((copy / shard.mask_file).read_bytes())
    raw[128] = 2
    (copy / shard.mask_file).write_bytes(raw)
    assert any(shard.mask_file in fault and "2" in fault for fault in verify_set(copy).faults)
    mask[0, 0] = not mask[0, 0]
    np.save(copy / shard.mask_file, mask)
    assert any("true mask entries" in fault for fault in verify_set(copy).faults)


@pytest.mark.parametrize("copy", ["npy-stream"], indirect=True)
def test_a_run_hashes_a_set_once_and_again_when_a_file_changed(copy: Path) -> None:
    manifest = load_manifest(copy)
    said: list[str] = []
    ensure_verified(manifest, "full", said.append)
    ensure_verified(manifest, "full", said.append)
    assert len(said) == 1  # a copy has other inodes than the set that was hashed while it was written
    assert is_remembered(manifest)
    shard = copy / manifest.splits["train"].shards[1].file
    flip(shard, 200, 3)
    ensure_verified(manifest, "headers", said.append)
    assert len(said) == 1
    with pytest.raises(UserError, match="does not hold the tokens it promises") as caught:
        ensure_verified(manifest, "full", said.append)
    assert str(shard) in str(caught.value)
    assert "prepare.overwrite=true" in str(caught.value)
    flip(shard, 200, 3)
    ensure_verified(manifest, "full", said.append)


@pytest.mark.parametrize("copy", ["npy-stream"], indirect=True)
def test_what_is_remembered_is_of_this_very_set(copy: Path) -> None:
    ensure_verified(load_manifest(copy), "full", lambda line: None)
    path = copy / "metadata.json"
    raw = json.loads(path.read_text())
    raw["preparation"]["note"] = "another set"
    path.write_text(json.dumps(raw))
    assert not is_remembered(load_manifest(copy))
    (copy / REMEMBERED).write_text("{broken")
    assert not is_remembered(load_manifest(copy))


@pytest.mark.parametrize("copy", ["npy-stream"], indirect=True)
def test_shards_without_a_hash_are_said_and_not_remembered_as_verified(copy: Path) -> None:
    path = copy / "metadata.json"
    raw = json.loads(path.read_text())
    del raw["splits"]["train"]["shards"][0]["sha256"]
    path.write_text(json.dumps(raw))
    (copy / REMEMBERED).unlink()
    result = verify_set(copy)
    assert (result.faults, result.unhashed) == ([], 1)
    assert not (copy / REMEMBERED).exists()
    said: list[str] = []
    ensure_verified(load_manifest(copy), "full", said.append)
    assert any("have no hash" in line for line in said)


def in_thread_of(hashing: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `act` happen after the shards were hashed, before the result is written down."""
    original = getattr(verify, hashing)

    def changed(*args: object) -> object:
        result = original(*args)
        act()
        return result

    monkeypatch.setattr(verify, hashing, changed)


@pytest.mark.parametrize("copy", ["npy-stream"], indirect=True)
def test_a_file_that_changes_while_it_is_hashed_is_not_remembered_as_verified(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / REMEMBERED).unlink()
    shard = copy / "train_00000.npy"
    in_thread_of("_foreign_files", lambda: flip(shard, 200, 0), monkeypatch)
    assert verify_set(copy).ok
    monkeypatch.undo()
    assert not is_remembered(load_manifest(copy))
    assert not verify_set(copy).ok


@pytest.mark.parametrize("copy", ["npy-stream"], indirect=True)
def test_a_set_that_is_replaced_meanwhile_is_said_to_be(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy / "metadata.json"
    in_thread_of("_foreign_files", lambda: write_atomic(path, path.read_text() + " "), monkeypatch)
    with pytest.raises(UserError, match="was replaced while"):
        verify_set(copy)


def script(*words: object) -> subprocess.CompletedProcess[str]:
    return forked("scripts/verify_data.py", *map(str, words), cwd=ROOT)


@pytest.mark.parametrize("copy", ["npy-stream"], indirect=True)
def test_one_missing_set_hides_no_fault_of_another_and_a_set_is_itself_wherever_it_lies(copy: Path) -> None:
    (copy.parent / "config.yaml").write_text("no: run")
    assert script(copy).returncode == 0
    missing = copy.parent / "missing"
    said = script(missing, copy)
    assert (said.returncode, "as promised" in said.stdout, str(missing) in said.stderr) == (2, True, True)
    (copy / "train_00000.npy").unlink()
    said = script(missing, copy)
    assert (said.returncode, "FAULT" in said.stdout, "Traceback" in said.stderr) == (1, True, False)
