"""Which data, and which order of it, a run's steps came from.

A run is a list of segments, oldest first. A new one begins where a branch begins, and where a change of the
data was accepted; the batch of every step of a segment follows from the loader's settings and from the cursor
at its start. The list is `lineage.json` in the run directory, and `lineage` in each trainer.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import set_directory
from harness.config_record import from_dict, to_dict
from harness.errors import UserError
from harness.files import write_json

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint

FILE = "lineage.json"
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "str | None": (str, type(None))}


@dataclass(frozen=True)
class Segment:
    """The steps after `step`, up to the next segment's.

    `run_id`, `path`: the run that trained them, and its directory then. `data_path`: the prepared set's
    folder then. `loader`: the settings of the group, as config.yaml has them. `cursor`: the loader's
    `state_dict()` before the first step, `epoch` the one that it counts in. `data_chain`: the chain before
    the first step, the link of accepted data in it; None where there is none.
    """

    step: int
    run_id: str
    path: str
    data_path: str
    metadata_sha256: str
    loader: dict[str, Any]
    cursor: dict[str, Any]
    epoch: int
    data_chain: str | None


def extended(before: list[Segment], new: Segment) -> list[Segment]:
    """The segments with `new` after them; of those before it, the ones whose steps were trained."""
    return [segment for segment in before if segment.step < new.step] + [new]


def segment_of(segments: list[Segment], step: int) -> Segment:
    """The segment that step `step` (from 1) belongs to; `UserError` where nothing is known of it."""
    known = [segment for segment in segments if segment.step < step]
    if not known:
        first = segments[0].step + 1 if segments else None
        raise UserError(f"nothing is recorded of step {step}: the first step that is known is {first}")
    return known[-1]


def of_checkpoint(saved: Checkpoint) -> list[Segment]:
    """The segments up to a checkpoint; of one without them, from before they were kept, the one there was.

    Empty where it is not known: the data was changed back then.
    """
    if "lineage" in saved.trainer:
        return from_record(saved.trainer["lineage"], str(saved.path / "trainer.json"))
    if saved.trainer.get("data_changes"):
        return []
    config = from_dict(saved.config, str(saved.path / "config.yaml"))
    start = {"position": 0} | ({"epoch": 0} if "epoch" in saved.loader else {})
    begun = Segment(
        step=0,
        run_id=saved.trainer["run_id"],
        path=str(saved.run_dir),
        data_path=str(set_directory(config)),
        metadata_sha256=saved.trainer["metadata_sha256"],
        loader=to_dict(config.loader),
        cursor=saved.loader | start,
        epoch=0,
        data_chain=None,
    )
    return [begun]


def tokens_at(segments: list[Segment], step: int) -> int:
    """The tokens trained in the first `step` steps, as a run counts them: `batch_size * seq_len` a step."""
    ends = [*(segment.step for segment in segments[1:]), step]
    begins = [0, *ends]  # what is not known of the first steps was most likely like what follows them
    return sum(
        max(0, min(end, step) - begin) * segment.loader["batch_size"] * segment.loader["seq_len"]
        for segment, begin, end in zip(segments, begins, ends, strict=False)
    )


def to_record(segments: list[Segment]) -> list[dict[str, Any]]:
    """Plain containers, as trainer.json and lineage.json hold them."""
    return [dataclasses.asdict(segment) for segment in segments]


def from_record(values: Any, source: str) -> list[Segment]:
    """The segments of a record; `UserError` naming `source` where it is none."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Segment)}
    if not isinstance(values, list) or not values:
        raise UserError(f"{source}: lineage must be a list of segments, not {values!r}")
    for value in values:
        if not isinstance(value, dict) or set(value) != set(kinds):
            raise UserError(f"{source}: a segment of lineage must hold {', '.join(kinds)}, not {value!r}")
        for key, kind in kinds.items():
            wanted = _KINDS.get(kind, (dict,))
            if type(value[key]) not in wanted:
                names = " or ".join("null" if w is type(None) else w.__name__ for w in wanted)
                raise UserError(f"{source}: {key}={value[key]!r} of a segment must be {names}")
    segments = [Segment(**value) for value in values]
    if any(a.step >= b.step for a, b in itertools.pairwise(segments)):
        raise UserError(f"{source}: the steps of lineage must rise: {[segment.step for segment in segments]}")
    return segments


def write(run_dir: Path, segments: list[Segment]) -> None:
    """Replace the run directory's `lineage.json`."""
    write_json(run_dir / FILE, {"segments": to_record(segments)})


def read(run_dir: Path) -> list[Segment]:
    """What `lineage.json` of a run directory holds; `UserError` where it cannot be read."""
    path = run_dir / FILE
    try:
        values = json.loads(path.read_bytes())["segments"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it says which data the run's steps came from"
        ) from None
    return from_record(values, str(path))
