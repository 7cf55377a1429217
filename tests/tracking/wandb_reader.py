"""Reads a `.wandb` file: records of W&B's protocol, framed as LevelDB frames its log.

After a file header of 7 bytes, blocks of 32 KiB hold chunks: checksum (4 bytes), length (2), kind (1),
payload. A record is one whole chunk, or a first, any middle ones and a last. A chunk never crosses a
block, so up to 6 bytes at a block's end are padding.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
HEADER = struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Run:
    """What one `.wandb` file says about a run."""

    id: str = ""
    name: str = ""
    notes: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    step_metrics: dict[str, str] = field(default_factory=dict)
    artifacts: list[Any] = field(default_factory=list)
    exit_code: int | None = None
    preempted: bool = False


def read_run(wandb_dir: Path, index: int = -1) -> Run:
    """The run in the `index`-th run folder, by its starting time, of a `wandb` folder."""
    return read_runs(wandb_dir)[index]


def read_runs(wandb_dir: Path) -> list[Run]:
    """The runs in every run folder of a `wandb` folder, in the order of their starting time."""
    found = [path for path in wandb_dir.glob("*run-*") if path.is_dir() and not path.is_symlink()]
    runs = []
    for folder in sorted(found, key=lambda path: path.name.split("run-")[1]):
        (path,) = folder.glob("*.wandb")
        runs.append(Run())
        for record in records(path):
            _add(runs[-1], record)
    return runs


def union(runs: list[Run]) -> dict[int, dict[str, Any]]:
    """The rows of all starts of one run; none of their steps may be there twice."""
    rows: dict[int, dict[str, Any]] = {}
    for run in runs:
        assert not set(rows) & set(run.rows), f"steps twice: {sorted(set(rows) & set(run.rows))}"
        rows |= run.rows
    return rows


def records(path: Path) -> Iterator[Any]:
    """Every whole record of a `.wandb` file, also of one whose writer was killed."""
    from wandb.proto import wandb_internal_pb2

    new_record: Any = vars(wandb_internal_pb2)["Record"]  # made at import; type checkers do not see it
    data = path.read_bytes()
    assert data[:6] == b":W&B\xe1\xbe", data[:7]
    position, parts = 7, b""
    while position + HEADER.size <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER.size:
            position += room
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        start, position = position + HEADER.size, position + HEADER.size + length
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or position > len(data):
            return
        parts = data[start:position] if kind in (WHOLE, FIRST) else parts + data[start:position]
        if kind in (WHOLE, LAST):
            record = new_record()
            record.ParseFromString(parts)
            yield record


def _add(run: Run, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.id, run.name, run.project = record.run.run_id, record.run.display_name, record.run.project
        run.group, run.job_type = record.run.run_group, record.run.job_type
        run.notes, run.tags = record.run.notes, list(record.run.tags)
        run.config.update(_items(record.run.config.update))
    elif kind == "config":
        run.config.update(_items(record.config.update))
    elif kind == "summary":
        run.summary.update(_items(record.summary.update))
    elif kind == "history":
        row = _items(record.history.item)
        own = {key: value for key, value in row.items() if not key.startswith("_")}
        assert row["_step"] not in run.rows, f"step {row['_step']} twice"
        run.rows[int(row["_step"])] = own
    elif kind == "metric":
        run.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    elif kind == "artifact":
        run.artifacts.append(record.artifact)
    elif kind == "preempting":
        run.preempted = True
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
