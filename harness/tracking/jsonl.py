"""metrics.jsonl: one JSON object a line, the truth about a run.

A number that is not finite is written as the string "NaN", "Infinity" or "-Infinity": strict JSON
that every parser reads, and that says which of the three it was. `read_rows` gives the number back.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.append_file import AppendFile
from harness.errors import UserError
from harness.files import write_atomic

log = logging.getLogger("harness")

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = (b'"NaN"', b'Infinity"')


class MetricsFile:
    """Appends rows to `path`, which may exist: a line that a crash left unfinished is dropped first.

    Rows that a full disk keeps out wait in memory, which is said once, and are written with the next.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            lines = [line for line, _ in _whole_lines(path)]
            if sum(map(len, lines)) != path.stat().st_size:
                write_atomic(path, b"".join(lines))
        self.path, self._file, self._waits = path, AppendFile(path), False

    def append(self, row: dict[str, Any]) -> None:
        """Write one row of plain values and hand it to the operating system."""
        error = self._file.append(encode_row(row))
        if error is not None and not self._waits:
            log.warning("%s cannot be written (%s): its rows wait in memory", self.path, error.strerror)
        elif error is None and self._waits:
            log.info("%s is written again, no row is missing", self.path)
        self._waits = error is not None

    def sync(self) -> None:
        """Make every row so far durable: to be called before a checkpoint that counts on them.

        Raises `OSError` where that is not possible.
        """
        try:
            self._file.sync()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Try the waiting rows once more; those that are lost are counted in the log."""
        self._file.close()
        if self._file.waiting:
            log.error(
                "%s lacks its last %d rows: it could not be written", self.path, len(self._file.waiting)
            )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every row, in order; a last line that is not whole (still being written, or torn) is skipped.

    Raises `UserError` with file and line where any other line is not a row.
    """
    data = path.read_bytes()
    rows = _rows_of(data)
    if rows is None:
        rows = [row for _, row in _whole_lines(path)]
    return [_with_numbers(row) for row in rows] if any(word in data for word in _WORDS) else rows


def evaluation_of(path: Path, step: int) -> dict[str, Any] | None:
    """The row that says how the model of step `step` did, or None; a missing file has none."""
    rows = read_rows(path) if path.exists() else []
    return next((row for row in rows if row.get("step") == step and "val_loss" in row), None)


def loss_after(path: Path, step: int, saved: float | None) -> float | None:
    """The validation loss of step `step`, None where it is no number; `saved` where no row says it.

    An evaluation that a stop cut short is made when the run goes on, after its step was saved.
    """
    row = evaluation_of(path, step)
    loss = saved if row is None else float(row["val_loss"])
    return loss if loss is not None and math.isfinite(loss) else None


def cut_after(path: Path, step: int) -> int:
    """Drop rows with a `step` beyond `step` and a torn last line, atomically; how many rows went.

    A missing file is left missing. Raises `UserError` as `read_rows` does.
    """
    return keep_rows(path, lambda row: row.get("step", 0) <= step)


def keep_rows(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> int:
    """Drop the rows that are not `wanted` and a torn last line, atomically; how many rows went.

    A missing file is left missing. Raises `UserError` as `read_rows` does.
    """
    if not path.exists():
        return 0
    lines = _whole_lines(path)
    kept = [line for line, row in lines if wanted(row)]
    if sum(map(len, kept)) != path.stat().st_size:
        write_atomic(path, b"".join(kept))
    return len(lines) - len(kept)


def last_rows(path: Path, size: int = 1 << 17) -> list[dict[str, Any]]:
    """The rows in the last `size` bytes of a file of whole lines, in order, whatever the file's length."""
    with open(path, "rb") as file:
        start = max(0, path.stat().st_size - size)
        file.seek(start)
        lines = file.read().split(b"\n")
    return [_with_numbers(json.loads(line)) for line in lines[1 if start else 0 :] if line]


def encode_row(row: dict[str, Any]) -> bytes:
    """A row as its line."""

    def strict(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value

    values = {key: strict(value) for key, value in row.items()}
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def _rows_of(data: bytes) -> list[dict[str, Any]] | None:
    """The rows of a file of nothing but whole lines, parsed at once, which is twice as fast; else None."""
    lines = data.split(b"\n")
    if lines.pop():
        return None
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return None
    return rows if len(rows) == len(lines) and all(map(_is_row, rows)) else None


def _with_numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()
    }


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Every line that holds a row, each with its newline, and the row."""
    lines = path.read_bytes().split(b"\n")
    whole = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() and number == len(lines):
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if _is_row(row):
            whole.append((line + b"\n", row))
        elif any(later.strip() for later in lines[number:]):
            # A crash can only tear the end; this was something else, and dropping it would hide it.
            raise UserError(
                f"{path}: line {number} is not a row (a JSON object whose step is an integer and whose "
                f"losses are numbers): {line[:80]!r}. Dropping it silently would hide a gap in the figures; "
                "restore the file, or delete that line to go on without it"
            )
    return whole


def _is_row(value: Any) -> bool:
    """Whether a line's value has, of what is read back from rows, nothing that is something else."""
    if not isinstance(value, dict) or type(value.get("step", 0)) is not int:
        return False
    return _is_loss(value.get("loss", 0.0)) and _is_loss(value.get("val_loss", 0.0))


def _is_loss(value: Any) -> bool:
    return type(value) in (int, float) or (type(value) is str and value in _NOT_FINITE)
