"""A comparison as one page: tables and figures that draw themselves, in a file that needs nothing beside it.

The page's parts lie in `page/`: a template, style sheets and scripts, which are put into one another here.
What a user named goes in as JSON that no parser of HTML can see into, and comes out as text alone.
"""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from harness.sweep.again import onward_command
from harness.sweep.comparison import Comparison, Entry, Group, Point

_SCRIPTS = ("base", "numbers", "axes", "tables", "dots", "coverage", "curves", "heat", "jobs", "main")
_MOST_POINTS = 80_000  # of the training curves together, and of the others: as many as a page draws at once
_LARGEST = 2**53  # integers beyond it lose digits in a browser


def html(comparison: Comparison) -> str:
    """The whole of report.html; it can be written as UTF-8 whatever the names and paths hold."""
    scripts = "\n".join(_part(f"{name}.js") for name in _SCRIPTS)
    return Template(_part("report.html")).substitute(
        title=escape(_printable(comparison.name)),
        style=_part("colours.css") + _part("report.css"),
        script=f"(() => {{\n'use strict';\n{scripts}}})();",
        data=in_script(page_data(comparison)),
    )


def in_script(value: Any) -> str:
    """`value` as ASCII JSON in which nothing can end a script element or open a comment; no NaN."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def page_data(comparison: Comparison) -> dict[str, Any]:
    """What the page is drawn from; groups and `best` name their jobs by their place in `entries`.

    Figures that are not finite are null; in keys, which hold what a user wrote, they are words.
    """
    points = max(20, _MOST_POINTS // max(1, len(comparison.entries)))
    places = {str(entry.path): place for place, entry in enumerate(comparison.entries)}
    return {
        "name": _printable(comparison.name),
        "swept": list(comparison.swept),
        "columns": list(comparison.columns),
        "metric": comparison.metric,
        "equal_tokens": comparison.equal_tokens,
        "notes": list(comparison.notes),
        "entries": [_entry(entry, points) for entry in comparison.entries],
        "groups": [_group(group, places) for group in comparison.groups],
        "best": None if comparison.best is None else places[str(comparison.best.path)],
        "onward": None if comparison.best is None else _printable(onward_command(comparison.best)),
    }


def _entry(entry: Entry, points: int) -> dict[str, Any]:
    return {
        "path": _printable(str(entry.path)),
        "state": entry.state,
        "reason": _printable(entry.reason),
        "keys": _keys(entry.keys),
        "values": _finite_values(entry.values),
        "train": _curve(entry.train, points),
        "validation": _curve(entry.validation, points),
        "command": _printable(entry.command),
    }


def _group(group: Group, places: dict[str, int]) -> dict[str, Any]:
    return {
        "keys": _keys(group.keys),
        "entries": [places[str(entry.path)] for entry in group.entries],
        "mean": _finite(group.mean),
        "half_width": _finite(group.half_width),
        "means": _finite_values(group.means),
        "is_best": group.is_best,
        "is_tied": group.is_tied,
    }


def _curve(curve: list[Point], points: int) -> dict[str, list[float | None]]:
    """Columns of at most `points` points, the last one among them, with the digits that a figure can show."""
    every = -(-len(curve) // points) or 1
    kept = curve[::-1][::every][::-1]
    return {
        "tokens": [point.tokens for point in kept],
        "seconds": [_rounded(point.seconds) for point in kept],
        "loss": [_rounded(point.loss) for point in kept],
    }


def _rounded(number: float) -> float | None:
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else number


def _finite_values(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in values.items()}


def _keys(keys: dict[str, Any]) -> dict[str, Any]:
    return {name: _key(value) for name, value in keys.items()}


def _key(value: Any) -> Any:
    """A swept value as JSON: words for what JSON or a browser has no number for."""
    if isinstance(value, dict):
        return {str(name): _key(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_key(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > _LARGEST:
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _printable(str(value))


def _printable(text: str) -> str:
    """`text` with a question mark for each byte of a file's name that is no text."""
    return text.encode("utf-8", "replace").decode()


def _part(name: str) -> str:
    return files("harness.sweep").joinpath("page", name).read_text(encoding="utf-8")
