"""The result of scripts/bench_peers.py: what goes into the JSON, with the comparisons drawn from it."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from peers import BATCH_SIZE, SEQ_LEN
from peers.measuring import RESUMES, STARTS, WINDOWS
from peers.table import IN_ORDER, OURS, SHUFFLED, Peer

Row = dict[str, Any]


class Column(NamedTuple):
    """A figure of a row: its head in the table, how it is written, and which end is the good one."""

    key: str
    head: str
    written: Callable[[float], str]
    more_is_better: bool = False
    word: str = ""  # for it in a sentence, where that is not the head


def short(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ms(value: float) -> str:
    return f"{short(value)} ms" if value < 1000 else f"{short(value / 1000)} s"


def _mb(value: float) -> str:
    return f"{value:.1f} MB" if 0.05 <= value < 100 else f"{value:,.0f} MB"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


COLUMNS = (
    Column("mtok_per_s", "Mtok/s", short, more_is_better=True),
    Column("share", "of the floor", _percent, more_is_better=True, word="speed"),
    Column("first_batch", "first batch", _ms),
    Column("resume", "resume, new process", _ms),
    Column("seek", "resume, open", _ms),
    Column("anonymous_mb", "memory", _mb),
    Column("children_mb", "children", _mb),
    Column("state_bytes", "state", lambda size: f"{size} B"),
)


def described(rows: list[Row], peers: list[Peer], folder: Path, tokens: int, seconds: float) -> Row:
    """The whole JSON. `rows` are as `peers.measuring.measure` gives them, with name, order and turn."""
    for row in rows:
        row |= _medians(row)
    packages = sorted({"torch", "numpy", *(peer.package for peer in peers if peer.version)} - {""})
    return {
        "date": date.today().isoformat(),
        "tokens": tokens,
        "batch_size": BATCH_SIZE,
        "seq_len": SEQ_LEN,
        "windows": WINDOWS,
        "window_seconds": seconds,
        "starts": STARTS,
        "resumes": RESUMES,
        "machine": _machine(folder),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "not_installed": sorted({peer.package for peer in peers if peer.version is None}),
        "rows": rows,
        "comparison": [line for order in (IN_ORDER, SHUFFLED) for line in comparison(rows, order)],
        "drift": {
            f"{row['name']}, {row['order']}": _drift(rows, row)
            for row in rows
            if row["again"] and "share" in row
        },
    }


def _medians(row: Row) -> Row:
    """The figures of `COLUMNS` that the row does not have yet."""
    if "error" in row:
        return {}
    shares = [speed / floor for speed, floor in zip(row["tokens_per_s"], row["floor"], strict=True)]
    medians = {
        "mtok_per_s": statistics.median(row["tokens_per_s"]) / 1e6,
        "share": statistics.median(shares),
        "first_batch": statistics.median(row["first_batch_ms"]),
    }
    for column in ("resume", "seek"):
        if row.get(f"{column}_ms"):
            medians[column] = statistics.median(row[f"{column}_ms"])
    return medians


def brief(row: Row) -> str:
    """A row's speed, while others are being measured."""
    if "error" in row:
        return f"failed: {row['error']}"
    medians = _medians(row)
    return f"{short(medians['mtok_per_s'])} Mtok/s, {_percent(medians['share'])} of the floor"


def comparison(rows: list[Row], order: str) -> list[str]:
    """In words, for each column: who is ahead of this project's npy loader, with its thread and without.

    One that keeps its place by a number of one's own code is left out where sizes of states are compared.
    """
    measured = {
        row["name"]: row for row in rows if row["order"] == order and not row["again"] and "share" in row
    }
    ours = [measured[name] for name in OURS if name in measured]
    if len(ours) < len(OURS):
        return []
    others = [row for name, row in measured.items() if not name.startswith("this project")]
    lines = [_compared(column, ours, others) for column in COLUMNS if column.key != "mtok_per_s"]
    inexact = [name for name, row in measured.items() if row.get("exact") is False]
    lines += [f"other batches after a resume than without: {', '.join(inexact)}"] if inexact else []
    return [f"{order}, {line}" for line in lines]


def _compared(column: Column, ours: list[Row], others: list[Row]) -> str:
    key, sign = column.key, -1 if column.more_is_better else 1
    rivals = [row for row in others if key in row and (key != "state_bytes" or row["own_state"])]
    rivals.sort(key=lambda row: sign * row[key])
    figures = ", ".join(f"{column.written(row[key])} {name}" for row, name in zip(ours, _KINDS, strict=True))
    first, last = sorted(sign * row[key] for row in ours)
    ahead = _list(column, [row for row in rivals if sign * row[key] < first])
    between = _list(column, [row for row in rivals if first <= sign * row[key] < last])
    said = f"{column.word or column.head}: {figures}; ahead of both {ahead or f'nobody of {len(rivals)}'}"
    return f"{said}; of the slower or larger one {between}" if between else said


_KINDS = ("by default", "with prefetch=0")


def _list(column: Column, rows: list[Row]) -> str:
    return ", ".join(f"{row['name']} {column.written(row[column.key])}" for row in rows)


def _drift(rows: list[Row], last: Row) -> float | None:
    """The share of the floor at the end of the run over that at its beginning, of the same loader."""
    first = next(row for row in rows if row["name"] == last["name"] and row["order"] == last["order"])
    return last["share"] / first["share"] if "share" in first else None


def _machine(folder: Path) -> Row:
    """In general words: what somebody needs who compares the figures of two machines."""
    model = _first("/proc/cpuinfo", "model name")
    kib = int(_first("/proc/meminfo", "MemTotal").split()[0])
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(kib / 2**20),
        "file_system": _file_system(folder),
        "kernel": platform.release().split("-")[0],
    }


def _first(file: str, key: str) -> str:
    lines = Path(file).read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith(key)), "0")


def _file_system(folder: Path) -> str:
    """The type of the mount that holds `folder`: the deepest one on the way to it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(place), kind) for place, kind in mounts if folder.is_relative_to(place))[1]
