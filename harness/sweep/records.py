"""What a run's directory says, read once and forgivingly: a file that is damaged is named, never an error."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from harness.config import TrainConfig
from harness.config_groups import GROUPS
from harness.config_record import flatten, to_dict
from harness.errors import UserError
from harness.resuming import growth
from harness.run_files import run_dir
from harness.run_files.run_dir import JOB_FILE
from harness.sweep.curves import Metrics, read_metrics

if TYPE_CHECKING:
    from harness.storage.manifest import Manifest

T = TypeVar("T")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is about ten times as fast


@dataclass(frozen=True)
class Record:
    """A run. Whatever cannot be read is empty; what should be there and cannot is in `faults`, a line each.

    `config`: resolved, by dotted key. `words`: the run's own overrides; of a job that failed before it was
    a run, those of its sweep. `summary` is that of its last end.
    `manifest`: of its training data. `start`: the code and hardware of its newest start.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    manifest: Manifest | None = None
    start: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> int:
        sizes = [self.config.get(key) for key in ("loader.batch_size", "loader.seq_len")]
        return math.prod(size for size in sizes if isinstance(size, int))


def read_record(path: Path) -> Record:
    """The run in the directory `path`."""
    faults: list[str] = []

    def read(name: str, how: Callable[[Path], T], empty: T, *, needed: bool = True) -> T:
        try:
            return how(path / name)
        except FileNotFoundError:
            faults.extend([f"{name} is missing"] if needed else [])
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
        except (UserError, yaml.YAMLError, ValueError, RecursionError) as error:
            faults.append(f"{name} is damaged: {_one_line(error, path / name)}")
        return empty

    nothing: dict[str, Any] = {}
    no_words: list[str] = []
    words = read(JOB_FILE, _swept_words, no_words, needed=False)
    status = read("status.json", _json, nothing, needed=False)
    ended = status.get("state") == "done"
    record = Record(
        path=path,
        config=read("config.yaml", _read_resolved, nothing, needed=ended),
        words=read(".hydra/overrides.yaml", _words, words, needed=False),
        status=status,
        summary=read("summary.json", _json, nothing, needed=False),
        metrics=read("metrics.jsonl", read_metrics, Metrics(), needed=ended),
        manifest=read(growth.COPY, _manifest, None, needed=False),
        start=next((start for start in run_dir.read_starts(path)[-1:] if isinstance(start, dict)), nothing),
        faults=faults,
    )
    last = record.metrics.evaluations[-1].step if record.metrics.evaluations else 0
    if ended and not faults and isinstance(status.get("step"), int) and last < status["step"]:
        faults.append(f"metrics.jsonl has no evaluation after step {last}, the run is at {status['step']}")
    return record


def read_config(path: Path) -> dict[str, Any]:
    """A configuration as values by dotted key; interpolations are text."""
    values = _parsed_config(path.read_text())
    if not isinstance(values, dict) or not values:
        raise ValueError(f"it must hold keys, not {values!r:.80}")
    return dict(flatten(values))


def _read_resolved(path: Path) -> dict[str, Any]:
    """A run's resolved configuration; a key that its version did not have is at its default."""
    values = read_config(path)
    options = tuple(str(values.get(f"{group}.name")) for group in GROUPS)
    return _defaults(options) | values


@functools.lru_cache(maxsize=256)
def _defaults(options: tuple[str, ...]) -> dict[str, Any]:
    """Every key at its default, where the groups are these options."""
    config = TrainConfig()
    for group, option in zip(GROUPS, options, strict=True):
        if option in GROUPS[group]:
            setattr(config, group, GROUPS[group][option]())
    return dict(flatten(to_dict(config)))


def read_composed(path: Path) -> dict[str, Any]:
    """The configuration of the run in `path` before interpolations were resolved; empty where it is lost."""
    try:
        return read_config(path / ".hydra" / "config.yaml")
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def load_yaml(path: Path) -> Any:
    return _parsed_yaml(path.read_text())


def _parsed_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _parsed_config(text: str) -> Any:
    """`_parsed_yaml`, quick where the group of another run was the same text: most are, in a sweep."""
    groups = re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    if groups[0] or re.search(r"^[^\w\s-]|[&*]", text, flags=re.MULTILINE):
        return _parsed_yaml(text)
    values: dict[str, Any] = {}
    for group in groups[1:]:
        value = _parsed_group(group)
        if not isinstance(value, dict):
            return _parsed_yaml(text)
        values |= value
    return values


_parsed_group = functools.lru_cache(maxsize=4096)(_parsed_yaml)


def _swept_words(path: Path) -> list[str]:
    return _strings(_json(path).get("words", []))


def _words(path: Path) -> list[str]:
    return _strings(load_yaml(path))


def _strings(words: Any) -> list[str]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"it must hold overrides, KEY=VALUE, not {words!r:.80}")
    return words


def _json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"it must hold an object, not {value!r:.80}")
    return value


def _manifest(path: Path) -> Manifest | None:
    return _parsed(path.read_bytes())


@functools.lru_cache(maxsize=64)  # the jobs of a sweep have copies of one manifest
def _parsed(text: bytes) -> Manifest:
    from harness.storage.manifest import FORMATS, parse_manifest

    raw = json.loads(text)
    storage = raw.get("storage") if isinstance(raw, dict) else None
    name = storage.get("format") if isinstance(storage, dict) else None
    return parse_manifest(raw, Path(FORMATS.get(str(name), FORMATS["npy"])[0]))


def _one_line(error: Exception, path: Path) -> str:
    return " ".join(str(error).removeprefix(f"{path}: ").split())[:200]
