"""A run's records and data, changed behind its back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.auditing.audit import audit
from harness.auditing.audit_records import Fault
from harness.auditing.replay import open_run


def faults(path: Path, **options: Any) -> list[Fault]:
    """What an audit of a run finds, with two threads."""
    return audit(open_run(path), threads=2, **options).faults


def edit_rows(path: Path, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Rewrite metrics.jsonl with what `edit` makes of its rows."""
    file = path / "metrics.jsonl"
    rows = edit([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_hash(sha256: str) -> str:
    return f"{int(sha256[0], 16) ^ 1:x}{sha256[1:]}"
