"""How many distinct tokens of the train split a run has had as targets, and how often on average.

A token is counted by its position in the split (of rows: row and column; of pairs also the side), whatever
its id is and however its text is repeated elsewhere. It counts where it is a target of a step's batch, so
where it enters the loss:

* not the first token of a window or row, which is an input alone, and not a target of -100: padding, columns
  beyond the first `seq_len + 1` of wider rows, and what `loader.mask_boundary` leaves out;
* windows that overlap (`stride < seq_len`), `sampling: uniform`, which draws with replacement, and every
  further epoch make a token a target again: it stays one of `unique_tokens`, and counts once more in
  `target_tokens`. Tokens between windows (`stride > seq_len`) and samples that an epoch drops at its end are
  none until another epoch's order has them; of the B*T+1 tokens of a `sequential` batch the last is a
  target, and the next batch's first input;
* both rows of a pair count, each for itself; validation never counts;
* a step whose update was left out (`trainer.on_nonfinite=skip`) had its targets all the same;
* steps are those of the run's lineage up to the one that is asked about: a branch has those of its parents
  before it, each by the loader and the set of its own segment; what was trained after a checkpoint and is
  not part of what goes on from it, is not. Data that was accepted at a resume keeps the positions: the same
  tokens in another storage, or shards added after them.

All of it is exact and follows from the run directory by arithmetic over the starts of samples. Tokens are
read only where `mask_boundary` asks for them, and masks of rows always: in blocks, in the order of the files.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.auditing.coverage_reads import RowUse, StreamUse, count_rows, count_stream
from harness.auditing.coverage_samples import Part, drawn, is_with_replacement, parts
from harness.auditing.replay import (
    RunRecord,
    SegmentReader,
    loader_config,
    open_run,
    recorded_manifest,
    refuse_other_data,
    source_of,
)
from harness.checkpoints import checkpoint
from harness.commandline.commands import shown
from harness.config import layout
from harness.errors import UserError
from harness.loaders import SlidingWindowLoader, TokenDataLoader
from harness.loaders.masking import BoundaryMask
from harness.loaders.sampled import SampledLoader
from harness.resuming import lineage
from harness.resuming.lineage import Segment
from harness.storage import PairStore, RowStore, Store, TokenStore
from harness.storage.extents import Extent
from harness.storage.io import FileIdentity
from harness.storage.known import open_known
from harness.storage.manifest import FORMATS, Manifest, parse_manifest
from harness.tracking.jsonl import last_rows


@dataclass(frozen=True)
class Coverage:
    """`unique_tokens`: the distinct tokens that were targets; `target_tokens`: the targets there were."""

    unique_tokens: int
    target_tokens: int

    @property
    def mean_coverage(self) -> float:
        """How often a token of these was a target, on average; 0.0 where there was no target."""
        return self.target_tokens / self.unique_tokens if self.unique_tokens else 0.0


class Limits(NamedTuple):
    """What counting may cost: samples looked at one by one, and bytes of tokens and masks that are read."""

    samples: int
    read_bytes: int


class _Stretch(NamedTuple):
    """Steps of one segment: which parts of which epochs of its loader."""

    loader: Any
    parts: list[Part]
    mask: BoundaryMask

    @property
    def samples(self) -> int:
        """Samples drawn, of a sequential loader rows of the batches."""
        return int(self.loader.batch_size) * sum(part.batches for part in self.parts)

    @property
    def cost(self) -> int:
        """Samples that are looked at one by one, at most."""
        if not isinstance(self.loader, SampledLoader):
            return 0
        return self.samples if is_with_replacement(self.loader) else min(self.samples, self.loader.samples)

    @property
    def stride(self) -> int:
        """Tokens from the start of one sample to the next one's."""
        return int(
            self.loader.stride if isinstance(self.loader, SlidingWindowLoader) else self.loader.seq_len
        )


def coverage(
    run_dir: Path, step: int | None = None, *, data_path: str | None = None, data_root: str | None = None
) -> Coverage:
    """The coverage of a run, or of a checkpoint, by the end of `step`; None: the last one it says it made.

    `data_path`, `data_root`: where the set was moved to, which matters only where tokens or masks are read.
    Raises `UserError` where the directory is no run, made no step, or lacks what says where its steps came
    from, and where data has to be read and is gone or another's.
    """
    run = open_run(run_dir)
    step = _last_step(run) if step is None else step
    segments = [segment for segment in run.segments if segment.step < step]

    def store() -> Store:
        source = source_of(run, segments[-1], data_path, data_root)
        refuse_other_data(source)
        return open_known(source.manifest, _split(segments[-1]), mmap=run.config.data.mmap)

    return coverage_of(run, step, store)


def coverage_of(
    run: RunRecord, step: int, store: Callable[[], Store], limits: Limits | None = None
) -> Coverage:
    """As `coverage`; `store` opens the set of the step's segment where it has to be read.

    `UserError` also where it would cost more than `limits` allow.
    """
    if step < 0 or (run.last is not None and step > run.last):
        most = "" if run.last is None else f" and at most {run.last}, the checkpoint's"
        raise UserError(f"step={step} must be at least 0{most}: {shown(run.path)} made no other")
    if step == 0:
        return Coverage(0, 0)
    lineage.segment_of(run.segments, 1)  # what is not known of the first steps cannot be counted
    used = [segment for segment in run.segments if segment.step < step]
    ends = [*(segment.step for segment in used[1:]), step]
    if layout(loader_config(used[-1])) != "stream":
        opened = store()
        stretches = [_stretch(run, *pair, opened) for pair in zip(used, ends, strict=True)]
        return _of_rows(stretches, opened, limits)
    stretches = [_stretch(run, *pair, None) for pair in zip(used, ends, strict=True)]
    if all(stretch.mask.ignores_nothing for stretch in stretches):
        return _by_arithmetic(stretches, limits)
    return _of_masked_stream(stretches, store, limits)


def _last_step(run: RunRecord) -> int:
    if run.last is not None:
        return run.last
    steps = checkpoint.complete_steps(run.path)[-1:]
    with contextlib.suppress(OSError, ValueError, KeyError):  # still being written, or torn
        steps += [row["step"] for row in last_rows(run.path / "metrics.jsonl")[-1:]]
    if not steps:
        raise UserError(f"{shown(run.path)} has neither a checkpoint nor a row: it made no step yet")
    return max(steps)


def _stretch(run: RunRecord, segment: Segment, end: int, opened: Store | None) -> _Stretch:
    manifest = _manifest(run, segment)
    reader = SegmentReader(segment, opened or _described(manifest, _split(segment)))
    first = reader.place(segment.step + 1)
    batches = list(parts(reader.loader, first.epoch, first.position, end - segment.step))
    mask = BoundaryMask(segment.loader.get("mask_boundary", "none"), manifest)
    return _Stretch(reader.loader, batches, mask)


def _manifest(run: RunRecord, segment: Segment) -> Manifest:
    """The segment's manifest: the run's own copy, which needs no data, or that of the set."""
    raw = recorded_manifest(run, segment)
    if raw:
        return parse_manifest(raw, Path(segment.data_path) / FORMATS[raw["storage"]["format"]][0])
    source = source_of(run, segment)
    refuse_other_data(source)
    return source.manifest


def _split(segment: Segment) -> str:
    return str(segment.cursor.get("split", "train"))


def _described(manifest: Manifest, split: str) -> TokenStore:
    """A stream as its manifest says it is: it has its numbers, and no file to read."""
    nowhere = Extent(manifest.path, 0, manifest.splits[split].total_tokens, FileIdentity(0, 0, 0, 0))
    return TokenStore(manifest, split, [nowhere])


def _by_arithmetic(stretches: list[_Stretch], limits: Limits | None) -> Coverage:
    targets = sum(stretch.samples * stretch.loader.seq_len for stretch in stretches)
    if len(stretches) == 1 and _repeats_nothing(stretches[0]):
        return Coverage(targets, targets)
    _check_samples(stretches, limits)
    uses = [use for stretch in stretches for use in _uses(stretch, counted=False)]
    return Coverage(_union(uses), targets)


def _repeats_nothing(stretch: _Stretch) -> bool:
    """Whether no token can be a target twice: one epoch, of samples that do not overlap."""
    alone = len(stretch.parts) == 1 and stretch.stride >= stretch.loader.seq_len
    return alone and not is_with_replacement(stretch.loader)


def _uses(stretch: _Stretch, *, counted: bool) -> list[StreamUse]:
    """The targets of a stretch as ranges of equal length in the stream."""
    loader = stretch.loader
    if isinstance(loader, TokenDataLoader):  # a batch follows the other: a range an epoch
        ranges = Counter((part.position, part.batches * loader.advance) for part in stretch.parts)
        return [
            StreamUse(np.array([start + 1]), length, np.array([count], np.int32), stretch.mask)
            for (start, length), count in ranges.items()
        ]
    samples = drawn(loader, stretch.parts, counted=counted)
    starts = samples.ids
    starts *= stretch.stride
    starts += 1
    return [StreamUse(starts, loader.seq_len, samples.counts, stretch.mask)]


def _union(uses: list[StreamUse]) -> int:
    """How many positions lie in any of the ranges."""
    if len(uses) == 1:  # in order, and of one length: a range ends where the next begins, or before
        starts, length = uses[0].starts, uses[0].length
        fresh = np.diff(starts)
        return int(np.minimum(fresh, length, out=fresh).sum()) + length
    starts = np.concatenate([use.starts for use in uses])
    ends = np.concatenate([use.starts + use.length for use in uses])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([starts[:1], ends[:-1]])  # what lies before this is counted already
    return int(np.maximum(0, ends - np.maximum(starts, before)).sum())


def _of_masked_stream(
    stretches: list[_Stretch], store: Callable[[], Store], limits: Limits | None
) -> Coverage:
    _check_samples(stretches, limits)
    uses = [use for stretch in stretches for use in _uses(stretch, counted=True)]
    opened = store()
    assert isinstance(opened, TokenStore)
    _check_reading(_union(uses) * opened.dtype.itemsize, limits)
    return Coverage(*count_stream(opened, uses))


def _of_rows(stretches: list[_Stretch], opened: Store, limits: Limits | None) -> Coverage:
    _check_samples(stretches, limits)
    sides = (opened.pos, opened.neg) if isinstance(opened, PairStore) else (opened,)
    samples = [drawn(stretch.loader, stretch.parts) for stretch in stretches]
    unique = targets = 0
    for side in sides:
        assert isinstance(side, RowStore)
        uses = [
            RowUse(rows, min(stretch.loader.seq_len, side.row_width - 1), stretch.mask)
            for rows, stretch in zip(samples, stretches, strict=True)
        ]
        width = side.row_width * (
            1 if all(use.mask.ignores_nothing for use in uses) else 1 + side.dtype.itemsize
        )
        _check_reading(len(sides) * width * max(len(use.samples.ids) for use in uses), limits)
        found = count_rows(side, uses)
        unique, targets = unique + found[0], targets + found[1]
    return Coverage(unique, targets)


def _check_samples(stretches: list[_Stretch], limits: Limits | None) -> None:
    samples = sum(s.cost for s in stretches)
    if limits is not None and samples > limits.samples:
        raise UserError(f"it would look at {samples:,} samples one by one, more than {limits.samples:,}")


def _check_reading(read_bytes: int, limits: Limits | None) -> None:
    if limits is not None and read_bytes > limits.read_bytes:
        raise UserError(f"it would read {read_bytes:,} bytes of the set, more than {limits.read_bytes:,}")
