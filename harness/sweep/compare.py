"""From run directories to a comparison: which runs, what tells them apart, which is best, by how much."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.commandline.commands import shown
from harness.errors import UserError
from harness.run_files.run_dir import JOB_FILE, holds_a_run
from harness.sweep.again import own_command
from harness.sweep.comparison import Comparison, Entry, Group
from harness.sweep.figures import COLUMNS, equal_tokens, figures
from harness.sweep.likeness import Likeness, likeness, uneven
from harness.sweep.records import Record, read_record
from harness.sweep.states import DONE, JobState, read_state
from harness.sweep.statistics import half_width, is_within_noise, pooled
from harness.sweep.swept import SEED, keys_of, swept_keys

_DEEPEST = 3  # folders of runs below a path: runs/DATE/TIME


def compare(where: Path | Sequence[Path]) -> Comparison:
    """The runs in a sweep's folder, in any folder of runs, or in several such folders and run directories.

    Whatever is wrong with a run is the `reason` of its entry. Raises `UserError` where there is no run.
    """
    paths = [where] if isinstance(where, Path) else list(where)
    runs = find_runs(paths)
    name = Path(os.path.abspath(paths[0])).name if len(paths) == 1 else f"{len(runs)} runs"
    return compare_records(name, [read_record(path) for path in runs])


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories at or below `paths`, each once."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.is_dir():
            problem = "is no folder" if path.exists() else "does not exist"
            raise UserError(f"{path} {problem}: give a sweep's folder (multirun/NAME), or run directories")
        runs = list(_runs_below(path, _DEEPEST))
        if not runs:
            raise UserError(
                f"{path} holds no run, so there is nothing to compare: give a sweep's folder "
                "(multirun/NAME), a folder of runs (runs/DATE), or run directories"
            )
        for run in runs:
            found.setdefault(os.path.realpath(run), run)
    return list(found.values())


def _runs_below(path: Path, depth: int) -> list[Path]:
    if holds_a_run(path) or (path / JOB_FILE).is_file():
        return [path]
    if not depth:
        return []
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    folders = [path / name for name in names if name[0] != "." and (path / name).is_dir()]
    return [run for folder in folders for run in _runs_below(folder, depth - 1)]


def compare_records(name: str, records: Sequence[Record]) -> Comparison:
    """The comparison of runs that were read."""
    states = {record.path: read_state(record.path) for record in records}
    done = [r for r in records if states[r.path].state == DONE and not r.faults and not _diverged(r)]
    like, tokens, swept = likeness(done), equal_tokens(done), swept_keys(records)
    entries = _once_a_seed([_entry(r, states[r.path], swept, tokens, like.metric) for r in records])
    groups = _groups(entries, like)
    compared = [entry for group in groups for entry in group.entries]
    taken = {id(entry) for entry in compared}
    best = next((group.entries for group in groups if group.is_best), None)
    return Comparison(
        name=name,
        swept=swept,
        columns=list(COLUMNS),
        metric=like.metric,
        equal_tokens=tokens,
        entries=[*compared, *(entry for entry in entries if id(entry) not in taken)],
        groups=groups,
        notes=[*like.notes, *uneven(done, tokens)],
        best=None if best is None else min(best, key=lambda entry: _metric(entry, like.metric)),
    )


def _entry(record: Record, state: JobState, swept: list[str], tokens: int | None, metric: str) -> Entry:
    values = figures(record, tokens)
    reason = state.reason or "; ".join(record.faults) or _diverged(record)
    value = values[metric]
    if state.state == DONE and not reason and (value is None or not math.isfinite(value)):
        later = tokens is not None and any(one.tokens > tokens for one in record.metrics.evaluations)
        reason = f"it has no {metric}{f' of its first {tokens:,} tokens' if later else ''}"
    return Entry(
        path=record.path,
        state=state.state,
        reason=reason,
        keys=keys_of(record, swept),
        values=values,
        train=record.metrics.train,
        validation=record.metrics.validation,
        command=own_command(record),
    )


def _diverged(record: Record) -> str:
    """Why a run that came to its end has no result; empty where it has one."""
    for one in record.metrics.evaluations[-1:]:
        if not math.isfinite(one.loss):
            return f"diverged: val_loss is {one.loss} at step {one.step}"
    return ""


def _once_a_seed(entries: list[Entry]) -> list[Entry]:
    """The same with a reason for each that repeats another: of one seed they are no two samples."""
    first: dict[str, Entry] = {}
    result = []
    for entry in entries:
        if _is_compared(entry):
            same = first.setdefault(_key(entry.keys), entry)
            if same is not entry:
                reason = f"equal in all of its settings to {shown(same.path)}, which is counted"
                entry = dataclasses.replace(entry, reason=reason)
        result.append(entry)
    return result


def _groups(entries: list[Entry], like: Likeness) -> list[Group]:
    """The done jobs by their keys without the seed, the best first."""
    by_keys: dict[str, list[Entry]] = defaultdict(list)
    for entry in filter(_is_compared, entries):
        by_keys[_key(_without_seed(entry.keys))].append(entry)
    results = {key: [_metric(entry, like.metric) for entry in group] for key, group in by_keys.items()}
    order = sorted(results, key=lambda key: statistics.fmean(results[key]))
    noise = pooled(results.values())
    groups = []
    for place, key in enumerate(order):
        is_best = like.comparable and place == 0
        groups.append(
            Group(
                keys=_without_seed(by_keys[key][0].keys),
                entries=by_keys[key],
                mean=statistics.fmean(results[key]),
                half_width=half_width(results[key]),
                means={name: _mean([entry.values[name] for entry in by_keys[key]]) for name in COLUMNS},
                is_best=is_best,
                is_tied=like.comparable
                and place > 0
                and noise is not None
                and is_within_noise(results[order[0]], results[key], noise),
            )
        )
    return groups


def _is_compared(entry: Entry) -> bool:
    return entry.state == DONE and not entry.reason


def _metric(entry: Entry, metric: str) -> float:
    value = entry.values[metric]
    assert value is not None
    return value


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _without_seed(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != SEED}


def _key(keys: dict[str, Any]) -> str:
    return repr(keys)
