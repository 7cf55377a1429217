"""What a run directory claims of its steps: the rows of metrics.jsonl and the small files of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.auditing.replay import RunRecord, budget_of, is_sha256, loader_config
from harness.checkpoints import checkpoint
from harness.config_groups import LoaderConfig
from harness.config_record import from_dict, to_dict
from harness.errors import UserError
from harness.resuming import lineage
from harness.resuming.lineage import Segment


class Fault(NamedTuple):
    """Something that is not as it was claimed, at `step` or, where no step is concerned, before it."""

    step: int
    text: str


class Claim(NamedTuple):
    """What `source` says of the run after `step`; None: it says nothing of that."""

    step: int
    source: str
    data_chain: str | None = None
    batch_sha256: str | None = None
    epoch: int | None = None
    position: int | None = None
    tokens: int | None = None


@dataclass
class Records:
    """All claims, and the faults that show without the data. `last`: the last step that is claimed."""

    claims: list[Claim] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    rows: int = 0
    checkpoints: int = 0
    last: int = 0


def read_records(run: RunRecord) -> Records:
    """Everything that the run claims up to `run.last`, in order of steps; a torn last line is left out."""
    records = Records()
    rows = list(_rows(run, records))
    _check_order(run, rows, records)
    records.rows = len(rows)
    records.claims += [_claim(source, row, records) for source, row in rows]
    records.claims += _checkpoints(run, records)
    records.claims.sort(key=lambda claim: claim.step)
    records.last = max((claim.step for claim in records.claims), default=0)
    _check_gaps(run, {row["step"] for _, row in rows if "loss" in row}, records)
    _check_chained(records)
    if other := _other_settings(run.config.loader, run.segments[-1]):
        records.faults.append(Fault(run.segments[-1].step + 1, f"config.yaml says {other}"))
    return records


def unclaimed(run: RunRecord, records: Records) -> list[int]:
    """The steps of which neither a value of the chain nor a hash of their own says what they saw."""
    first = run.segments[0]
    chained = [claim.step for claim in records.claims if claim.data_chain is not None]
    covered = set() if first.data_chain is None else set(range(first.step + 1, max(chained, default=0) + 1))
    covered |= {claim.step for claim in records.claims if claim.batch_sha256 is not None}
    return [step for step in range(1, records.last + 1) if step not in covered]


def own_start(run: RunRecord) -> int:
    """The step after which the run itself trained: 0, or where a branch began."""
    return next(s.step for s in run.segments if s.run_id == run.segments[-1].run_id)


def _rows(run: RunRecord, records: Records) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows up to the run's budget, each with its place in the file."""
    path = run.path / "metrics.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = [b""]
    budget, before = budget_of(run), 0
    for number, line in enumerate(lines, start=1):
        source = f"metrics.jsonl line {number}"
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, TypeError, KeyError):
            if number < len(lines):  # the last one may still be written
                records.faults.append(
                    Fault(before, f"{source}, after step {before}, is not a row: {line[:60]!r}")
                )
            continue
        if type(step) is not int or step < 0 or step > budget:
            records.faults.append(
                Fault(before, f"{source} has step={step!r}, but the run's steps are 1 to {budget}")
            )
        elif run.last is None or step <= run.last:
            before = step
            yield source, row


def _claim(source: str, row: dict[str, Any], records: Records) -> Claim:
    def value(key: str, fits: bool, kind: str) -> Any:
        if row.get(key) is not None and not fits:
            records.faults.append(Fault(row["step"], f"{source}: {key}={row[key]!r} is no {kind}"))
            return None
        return row.get(key)

    hashes = {key: value(key, is_sha256(row.get(key)), "SHA-256") for key in ("data_chain", "batch_sha256")}
    counts = ("epoch", "position", "tokens")
    places = {key: value(key, type(row.get(key)) is int, "integer") for key in counts}
    if absent := [key for key in counts if row.get(key) is None]:
        records.faults.append(Fault(row["step"], f"{source} has no {' and no '.join(absent)}"))
    return Claim(row["step"], source, **hashes, **places)


def _check_order(run: RunRecord, rows: list[tuple[str, dict[str, Any]]], records: Records) -> None:
    """Steps rise from where the run began, an evaluation after its step; with all logged none is missing."""
    begun = own_start(run)
    before, hashed, evaluated = begun, False, False
    for source, row in rows:
        step, evaluation = row["step"], "loss" not in row
        if evaluation and "val_loss" not in row:
            records.faults.append(Fault(step, f"{source} has neither a loss nor a val_loss"))
        if step < begun or (step == begun and not evaluation):
            records.faults.append(
                Fault(step, f"{source} is of step {step}, but the run's own steps begin after {begun}")
            )
        elif step == before and (evaluated or not evaluation):
            kind = "evaluation" if evaluation else "row"
            records.faults.append(Fault(step, f"{source} is a second {kind} of step {step}"))
        elif step < before:
            records.faults.append(
                Fault(step, f"{source}, of step {step}, comes after step {before}: out of order")
            )
        elif hashed and "batch_sha256" in row and step > before + 1:
            records.faults.append(
                Fault(
                    before + 1,
                    f"{_steps(before + 1, step - 1)} missing before {source}: every step was logged",
                )
            )
        evaluated = evaluation or (evaluated and step <= before)
        before, hashed = max(step, before), hashed if evaluation else "batch_sha256" in row


def _check_chained(records: Records) -> None:
    """A chain that was broken off cannot go on: whatever comes before one of its values has one, too."""
    last = max((claim.step for claim in records.claims if claim.data_chain is not None), default=0)
    known = {fault.step for fault in records.faults}
    for claim in records.claims:
        # A resume without the chain makes up for an evaluation of a step that was trained with it.
        ends = last if "metrics" in claim.source else last + 1
        if claim.data_chain is None and claim.step < ends and claim.step not in known:
            text = f"{claim.source} has no data_chain, but what was written up to step {last} has one"
            records.faults.append(Fault(claim.step, f"{text}: it was taken out"))


def _other_settings(loader: LoaderConfig, segment: Segment) -> str:
    """Where a config.yaml names another order than the lineage; empty where it does not."""
    ours, theirs = to_dict(loader), to_dict(loader_config(segment))
    keys = [key for key in {**theirs, **ours} if key != "prefetch" and ours.get(key) != theirs.get(key)]
    said = [f"loader.{key}={ours.get(key)}, its lineage {theirs.get(key)}" for key in keys]
    return ", ".join(said)


def _check_gaps(run: RunRecord, logged: set[int], records: Records) -> None:
    """Since the last start the settings are known, and with them which steps were to be logged."""
    interval = 1 if run.config.trainer.log_batch_hash else run.config.trainer.log_interval
    first = _last_start(run.path) // interval * interval + interval
    missing = [step for step in range(first, records.last + 1, interval) if step not in logged]
    known = {fault.step for fault in records.faults}
    if missing and missing[0] not in known:
        more = f" ({len(missing)} such steps)" if len(missing) > 1 else ""
        records.faults.append(
            Fault(missing[0], f"metrics.jsonl has no row of step {missing[0]}, which was to be logged{more}")
        )


def _last_start(path: Path) -> int:
    """The step from which the settings in config.yaml hold; where it is not known, none."""
    try:
        step = json.loads((path / "environment.json").read_text())["starts"][-1]["step"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        step = None
    return step if type(step) is int else 2**62


def _checkpoints(run: RunRecord, records: Records) -> Iterator[Claim]:
    """What each checkpoint's trainer.json and loader.json say."""
    for step in checkpoint.complete_steps(run.path):
        path = checkpoint.step_dir(run.path, step)
        if run.last is not None and step > run.last:
            continue
        try:
            saved = checkpoint.open_checkpoint(path, tensors=False)
            segments = lineage.of_checkpoint(saved)
        except UserError as error:
            if path.exists():  # else a running training has removed it meanwhile
                records.faults.append(Fault(step, str(error)))
            continue
        name = f"checkpoints/{path.name}"
        records.checkpoints += 1
        if segments != run.segments[: len(segments)]:
            records.faults.append(
                Fault(step, f"{name}: its lineage is not how {lineage.FILE} begins: they are of two runs")
            )
        elif segments and saved.trainer["metadata_sha256"] != segments[-1].metadata_sha256:
            records.faults.append(
                Fault(
                    step,
                    f"{name}: metadata_sha256 {saved.trainer['metadata_sha256']}, its lineage says "
                    f"{segments[-1].metadata_sha256}",
                )
            )
        if segments:
            records.faults += [Fault(step, f"{name}: {text}") for text in _other_cursor(saved, segments[-1])]
        said = {key: saved.trainer.get(key) for key in ("data_chain", "epoch", "tokens")}
        yield _claim(name, said | {"step": step, "position": saved.loader.get("position")}, records)


def _other_cursor(saved: checkpoint.Checkpoint, segment: Segment) -> Iterator[str]:
    """What a checkpoint's loader.json and config.yaml say that its lineage does not; the position apart."""
    expected = segment.cursor | ({"epoch": saved.trainer["epoch"]} if "epoch" in segment.cursor else {})
    for key in {**expected, **saved.loader}:
        if key != "position" and saved.loader.get(key) != expected.get(key):
            yield f"loader.json says {key}={saved.loader.get(key)!r}, its lineage {expected.get(key)!r}"
    loader = from_dict(saved.config, str(saved.path / checkpoint.CONFIG)).loader
    if other := _other_settings(loader, segment):
        yield f"config.yaml says {other}"


def _steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"
