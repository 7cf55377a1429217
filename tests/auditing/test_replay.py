"""The batch of any step, past or future, can be made again from the run directory and the data alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.auditing.data_chain import batch_sha256
from harness.auditing.replay import SegmentReader, open_run, reader_of
from harness.config import TrainConfig
from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    DataConfig,
    Hdf5DataConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.errors import UserError
from harness.resuming import lineage
from harness.resuming.lineage import Segment
from harness.storage import open_split
from tests.helpers_runs import (
    run,
    tiny_config,
    train_rows,
    write_pair_set,
    write_row_set,
    write_text_set,
)
from tests.helpers_sets import write_set

SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 4}
LOADERS = {
    "sequential": LoaderConfig(**SIZES),
    "permutation": SlidingWindowConfig(stride=7, mask_boundary="target", **SIZES),
    "uniform": SlidingWindowConfig(sampling="uniform", **SIZES),
    "block_shuffle": BlockShuffleConfig(window_tokens=320, **SIZES),
    "padded_rows": PaddedRowsConfig(**SIZES),
    "contrastive_rows": ContrastiveRowsConfig(**SIZES),
}
STORAGES: dict[str, tuple[dict[str, Any], DataConfig]] = {
    "npy": ({"format": "npy"}, DataConfig()),
    "hdf5": ({"format": "hdf5"}, Hdf5DataConfig()),
    "gzip": (
        {"format": "hdf5", "compression": "gzip", "chunk_tokens": 64},
        Hdf5DataConfig(compression="gzip", chunk_tokens=64),
    ),
}


def _config(folder: Path, storage: str, name: str) -> TrainConfig:
    """A run that ends inside its third epoch or later, over a set that is written here."""
    raw, data = STORAGES[storage]
    loader = LOADERS[name]
    if name == "padded_rows":
        path = write_row_set(folder / "set", storage=_of_rows(raw))
    elif name == "contrastive_rows":
        path = write_pair_set(folder / "set", storage=_of_rows(raw))
    else:
        path = write_text_set(folder / "set", train_tokens=500, storage=raw)
    budget = {"trainer__max_steps": 30, "schedule__total_steps": 30}
    config = tiny_config(path, evaluation__interval=100, model__n_layer=1, **budget)
    config.data = dataclasses.replace(data, path=str(path))
    config.loader = loader
    return config


def _of_rows(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "chunk_tokens"}


def hashes(path: Path, steps: range, **options: Any) -> list[str]:
    """The hash of each step's batch, in an order that never reads on, each from a fresh look at the run."""
    record, found = open_run(path), {}
    for step in reversed(steps):
        found[step] = batch_sha256(reader_of(record, step, **options).batch(step))
    return [found[step] for step in steps]


@pytest.mark.parametrize(
    ("name", "storage"),
    [*((name, "npy") for name in LOADERS), ("sequential", "hdf5"), ("block_shuffle", "gzip")],
)
def test_every_step_of_a_run_is_as_it_was_logged(name: str, storage: str, tmp_path: Path) -> None:
    config = _config(tmp_path, storage, name)
    path = tmp_path / "run"
    config.trainer.max_steps = 18
    run(config, path)
    future = hashes(path, range(1, 31))  # half of them are trained only afterwards
    config.trainer.max_steps, config.resume = 30, str(path)
    run(config, path)
    logged = train_rows(path)
    assert [row["batch_sha256"] for row in logged] == future
    assert logged[-1]["epoch"] >= 1
    reader = reader_of(open_run(path), 1)
    assert [reader.place(row["step"])[::2] for row in logged] == [(r["epoch"], r["position"]) for r in logged]
    assert reader.place(30 * 10**12).epoch > 10**11


def test_a_batch_of_the_first_epoch_and_one_of_the_millionth_are_read_alike(tmp_path: Path) -> None:
    path = write_text_set(tmp_path / "set", train_tokens=500)
    store = open_split(path, "train")
    for name in ("sequential", "permutation", "block_shuffle"):
        config = LOADERS[name]
        reader = _reader(store, config)
        loader = reader.copy().loader
        for step in (1, 10**6, 3, 10**12):
            place = reader.place(step)
            loader.start_epoch(place.epoch)
            for _ in range(place.position // loader.advance + 1):
                batch = loader.next_batch()
            assert reader.batch(step).inputs.equal(batch.inputs)
            assert reader.batch(step).cursor == batch.cursor | {"position": place.end}


def _reader(store: Any, config: LoaderConfig, **changes: Any) -> SegmentReader:
    from harness.config_record import to_dict
    from harness.loaders import build_loader

    loader = build_loader(config, store)
    cursor = loader.state_dict() | {k: v for k, v in changes.items() if k in loader.state_dict()}
    segment = Segment(
        step=changes.get("step", 0), run_id="r", path="", data_path="", metadata_sha256=store.metadata_sha256,
        loader=to_dict(config), cursor=cursor, epoch=changes.get("epoch", 0), data_chain=None,
    )  # fmt: skip
    return SegmentReader(segment, store)


@pytest.mark.parametrize("position", [0, 37, 64, 448, 460, 499, 500])
def test_a_segment_may_begin_in_the_middle_of_an_epoch(tmp_path: Path, position: int) -> None:
    """Also at a token where no batch of a whole epoch begins, and where no batch fits any more."""
    store = open_split(write_text_set(tmp_path / "set", train_tokens=500), "train")
    reader = _reader(store, LOADERS["sequential"], step=20, epoch=3, position=position)
    loader, epoch = reader.copy().loader, 3
    loader.load_state_dict(loader.state_dict() | {"position": position})
    for step in range(21, 45):
        try:
            batch = loader.next_batch()
        except StopIteration:
            epoch += 1
            loader.start_epoch(epoch)
            batch = loader.next_batch()
        place = reader.place(step)
        assert (place.epoch, place.end) == (epoch, batch.cursor["position"])
        assert reader.batch(step).inputs.equal(batch.inputs)


def _two_runs(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A set, a run over it, and a branch from step 8 of that run; each batch is logged."""
    data = write_text_set(tmp_path / "set", train_tokens=500)
    first, branch = tmp_path / "first", tmp_path / "branch"
    run(tiny_config(data, checkpoint__keep_last=None), first)
    run(tiny_config(data, resume=str(first / "checkpoints/step-00000008"), trainer__max_steps=14), branch)
    return data, first, branch


def test_a_branch_knows_the_steps_it_inherited(tmp_path: Path) -> None:
    _, first, branch = _two_runs(tmp_path)
    logged = [row["batch_sha256"] for row in train_rows(first)[:8] + train_rows(branch)]
    shutil.rmtree(first)
    assert hashes(branch, range(1, 15)) == logged


def test_a_checkpoint_stands_for_its_run_up_to_its_step(tmp_path: Path) -> None:
    _, first, _ = _two_runs(tmp_path)
    record = open_run(first / "checkpoints/step-00000008")
    assert (record.path, record.last) == (first, 8)


def test_a_run_without_lineage_is_read_from_its_newest_checkpoint(tmp_path: Path) -> None:
    _, first, _ = _two_runs(tmp_path)
    logged = [row["batch_sha256"] for row in train_rows(first)]
    (first / lineage.FILE).unlink()
    assert hashes(first, range(1, 13)) == logged
    for folder in (first / "checkpoints").glob("step-*"):
        _forget(folder, "lineage", "data_chain")
    assert hashes(first, range(1, 13)) == logged  # as a run of before there was such a thing
    shutil.rmtree(first / "checkpoints")
    with pytest.raises(UserError, match=r"holds neither lineage.json nor a complete checkpoint"):
        open_run(first)


def _forget(folder: Path, *keys: str) -> None:
    """Take keys out of a checkpoint's trainer.json, and put its size and hash right in the index."""
    import hashlib

    trainer = json.loads((folder / "trainer.json").read_text())
    content = json.dumps({key: value for key, value in trainer.items() if key not in keys}).encode()
    (folder / "trainer.json").write_bytes(content)
    index = json.loads((folder / "checkpoint.json").read_text())
    index["files"]["trainer.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(index))


def test_data_that_was_moved_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    data, first, _ = _two_runs(tmp_path)
    logged = [row["batch_sha256"] for row in train_rows(first)]
    data.rename(tmp_path / "npy-stream")
    with pytest.raises(UserError, match=r"does not exist: .*If it was moved: data.path=FOLDER"):
        hashes(first, range(1, 2))
    assert hashes(first, range(1, 4), data_path=str(tmp_path / "npy-stream")) == logged[:3]
    assert hashes(first, range(1, 4), data_root=str(tmp_path)) == logged[:3]


def test_other_data_is_refused_with_both_digests(tmp_path: Path) -> None:
    data, first, _ = _two_runs(tmp_path)
    other = write_text_set(tmp_path / "other", train_tokens=501)
    digests = [open_split(path, "train").metadata_sha256 for path in (data, other)]
    with pytest.raises(UserError, match=rf"trained on metadata_sha256 {digests[0]}, but .* has {digests[1]}"):
        hashes(first, range(3, 4), data_path=str(other))
    shutil.rmtree(data)
    with pytest.raises(UserError, match=digests[1]):
        hashes(first, range(3, 4), data_path=str(other))


def test_a_set_that_grew_gives_the_steps_before_and_after(tmp_path: Path) -> None:
    """Each step by the manifest it was trained on: where its epochs ended is in that one alone."""
    shards = np.random.default_rng(7).integers(0, 257, (5, 200)).tolist()
    splits = {"train": shards[:2], "val": shards[4:]}
    data, path = write_set(tmp_path / "set", splits, preparation={"corpus": "stdlib"}), tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=9), path)  # 6 steps an epoch
    write_set(data, splits | {"train": shards[:4]}, preparation={"corpus": "stdlib"})
    assert hashes(path, range(1, 10)) == [row["batch_sha256"] for row in train_rows(path)]
    run(tiny_config(data, trainer__max_steps=20, resume=str(path), resume_accept=["data"]), path)
    logged = train_rows(path)
    assert len(logged) == 20
    assert [row["epoch"] for row in logged] == [0] * 6 + [1] * 12 + [2] * 2
    assert hashes(path, range(1, 21)) == [row["batch_sha256"] for row in logged]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data_chain", "xyz", "data_chain xyz, .*it is damaged"),
        ("metadata_sha256", "", "it is damaged"),
        ("cursor", {}, "it is damaged"),
        ("loader", {"name": "none"}, "loader=none is not one of sequential"),
        ("loader", {"stride": 3}, "loader=None is not one of"),
    ],
)
def test_a_damaged_lineage_is_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    store = open_split(write_text_set(tmp_path / "set", train_tokens=500), "train")
    segment = _reader(store, LOADERS["sequential"]).segment
    (tmp_path / "config.yaml").write_text("{}")
    lineage.write(tmp_path, [segment])
    assert open_run(tmp_path).segments == [segment]
    lineage.write(tmp_path, [dataclasses.replace(segment, **{key: value})])
    with pytest.raises(UserError, match=message):
        open_run(tmp_path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run: there is no config.yaml"):
        open_run(tmp_path)
    with pytest.raises(UserError, match="step=0 must be at least 1"):
        reader_of(open_run(_two_runs(tmp_path)[1]), 0)
