"""The batch of any step of any run, past or future, from the run directory and the data alone.

The step's segment of the lineage gives the loader and where it began; the rest is arithmetic, so every step
costs the same. Nothing here knows of models, checkpoints' tensors or the loop.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.checkpoints import checkpoint
from harness.commandline.commands import shown
from harness.config import TrainConfig, set_directory, total_steps
from harness.config_groups import LoaderConfig
from harness.config_record import from_dict
from harness.errors import UserError
from harness.loaders import Batch, Origin, build_loader
from harness.resuming import growth, lineage
from harness.resuming.lineage import Segment
from harness.storage import Store
from harness.storage.known import open_known
from harness.storage.manifest import Manifest, load_manifest, parse_manifest

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says of its data. `last`: the step up to which it is asked about; None: any."""

    path: Path
    config: TrainConfig
    segments: list[Segment]
    last: int | None = None


class Place(NamedTuple):
    """Where a step's batch lies: the position before it and after it, in one epoch."""

    epoch: int
    position: int
    end: int


@dataclass(frozen=True)
class Source:
    """A segment's set as it lies on disk. `manifest` is to be read by; `found` the digest of what is there.

    The two differ where shards were added since: the segment's own manifest says where its epochs end.
    """

    segment: Segment
    manifest: Manifest
    found: str

    @property
    def is_as_recorded(self) -> bool:
        """Whether the tokens are those that the segment was trained on, as far as manifests say."""
        return self.manifest.metadata_sha256 == self.segment.metadata_sha256


def budget_of(run: RunRecord) -> int:
    """The step that the run trains to; a branch counts the tokens of batches that its parents had."""
    step = run.segments[-1].step
    return total_steps(run.config, step, lineage.tokens_at(run.segments, step))


def open_run(path: Path) -> RunRecord:
    """What a run directory, or a checkpoint in one, says; `UserError` where it is neither."""
    path = path.expanduser().absolute()
    if (path / checkpoint.TRAINER).is_file():
        saved = checkpoint.open_checkpoint(path, tensors=False)
        config = from_dict(saved.config, str(path / checkpoint.CONFIG))
        return RunRecord(saved.run_dir, config, _known(lineage.of_checkpoint(saved), path), saved.step)
    config = _read_config(path)
    if (path / lineage.FILE).is_file():
        return RunRecord(path, config, _known(lineage.read(path), path))
    steps = checkpoint.complete_steps(path)
    if not steps:
        raise UserError(
            f"{shown(path)} holds neither {lineage.FILE} nor a complete checkpoint, so nothing says which "
            "data its steps came from: it ended before its first step, or was made by an older version"
        )
    saved = checkpoint.open_checkpoint(checkpoint.step_dir(path, steps[-1]), tensors=False)
    return RunRecord(path, config, _known(lineage.of_checkpoint(saved), saved.path))


def _known(segments: list[Segment], path: Path) -> list[Segment]:
    for segment in segments:
        loader_config(segment)
        hashes = [segment.metadata_sha256, segment.data_chain or "0" * 64]
        if type(segment.cursor.get("position")) is not int or not all(map(is_sha256, hashes)):
            raise UserError(
                f"the lineage of {shown(path)} says of the steps after {segment.step}: metadata_sha256 "
                f"{segment.metadata_sha256}, data_chain {segment.data_chain}, cursor {segment.cursor}: it is "
                "damaged, so nothing says which data they came from. The lineage in a checkpoint's "
                "trainer.json may be whole: give a checkpoints/step-N folder"
            )
    if segments:
        return segments
    raise UserError(
        f"{shown(path)} was saved by an older version after a change of its data, which did not write down "
        "where each step's data lay: its batches cannot be shown again"
    )


def _read_config(path: Path) -> TrainConfig:
    file = path / "config.yaml"
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{shown(path)} is no run: there is no config.yaml. Give a run directory, or one of its "
            "checkpoints/step-N folders"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read ({error}): it says how the run was configured") from None
    return from_dict(values, str(file))


def tokens_a_step(segment: Segment) -> int:
    """Tokens of a step, as they are counted in its rows: a pair as one sequence."""
    return int(segment.loader["batch_size"]) * int(segment.loader["seq_len"])


def is_sha256(value: Any) -> bool:
    """Whether a value is a SHA-256 in hexadecimal, as all records have them."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def loader_config(segment: Segment) -> LoaderConfig:
    """The settings of a segment's loader; `UserError` for ones that this version does not know."""
    return from_dict({"loader": segment.loader}, f"{lineage.FILE} of {segment.path}").loader


def source_of(
    run: RunRecord, segment: Segment, data_path: str | None = None, data_root: str | None = None
) -> Source:
    """The set of a segment: where the run found it, or where `data.path` or `data.root` say it was moved.

    A run may have read several: where the moved one is that of another segment, the set in its old place is
    taken. `UserError` where there is none; it may be another than the segment's (`is_as_recorded`).
    """
    recorded = Path(segment.data_path)
    moved = _moved_to(run, segment, data_path, data_root)
    source = _find(run, segment, moved or recorded)
    others = any(source.found == other.metadata_sha256 for other in run.segments)
    return source if source.is_as_recorded or not others else _find(run, segment, recorded)


def _moved_to(run: RunRecord, segment: Segment, data_path: str | None, data_root: str | None) -> Path | None:
    if data_path is not None:
        return Path(data_path).expanduser().absolute()
    if data_root is None:
        return None
    data = dataclasses.replace(run.config.data, path=None, root=data_root)
    config = dataclasses.replace(run.config, data=data, loader=loader_config(segment))
    return set_directory(config).expanduser().absolute()


def _find(run: RunRecord, segment: Segment, directory: Path) -> Source:
    if not directory.exists():
        raise UserError(
            f"the set of the steps from {segment.step + 1} on, {shown(directory)}, does not exist: without "
            "its tokens no batch can be made again. If it was moved: data.path=FOLDER or data.root=FOLDER"
        )
    present = load_manifest(directory)
    if present.metadata_sha256 != segment.metadata_sha256:
        recorded = recorded_manifest(run, segment)
        if growth.added_shards(recorded, present.raw) is not None:
            return Source(segment, parse_manifest(recorded, present.path), present.metadata_sha256)
    return Source(segment, present, present.metadata_sha256)


def recorded_manifest(run: RunRecord, segment: Segment) -> dict[str, Any]:
    """The segment's manifest among the copies of the run and of the one that trained it; {} without any."""
    places = (run.path, Path(segment.path))
    copies = (growth.recorded_manifest(path, segment.metadata_sha256) for path in places)
    return next((copy for copy in copies if copy), {})


def refuse_other_data(source: Source) -> None:
    """Raise `UserError` with both digests where the set is not the one that the segment was trained on."""
    if not source.is_as_recorded:
        raise UserError(
            f"steps from {source.segment.step + 1} on were trained on metadata_sha256 "
            f"{source.segment.metadata_sha256}, but {source.manifest.path} has {source.found}: its batches "
            "would be others. Point data.path=FOLDER at the set of the run, or put it back"
        )


class SegmentReader:
    """The batches of one segment, in any order. `store` holds the split that it reads.

    `UserError` where the set is not one that the segment's loader and cursor fit.
    """

    def __init__(self, segment: Segment, store: Store) -> None:
        config = loader_config(segment)
        # Compressed data is decoded in large chunks: there a window is worth what it reads.
        direct = config.name == "block_shuffle" and store.manifest.storage.compression == "none"
        self.segment = segment
        self.store = store
        self.loader = build_loader(config, store, **({"direct": True} if direct else {}))
        self._start = segment.cursor | {"metadata_sha256": store.metadata_sha256}
        self._begin: int = self.loader.validate_state_dict(self._start)
        self._left = self.loader.batches_from(self._begin)
        self._next: tuple[int, int] | None = None

    @classmethod
    def open(cls, source: Source, *, mmap: bool = True) -> SegmentReader:
        """The reader of a set as it was found."""
        split = str(source.segment.cursor.get("split", "train"))
        return cls(source.segment, open_known(source.manifest, split, mmap=mmap))

    def copy(self) -> SegmentReader:
        """Another one, for another thread; files are not checked again."""
        return SegmentReader(self.segment, copy.deepcopy(self.store))

    def place(self, step: int) -> Place:
        """Where the batch of a step of this segment lies; by arithmetic, nothing is read."""
        done = step - self.segment.step - 1
        assert done >= 0
        advance, epoch = self.loader.advance, self.segment.epoch
        if done < self._left:  # the epoch may have begun before the segment, or in its middle
            position = self._begin + done * advance
        else:
            epochs, batches = divmod(done - self._left, self.loader.batches_per_epoch)
            epoch, position = epoch + 1 + epochs, batches * advance
        return Place(epoch, position, position + advance)

    def cursor(self, step: int) -> dict[str, Any]:
        """The loader's state before a step: where a run would stand that is to train it next."""
        place = self.place(step)
        epoch = {"epoch": place.epoch} if "epoch" in self._start else {}
        return self._start | epoch | {"position": place.position}

    def batch(self, step: int) -> Batch:
        """The batch of a step; steps in a row are read without looking for their place."""
        place = self.place(step)
        if (place.epoch, place.position) != self._next:
            self.loader.load_state_dict(self.cursor(step))
        self._next = None  # until the read is known to have worked
        batch = self.loader.next_batch()
        self._next = (place.epoch, place.end)
        return batch

    def origins(self, step: int) -> list[Origin]:
        """Where the rows of a step's batch come from."""
        self._next = None
        self.loader.load_state_dict(self.cursor(step))
        return self.loader.origins(self.place(step).position)


def reader_of(
    run: RunRecord, step: int, data_path: str | None = None, data_root: str | None = None
) -> SegmentReader:
    """What gives the batch of a step, from 1 on; `UserError` where its data is missing or another's."""
    if step < 1:
        raise UserError(f"step={step} must be at least 1: steps count from 1")
    segment = lineage.segment_of(run.segments, step)
    source = source_of(run, segment, data_path, data_root)
    refuse_other_data(source)
    return SegmentReader.open(source, mmap=run.config.data.mmap)


def logged_row(path: Path, step: int) -> dict[str, Any] | None:
    """The row of a training step in a run's metrics.jsonl; None where it was not logged."""
    try:
        lines = (path / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return None
    wanted = f'"step": {step},'.encode()
    for line in lines:
        if wanted in line:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a run that is being written
                continue
            if isinstance(row, dict) and row.get("step") == step and "loss" in row:
                return row
    return None
