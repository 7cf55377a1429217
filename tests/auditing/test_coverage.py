"""The distinct tokens that a run had as targets, counted by arithmetic, are those of its batches."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.auditing.coverage import Coverage, Limits, coverage, coverage_of
from harness.auditing.data_chain import batch_sha256
from harness.auditing.replay import RunRecord, SegmentReader, open_run, reader_of
from harness.config import TrainConfig
from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.config_record import to_dict
from harness.errors import UserError
from harness.loaders import build_loader
from harness.loaders.batch import IGNORE
from harness.resuming.lineage import Segment, segment_of
from harness.storage import open_split
from harness.storage.manifest import manifest_digest
from tests.helpers_runs import run, tiny_config, train_rows
from tests.helpers_sets import write_rows, write_set

BOUNDARY, VOCABULARY = 0, 1500
SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 4}


def stream(directory: Path, tokens: int, *, shards: int = 2, boundaries: bool = False) -> Path:
    """A set whose train tokens are each another id, their position + 1, but for boundaries here and there."""
    ids = np.arange(1, tokens + 1)
    if boundaries:
        ids[np.random.default_rng(3).integers(0, tokens, tokens // 9)] = BOUNDARY
    parts = [part.tolist() for part in np.array_split(ids, shards)]
    val = list(range(1, 60))
    return write_set(
        directory, {"train": parts, "val": [val]}, tokenizer={"vocab_size": VOCABULARY},
        preparation={"corpus": "stdlib"},
    )  # fmt: skip


def rows_set(
    directory: Path, widths: tuple[int, ...] = (17,), *, boundaries: bool = False, storage: str = "npy"
) -> Path:
    """51 rows whose tokens are each another id, or pairs of them, with padding on the right."""
    generator = np.random.default_rng(5)
    splits: dict[str, Any] = {}
    for side, width in zip(("pos", "neg"), widths, strict=False):
        ids = 1 + np.arange(51 * width).reshape(51, width) + len(splits) * 450
        mask = np.arange(width) < generator.integers(0, width + 1, 51)[:, None]
        ids = np.where(mask & (generator.random(ids.shape) >= 0.1 * boundaries), ids, BOUNDARY).astype("<u2")
        for split in ("train", "val"):
            splits[split if len(widths) == 1 else f"{split}.{side}"] = [
                (ids[:30], mask[:30]),
                (ids[30:], mask[30:]),
            ]
    return write_rows(
        directory, splits, tokenizer={"vocab_size": VOCABULARY}, preparation={"corpus": "stdlib"},
        storage={"format": storage},
    )  # fmt: skip


def config_of(data: Path, loader: LoaderConfig, steps: int, **changes: Any) -> TrainConfig:
    """A run that is over quickly, whose batches are all hashed."""
    config = tiny_config(
        data, model__n_layer=1, model__n_head=1, model__n_embd=4, trainer__max_steps=steps,
        schedule__total_steps=100, evaluation__interval=1000, evaluation__tokens=20,
        evaluation__sample_tokens=0, **{"checkpoint__interval": 1000, **changes},
    )  # fmt: skip
    config.loader = loader
    return config


def targets_of(batch: Any, mode: str) -> list[int]:
    """What tells the targets of a batch apart that count: their id, or that of the token before them.

    Boundaries have no id of their own: they are no targets in one mode, and announce none in the other.
    """
    counts = batch.targets != IGNORE
    return (batch.inputs if mode == "after" else batch.targets)[counts].tolist()


def readers(record: RunRecord) -> Iterator[tuple[Segment, SegmentReader]]:
    """For each step from 1 on, its segment and what gives its batch."""
    opened: dict[int, SegmentReader] = {}
    for step in itertools.count(1):
        segment = segment_of(record.segments, step)
        key = id(segment)
        if key not in opened:
            opened[key] = reader_of(record, step)
        yield segment, opened[key]


def of_batches(path: Path, steps: int) -> list[Coverage]:
    """The coverage after each step, from every target of every batch, which is the one that was logged."""
    record = open_run(path)
    logged = {row["step"]: row["batch_sha256"] for row in train_rows(path)}
    seen: set[int] = set()
    found, total = [Coverage(0, 0)], 0
    for step, (segment, reader) in zip(range(1, steps + 1), readers(record), strict=False):
        batch = reader.batch(step)
        assert logged.get(step, batch_sha256(batch)) == batch_sha256(batch)
        ids = targets_of(batch, segment.loader["mask_boundary"])
        total += len(ids)
        seen.update(ids)
        found.append(Coverage(len(seen), total))
    return found


def of_batches_by_position(record: RunRecord, steps: int) -> list[Coverage]:
    """As `of_batches` of streams in any mode: the position of a target is that of its row, and its column."""
    seen: set[int] = set()
    found, total = [Coverage(0, 0)], 0
    for step, (_, reader) in zip(range(1, steps + 1), readers(record), strict=False):
        counts = (reader.batch(step).targets != IGNORE).numpy()
        starts = np.array([origin.start for origin in reader.origins(step)])
        positions = (starts[:, None] + 1 + np.arange(counts.shape[1]))[counts]
        total += len(positions)
        seen.update(positions.tolist())
        found.append(Coverage(len(seen), total))
    return found


def of_arithmetic(path: Path, steps: int) -> list[Coverage]:
    record, found = open_run(path), []
    for step, (_, reader) in zip(range(1, steps + 1), readers(record), strict=False):
        found.append(coverage_of(record, step, partial(getattr, reader, "store")))
    return [coverage(path, 0), *found]


RUNS: dict[str, tuple[LoaderConfig, int]] = {  # a loader and the tokens of the set, 0 for rows
    "sequential": (LoaderConfig(**SIZES), 700),
    "stride 5, seq_len 16": (SlidingWindowConfig(stride=5, **SIZES), 300),
    "stride 16, seq_len 16": (SlidingWindowConfig(**SIZES), 500),
    "stride 23, seq_len 16": (SlidingWindowConfig(stride=23, **SIZES), 800),
    "stride 1, seq_len 8": (SlidingWindowConfig(stride=1, seq_len=8, batch_size=4), 90),
    "stride 40, seq_len 32": (SlidingWindowConfig(stride=40, seq_len=32, batch_size=3), 900),
    "ordered": (SlidingWindowConfig(stride=7, sampling="ordered", **SIZES), 300),
    "uniform": (SlidingWindowConfig(sampling="uniform", **SIZES), 500),
    "block_shuffle": (BlockShuffleConfig(window_tokens=112, **SIZES), 600),
    "masked": (SlidingWindowConfig(stride=9, mask_boundary="after", **SIZES), 400),
    "padded_rows": (PaddedRowsConfig(mask_boundary="target", **SIZES), 0),
    "contrastive_rows": (ContrastiveRowsConfig(seq_len=12, batch_size=4), 0),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_token_that_was_a_target_is_counted_once(name: str, tmp_path: Path) -> None:
    """After every step of a run that was stopped and resumed, and beyond the end of an epoch."""
    loader, tokens = RUNS[name]
    boundaries, widths = loader.mask_boundary != "none", (17, 11) if name == "contrastive_rows" else (17,)
    data = (
        stream(tmp_path / "set", tokens, boundaries=boundaries)
        if tokens
        else rows_set(tmp_path / "set", widths, boundaries=boundaries)
    )
    path = tmp_path / "run"
    run(config_of(data, loader, 9), path)
    run(config_of(data, loader, 30, resume=str(path)), path)
    assert train_rows(path)[-1]["epoch"] >= 1
    expected = of_batches(path, 30)
    assert of_arithmetic(path, 30) == expected
    assert coverage(path) == expected[-1]
    assert coverage(path).mean_coverage == expected[-1].target_tokens / expected[-1].unique_tokens > 1


def test_a_branch_has_the_tokens_of_its_parents_before_it(tmp_path: Path) -> None:
    """Each by its own order, and of the parent only what the branch goes on from; the parents may be gone."""
    data = stream(tmp_path / "set", 700, boundaries=True)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    every = {"checkpoint__interval": 4, "checkpoint__keep_last": None}
    run(config_of(data, LoaderConfig(**SIZES), 13, **every), first)
    ordered = SlidingWindowConfig(stride=5, sampling="ordered", **SIZES)
    accept = ["loader", "loader.mask_boundary"]
    ordered.mask_boundary = "target"
    saved = {"resume": str(first / "checkpoints/step-00000008"), "resume_accept": accept}
    run(config_of(data, ordered, 16, **every, **saved), second)
    shuffled = BlockShuffleConfig(window_tokens=64, mask_boundary="target", seq_len=12, batch_size=4)
    accept = ["loader", "loader.seq_len"]
    saved = {"resume": str(second / "checkpoints/step-00000012"), "resume_accept": accept}
    run(config_of(data, shuffled, 30, **every, **saved), third)
    expected = of_batches_by_position(open_run(third), 30)
    shutil.rmtree(first)
    shutil.rmtree(second)
    assert of_arithmetic(third, 30) == expected
    checkpoint = third / "checkpoints/step-00000016"
    assert coverage(checkpoint) == expected[16]
    with pytest.raises(UserError, match=r"step=17 must be at least 0 and at most 16, the checkpoint's"):
        coverage(checkpoint, 17)


def test_shards_that_were_added_count_by_their_positions(tmp_path: Path) -> None:
    """The epochs before end where the old set did; the set as it was is nowhere any more."""
    ids = np.arange(1, 1001).reshape(5, 200).tolist()
    splits = {"train": ids[:2], "val": ids[4:]}
    options: dict[str, Any] = {"tokenizer": {"vocab_size": VOCABULARY}, "preparation": {"corpus": "stdlib"}}
    data, path = write_set(tmp_path / "set", splits, **options), tmp_path / "run"
    run(config_of(data, LoaderConfig(**SIZES), 9), path)
    write_set(data, splits | {"train": ids[:4]}, **options)
    expected = of_batches(path, 9)
    assert of_arithmetic(path, 9) == expected
    run(config_of(data, LoaderConfig(**SIZES), 30, resume=str(path), resume_accept=["data"]), path)
    expected = of_batches(path, 30)
    assert of_arithmetic(path, 30) == expected
    assert expected[-1].unique_tokens > expected[9].unique_tokens


def test_only_what_has_to_be_read_has_to_be_there(tmp_path: Path) -> None:
    for name, loader in {"plain": SlidingWindowConfig(**SIZES), "rows": PaddedRowsConfig(**SIZES)}.items():
        data = stream(tmp_path / name, 500) if name == "plain" else rows_set(tmp_path / name)
        path = tmp_path / f"run-{name}"
        run(config_of(data, loader, 9), path)
        expected = of_batches(path, 9)[-1]
        data.rename(tmp_path / f"moved-{name}")
        assert coverage(path, data_path=str(tmp_path / f"moved-{name}")) == expected
        if name == "plain":
            assert coverage(path) == expected
        else:
            with pytest.raises(UserError, match="does not exist: without its tokens"):
                coverage(path)


def test_rows_in_another_storage_are_the_same_rows(tmp_path: Path) -> None:
    """Also fewer of their columns, by a branch: only the set that was read last has to be there."""
    segments, seen, total = [], set[int](), 0
    for step, storage, seq_len in ((0, "npy", 16), (5, "hdf5", 11)):
        data = rows_set(tmp_path / storage, boundaries=True, storage=storage)
        rows = PaddedRowsConfig(seq_len=seq_len, batch_size=4, mask_boundary="target", seed=step)
        store = open_split(data, "train")
        cursor, digest = build_loader(rows, store).state_dict(), store.metadata_sha256
        segments.append(Segment(step, "r", str(data), str(data), digest, to_dict(rows), cursor, 0, None))
        reader = SegmentReader(segments[-1], store)
        for at in range(step + 1, step + 6):
            ids = targets_of(reader.batch(at), "target")
            seen.update(ids)
            total += len(ids)
    (tmp_path / "npy" / "metadata.json").rename(tmp_path / "manifest.json")  # the run's copy
    shutil.rmtree(tmp_path / "npy")
    record = RunRecord(tmp_path, TrainConfig(), segments)
    assert coverage_of(record, 10, lambda: store) == Coverage(len(seen), total)


@dataclasses.dataclass(frozen=True)
class Case:
    """A lineage: a loader, the epoch and share of it where its segment begins, and its steps, each."""

    tokens: int
    segments: list[tuple[LoaderConfig, int, float, int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.integers(30, 400))
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        seq_len = draw(st.integers(1, min(40, tokens - 2)))
        sizes: dict[str, Any] = {
            "seq_len": seq_len,
            "mask_boundary": draw(st.sampled_from(["none", "none", "target", "after"])),
        }
        rows = (tokens - 1) // seq_len
        sizes["batch_size"] = draw(st.integers(1, min(8, rows)))
        seeds: dict[str, Any] = {
            "seed": draw(st.integers(0, 9)),
            "epoch_seed": draw(st.sampled_from(["mixed", "additive"])),
        }
        name = draw(st.sampled_from(["sequential", "permutation", "ordered", "uniform", "block_shuffle"]))
        loader: LoaderConfig
        if name == "sequential":
            loader = LoaderConfig(**sizes)
        elif name == "block_shuffle":
            window = draw(st.integers(seq_len, 200))
            loader = BlockShuffleConfig(window_tokens=window, **sizes, **seeds)
        elif name == "uniform":
            loader = SlidingWindowConfig(sampling=name, **sizes, **seeds)
        else:
            most = (tokens - seq_len - 1) // max(1, sizes["batch_size"] - 1)
            stride = draw(st.integers(1, max(1, min(most, 2 * seq_len))))
            loader = SlidingWindowConfig(sampling=name, stride=stride, **sizes, **seeds)
        place = (draw(st.integers(0, 3)), draw(st.floats(0, 1)), draw(st.integers(1, 25)))
        segments.append((loader, *place))
    return Case(tokens, segments)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sets")


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_any_lineage_is_counted_as_its_batches_are(sets: Path, case: Case) -> None:
    data = sets / str(case.tokens)
    if not data.exists():
        stream(data, case.tokens, boundaries=True)
    store = open_split(data, "train")
    segments, step = [], 0
    for loader, epoch, share, steps in case.segments:
        built = build_loader(loader, store)
        built.start_epoch(epoch)
        end = built.batches_per_epoch * built.advance
        cursor = built.state_dict() | {"position": round(share * end)}
        segments.append(
            Segment(
                step, "r", str(sets), str(data), store.metadata_sha256, to_dict(loader), cursor, epoch, None
            )
        )
        step += steps
    record = RunRecord(sets, TrainConfig(), segments)
    assert coverage_of(record, step, lambda: store) == of_batches_by_position(record, step)[-1]


def of_numbers(tmp_path: Path, tokens: int, loader: SlidingWindowConfig) -> RunRecord:
    """A run over a set of which nothing exists but the run's copy of its manifest."""
    shard = {"file": "train_00000.npy", "tokens": tokens, "sha256": "0" * 64}
    raw = {
        "format_version": 2,
        "storage": {"format": "npy", "dtype": "uint16", "layout": "stream"},
        "tokenizer": {"name": "byte", "vocab_size": 257, "boundary_token_id": 0},
        "splits": {
            "train": {"total_tokens": tokens, "shards": [shard]}, "val": {"total_tokens": 0, "shards": []}
        },
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    cursor = {
        "format_version": 1, "strategy": "sliding_window", "epoch": 0, "position": 0, "seed": 0,
        "epoch_seed": "mixed", "batch_size": loader.batch_size, "seq_len": loader.seq_len, "split": "train",
        "metadata_sha256": manifest_digest(raw), "stride": loader.stride, "sampling": loader.sampling,
    }  # fmt: skip
    digest = manifest_digest(raw)
    segment = Segment(0, "r", str(tmp_path), str(tmp_path / "set"), digest, to_dict(loader), cursor, 0, None)
    return RunRecord(tmp_path, TrainConfig(), [segment])


def unopened() -> Any:
    raise AssertionError("nothing had to be read")


def test_memory_follows_the_samples_and_not_the_tokens(tmp_path: Path) -> None:
    """Of ten billion tokens, in windows that overlap; a bit for each would be 1.25 GB."""
    loader = SlidingWindowConfig(stride=10_000, seq_len=16_000, batch_size=1000)
    record = of_numbers(tmp_path, 10_000 * 999_999 + 16_001, loader)
    tracemalloc.start()
    try:
        part, epoch = coverage_of(record, 400, unopened), coverage_of(record, 1000, unopened)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert epoch == Coverage(10_000 * 999_999 + 16_000, 16_000 * 10**6)
    assert part.target_tokens == 16_000 * 400_000 > part.unique_tokens > 10_000 * 400_000
    assert peak < 100 * 10**6


def test_what_would_take_too_long_is_refused_where_there_is_a_limit(tmp_path: Path) -> None:
    limits = Limits(samples=10**6, read_bytes=0)
    loader = SlidingWindowConfig(stride=50, seq_len=100, batch_size=1000)
    record = of_numbers(tmp_path, 10**10, loader)
    assert coverage_of(record, 1000, unopened, limits).target_tokens == 10**8
    with pytest.raises(UserError, match="look at 1,001,000 samples one by one, more than 1,000,000"):
        coverage_of(record, 1001, unopened, limits)
    apart = of_numbers(tmp_path, 10**10, SlidingWindowConfig(stride=100, seq_len=100, batch_size=1000))
    assert coverage_of(apart, 90_000, unopened, limits) == Coverage(9 * 10**9, 9 * 10**9)
    store = open_split(rows_set(tmp_path / "rows"), "train")
    rows = PaddedRowsConfig(**SIZES)
    cursor, place = build_loader(rows, store).state_dict(), str(tmp_path / "rows")
    segment = Segment(0, "r", place, place, store.metadata_sha256, to_dict(rows), cursor, 0, None)
    record = RunRecord(tmp_path, TrainConfig(), [segment])
    with pytest.raises(UserError, match="read 136 bytes of the set, more than 135"):
        coverage_of(record, 2, lambda: store, Limits(10**6, 135))
