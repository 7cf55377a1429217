"""What `provenance.json` must look like where a later preparation relies on it."""

from __future__ import annotations

import re
from typing import Any


def well_formed(value: Any) -> dict[str, Any]:
    """The sections of a provenance that are as a preparation writes them.

    A damaged one is left out, as if it had never been recorded: it is no part of a set's identity, and
    whoever needs it says so.
    """
    if not isinstance(value, dict):
        return {}
    return {key: part for key, part in value.items() if key not in _SECTIONS or _fits(part, _SECTIONS[key])}


def _fits(value: Any, kind: Any) -> bool:
    """A type; a tuple of alternatives; `[kind]` of a list; a dict of required keys, or `{str: kind}` of any;
    else a function."""
    if isinstance(kind, tuple):
        return any(_fits(value, one) for one in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return False
        if str in kind:
            return all(_fits(item, kind[str]) for item in value.values())
        return all(key in value and _fits(value[key], one) for key, one in kind.items())
    if isinstance(kind, type):
        return type(value) is kind
    return bool(kind(value))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _are_counts(value: Any) -> bool:
    """Which counts there are has grown: those that are recorded must be counts."""
    return isinstance(value, dict) and all(
        _fits(one, [str]) if key == "bad_places" else _is_count(one) for key, one in value.items()
    )


_FILE = {"name": str, "path": str, "size": int, "mtime_ns": int}
_SHARDS = {"shards": [str], "bytes": _is_count}
_SPLIT = (_SHARDS, {"documents": _is_count, "pos": _SHARDS, "neg": _SHARDS})
_SOURCE_COUNTS = dict.fromkeys(
    ("documents", "empty", "truncated", "bad", "skipped_windows", "padding"), _is_count
) | {"places": [str], "chain": _is_sha256}
_SECTIONS: dict[str, Any] = {
    "corpus_path": (type(None), str, [str]),
    "documents": _are_counts,
    "files_sha256": {str: str},
    "grown_from": [{}],
    "source_files": [_FILE],
    "sources": [_FILE | {"splits": {"train": _SPLIT, "val": _SPLIT}, "counts": _SOURCE_COUNTS}],
    "versions": {},
}
