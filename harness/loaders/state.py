"""Whether a saved cursor may continue: every field compared, every difference named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.errors import UserError

# What a loader is called in a state that names no strategy: the sequential one's six keys have none.
_UNNAMED = "sequential"

_KINDS = {int: "an integer", str: "a string"}

# Where the loader is, which no setting decides.
_PLACE = ("epoch", "position")

_ORDER = "the same position would be another place in another order; set loader.{} as it was"

_REASONS = {
    "format_version": "the checkpoint was written by another version of the harness",
    "batch_size": "the position counts batches of another size; set loader.batch_size as it was",
    "seq_len": "the batches would hold other tokens; set loader.seq_len as it was",
    "split": "the position is one of another token stream",
    "metadata_sha256": "the checkpoint was trained on another prepared set; point data.path at that one",
} | {
    key: _ORDER.format(key)
    for key in ("seed", "epoch_seed", "stride", "sampling", "row_width", "window_tokens")
}


def check_state(state: Any, current: Mapping[str, Any], end: int) -> int:
    """The position in `state`, if it fits the loader whose own state is `current`.

    `end` is the last allowed position. Raises `UserError` for a missing or unknown key, a value of another
    type (true is no number), every field that differs (`Incompatible loader seq_len: checkpoint 128, config
    64`), and a position outside of `[0, end]`.
    """
    if type(state) is not dict or not _only_moved(state, current):
        _refuse_difference(state, current)
    position: int = state["position"]
    if not 0 <= position <= end:
        raise UserError(
            f"Incompatible loader position: checkpoint {position}, but it must lie between 0 and {end}, the "
            "end of the epoch. The checkpoint is damaged or belongs to another set"
        )
    return position


def _only_moved(state: dict[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether `state` is `current` at another place: what is usual, in a fifth of the time of all else."""
    for key, ours in current.items():
        saved: Any = state.get(key)
        if type(saved) is not type(ours) or (saved != ours and (key not in _PLACE or saved < 0)):
            return False
    return len(state) == len(current)


def _refuse_difference(state: Any, current: Mapping[str, Any]) -> None:
    """Raise `UserError` for whatever is not as in `current`, if anything is."""
    if not isinstance(state, Mapping):
        raise UserError(f"Incompatible loader state: {state!r} is not a mapping of {', '.join(current)}")
    ours, theirs = current.get("strategy", _UNNAMED), state.get("strategy", _UNNAMED)
    if theirs != ours:
        raise UserError(
            f"Incompatible loader strategy: checkpoint {theirs}, config {ours}. A position in one order "
            f"means nothing in another; use loader={theirs}"
        )
    _check_keys(state, current)
    problems = [problem for key in current if (problem := _difference(key, state[key], current[key]))]
    if problems:
        raise UserError("\n".join(problems))


def _check_keys(state: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    missing = [key for key in current if key not in state]
    unknown = [str(key) for key in state if key not in current]
    if missing or unknown:
        found = [f"missing {', '.join(missing)}"] if missing else []
        found += [f"unknown {', '.join(unknown)}"] if unknown else []
        raise UserError(
            f"Incompatible loader state: {' and '.join(found)}; expected exactly {', '.join(current)}. The "
            "checkpoint is damaged or was written by another version of the harness"
        )


def _difference(key: str, saved: Any, ours: Any) -> str | None:
    if type(saved) is not type(ours):
        configured = "" if key in _PLACE else f", config {ours!r}"
        return (
            f"Incompatible loader {key}: checkpoint {saved!r}{configured}: it must be {_KINDS[type(ours)]}. "
            "The checkpoint is damaged or was written by something else"
        )
    if key == "epoch" and saved < 0:
        return f"Incompatible loader epoch: checkpoint {saved}, but epochs count from 0: it is damaged"
    if key in _PLACE or saved == ours:
        return None
    reason = f" ({_REASONS[key]})" if key in _REASONS else ""
    return f"Incompatible loader {key}: checkpoint {saved}, config {ours}{reason}"
