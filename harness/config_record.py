"""A configuration as a record: plain containers for config.yaml and W&B, and back again."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from harness.config import TrainConfig
from harness.config_groups import GROUPS
from harness.errors import UserError, did_you_mean


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain containers: what config.yaml and W&B hold."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], source: str) -> TrainConfig:
    """Rebuild a `TrainConfig` from a run's config.yaml; unknown keys and options are refused by name."""
    result = _build(TrainConfig, values, "", source)
    assert isinstance(result, TrainConfig)
    return result


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested dict as pairs of dotted key and value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with the old and the new one; None where a side lacks the key."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _build(kind: type, values: Any, prefix: str, source: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{source}: {prefix.rstrip('.') or 'the file'} must hold keys, not {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise UserError(f"{source}: unknown key {prefix}{key}{did_you_mean(str(key), hints)}")
    arguments = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(
                _variant(key, hints[key], value, source), value, f"{prefix}{key}.", source
            )
        else:
            _check_type(hints[key], value, f"{prefix}{key}", source)
            arguments[key] = value
    return kind(**arguments)


def _variant(group: str, default: Any, values: Any, source: str) -> type:
    name = values.get("name") if isinstance(values, dict) else None
    variants = GROUPS.get(group)
    if variants is None:
        return typing.cast(type, default)
    if name not in variants:
        raise UserError(f"{source}: {group}={name} is not one of {', '.join(variants)}")
    return variants[name]


def _check_type(hint: Any, value: Any, key: str, source: str) -> None:
    if hint is Any:
        return
    allowed = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    plain = tuple(typing.get_origin(kind) or kind for kind in allowed)
    number_as_float = float in plain and isinstance(value, int) and not isinstance(value, bool)
    if not number_as_float and (
        not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain)
    ):
        raise UserError(
            f"{source}: {key}={value!r} has the wrong type, expected {' or '.join(k.__name__ for k in plain)}"
        )
