"""The files of a checkpoint and what each must hold: every fault is a `UserError` with both values.

Tensors are in two files, or in shards: see `shard_files.py`. The functions take the checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from harness.checkpoints.shard_files import SHARDS, part_files, ranks_of
from harness.errors import UserError
from harness.files import sha256_file

FORMAT_VERSION, SHARDED_VERSION = 1, 2
MODEL, OPTIMIZER, RNG = "model.safetensors", "optimizer.pt", "rng.pt"
LOADER, TRAINER, CONFIG = "loader.json", "trainer.json", "config.yaml"
SMALL_FILES = (RNG, LOADER, TRAINER, CONFIG)
FILES = (MODEL, OPTIMIZER, *SMALL_FILES)
INDEX = "checkpoint.json"
Entries = dict[str, dict[str, Any]]  # of an index, by the names of files: their bytes and SHA-256
_TRAINER_KEYS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "epoch": (int,),
    "tokens": (int,),
    "elapsed_s": (int, float),
    "val_loss": (int, float, type(None)),
    "best_val_loss": (int, float, type(None)),
    "best_step": (int, type(None)),
    "run_id": (str,),
    "parent": (dict, type(None)),
    "vocab_size": (int,),
    "metadata_sha256": (str,),
    "content_sha256": (str, type(None)),
}
# Of runs that have such a thing; absent in checkpoints that were written before it was known.
_OPTIONAL_TRAINER_KEYS: dict[str, tuple[type, ...]] = {
    "init_from": (dict, type(None)),
    "reference_sha256": (str, type(None)),
    "data_changes": (list,),
    "val_step": (int, type(None)),
    "lineage": (list,),
    "data_chain": (str, type(None)),
    "train_s": (int, float),
    "waited_s": (int, float),
    "timed_tokens": (int,),
    "peak_memory_mb": (int, float, type(None)),
}


def expected_files(names: Iterable[str]) -> tuple[str, ...]:
    """The files of a whole step that has these `names`: those of shards where one of them is a part."""
    ranks = ranks_of(names)
    return (SHARDS, *part_files(ranks), *SMALL_FILES) if ranks else FILES


def check_files(path: Path, entries: Entries) -> None:
    """Compare files with what the index says of them."""
    for name, entry in entries.items():
        check_file(path, name, entry)


def check_file(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Compare the file `name` with what the index says of it: `entry` has its bytes and SHA-256."""
    file = path / name
    if not file.is_file():
        raise UserError(f"{file} is missing, but {INDEX} names it ({entry['bytes']} bytes)")
    try:
        size = file.stat().st_size
        digest = sha256_file(file) if size == entry["bytes"] else None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error})") from None
    if digest is None:
        raise UserError(f"{file} has {size} bytes, {INDEX} says {entry['bytes']}: the file is damaged")
    if digest != entry["sha256"]:
        raise UserError(f"{file}: SHA-256 is {digest}, {INDEX} says {entry['sha256']}: the file is damaged")


def read_index(path: Path) -> dict[str, Any]:
    """`format_version`, `step` and `files` (bytes and SHA-256 by name), all of them checked.

    `format_version` is SHARDED_VERSION where the tensors are in shards, which older versions cannot read.
    """
    file, index = path / INDEX, read_json(path, INDEX)
    version, entries, step = index.get("format_version"), index.get("files"), index.get("step")
    if type(version) is not int or version not in (FORMAT_VERSION, SHARDED_VERSION):
        known = f"{FORMAT_VERSION} and {SHARDED_VERSION}"
        raise UserError(f"{file}: format_version {version!r}, this harness reads {known}")
    whole = set(index) == {"format_version", "step", "files"}
    if not whole or type(step) is not int or step < 0 or not isinstance(entries, dict):
        raise UserError(
            f"{file} is not an index of this harness: it must hold format_version, step and files"
        )
    expected = expected_files(entries)
    if set(entries) != set(expected) or (version == FORMAT_VERSION) != (expected == FILES):
        raise UserError(f"{file} names {', '.join(sorted(entries))}; expected {', '.join(sorted(expected))}")
    for name, entry in entries.items():
        whole = isinstance(entry, dict) and set(entry) == {"bytes", "sha256"}
        if not whole or type(entry["bytes"]) is not int:
            raise UserError(f"{file}: the entry of {name} must hold bytes and sha256, not {entry!r}")
    return index


def read_trainer(path: Path) -> dict[str, Any]:
    """trainer.json, every key of it with a value of its type."""
    trainer = read_json(path, TRAINER)
    optional = {key: kinds for key, kinds in _OPTIONAL_TRAINER_KEYS.items() if key in trainer}
    for key, kinds in (_TRAINER_KEYS | optional).items():
        value = trainer.get(key)
        if key not in trainer or not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise UserError(
                f"{path / TRAINER}: {key} is {trainer.get(key, 'missing')!r}, expected {wanted}: "
                "not written by this harness"
            )
    return trainer


def read_config(path: Path) -> dict[str, Any]:
    """config.yaml as plain containers."""
    try:
        config = yaml.safe_load((path / CONFIG).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path / CONFIG} cannot be read as YAML ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path / CONFIG} must hold keys, not {config!r}")
    return config


def read_json(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name`."""
    try:
        value = json.loads((path / name).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path / name} cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path / name} must hold a JSON object, not {type(value).__name__}")
    return value
