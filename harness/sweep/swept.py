"""Which keys tell runs apart: those that were swept, and those that differ for no other reason.

Runs differ in more keys than anybody swept: `loader.seed` is an interpolation of `seed`, `model=micro` is
four numbers. Such followers are no columns. A key that differs and that nothing explains is one, though
nobody named it: the runs were started with different defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import yaml

from harness.commandline.overrides import key_of, value_of
from harness.config_groups import GROUPS
from harness.sweep.identity import IGNORED
from harness.sweep.records import Record, read_composed

SEED = "seed"
DATA = "metadata_sha256"  # no key, but what a path or a corpus stood for when the run read it
_GROUPS = (*GROUPS, "model")
_WHOLE_CONFIGS = ("experiment",)  # a word that any other key may follow, and that no config.yaml has
_NO_KEYS = ("tracker", "run", "sweep", "hydra")  # groups that no result follows from


def swept_keys(records: Sequence[Record]) -> list[str]:
    """The keys that tell these runs apart by their dotted names, in the configuration's order, the seed last.

    A group is called as on the command line, `model` for `model.name`.
    """
    whole = [_values(record) for record in records if record.config]
    partial = [_values(record) for record in records if not record.config]
    known = list(dict.fromkeys(key for values in [*whole, *partial] for key in values))
    differing = [key for key in known if _count(key, whole, partial) > 1]
    words = {key_of(word) for record in records for word in record.words}
    named = [key for key in differing if key in words]
    rest = [k for k in differing if k not in words and k != DATA and f"{k}.name" not in IGNORED]
    swept = {*named, *rest} - _followers(records, whole, named, rest)
    swept |= {DATA} if _have_other_data(whole, swept) else set()
    return sorted(swept, key=lambda key: (key == SEED, known.index(key)))


def keys_of(record: Record, swept: Iterable[str]) -> dict[str, Any]:
    """The run's value of each swept key: None where it has none; without those that are not known."""
    values = _values(record)
    return {key: values.get(key) for key in swept if record.config or key in values}


def _values(record: Record) -> dict[str, Any]:
    """What may tell a run apart; of one whose configuration is not known, what its words say."""
    said = {key_of(word): value_of([word], key_of(word)) for word in record.words}
    values: dict[str, Any] = {key: said[key] for key in _WHOLE_CONFIGS if key in said}
    if not record.config:
        values |= {key: _parsed(text) for key, text in said.items() if text is not None}
    for key, value in record.config.items():
        group, _, name = key.partition(".")
        values[group if name == "name" and group in _GROUPS else key] = value
    if record.manifest is not None:
        values[DATA] = record.manifest.metadata_sha256[:12]
    return {key: value for key, value in values.items() if not _is_ignored(key)}


def _is_ignored(key: str) -> bool:
    return key in IGNORED or key.partition(".")[0] in _NO_KEYS


def _parsed(text: str) -> Any:
    """The value that Hydra would read, of a number or a plain word."""
    with contextlib.suppress(yaml.YAMLError):
        value = yaml.safe_load(text)
        if not isinstance(value, str):
            return value
    with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3 as text
        return float(text)
    return text


def _count(key: str, whole: list[dict[str, Any]], partial: list[dict[str, Any]]) -> int:
    """How many values of `key` there are."""
    seen = {_hashable(values.get(key)) for values in whole}
    return len(seen | {_hashable(values[key]) for values in partial if key in values})


def _have_other_data(whole: list[dict[str, Any]], swept: set[str]) -> bool:
    """Whether runs that are equal in all swept keys were trained on different data, as far as it is known."""
    keys = sorted(swept - {SEED})
    known = [values for values in whole if DATA in values]
    pairs = {(_hashable([values.get(key) for key in keys]), values[DATA]) for values in known}
    return len(pairs) > len({settings for settings, _ in pairs})


def _followers(
    records: Sequence[Record], values: list[dict[str, Any]], named: list[str], keys: list[str]
) -> set[str]:
    """Those of `keys` that follow from a choice: of their group, of an experiment, or by an interpolation."""
    choices = [key for key in named if key in _WHOLE_CONFIGS]
    found = set()
    for key in keys:
        group = key.partition(".")[0]
        causes = [*choices, group] if group in _GROUPS and key != group else choices
        if any(_decides(cause, key, values) for cause in causes):
            found.add(key)
    left = [key for key in keys if key not in found]
    return found | (_interpolated(records, left) if left else set())


def _decides(cause: str, key: str, values: list[dict[str, Any]]) -> bool:
    """Whether runs that are equal in `cause` are equal in `key`, and some are not in `cause`."""
    pairs = {(_hashable(one.get(cause)), _hashable(one.get(key))) for one in values}
    causes = {pair[0] for pair in pairs}
    return len(pairs) == len(causes) > 1


def _interpolated(records: Sequence[Record], keys: list[str]) -> set[str]:
    """Those of `keys` that every run composed from other keys, and all in the same way."""
    composed = [one for record in records if (one := read_composed(record.path))]
    found = set()
    for key in keys:
        texts = {_hashable(one.get(key)) for one in composed}
        if len(texts) == 1 and "${" in str(texts):
            found.add(key)
    return found


def _hashable(value: Any) -> Hashable:
    return repr(value)
