"""Job directories for reports: copies of one real run's files with other keys, words and losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from harness.files import write_json
from harness.tracking.jsonl import encode_row, read_rows
from tests.helpers_runs import run, tiny_config

_COPIED = ("environment.json", "manifest.json")
COMPOSED = {"loader": {"seed": "${seed}"}}  # as conf/loader has it


def make_template(data: Path, path: Path) -> Path:
    """A real run of twelve steps of 64 tokens, evaluated at 5, 10 and 12."""
    run(tiny_config(data, model__n_layer=1, checkpoint__interval=100), path)
    return path


def write_job(
    template: Path,
    path: Path,
    words: list[str],
    loss: float | Callable[[int], float] = 5.0,
    *,
    steps: int = 12,
    **status: Any,
) -> Path:
    """A done job in `path` whose `words` changed the template's keys; `loss`: validated, or by its step.

    A group word sets the group's `name`; `seed` is followed by `loader.seed`, `status` changes status.json.
    """
    (path / ".hydra").mkdir(parents=True)
    config = yaml.safe_load((template / "config.yaml").read_text())
    for word in words:
        key, _, text = word.partition("=")
        _set(config, key, float(text) if "e-" in text else yaml.safe_load(text))
    config["loader"]["seed"] = config["seed"]
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config | COMPOSED, sort_keys=False))
    (path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(words))
    (path / ".hydra" / "hydra.yaml").write_text("hydra:\n  job:\n    config_name: train\n")
    for name in _COPIED:
        (path / name).write_bytes((template / name).read_bytes())
    size = config["loader"]["batch_size"] * config["loader"]["seq_len"]
    ended = {"step": steps, "tokens": steps * size}
    for name, changes in (("status.json", {"step": steps} | status), ("summary.json", ended)):
        write_json(path / name, json.loads((template / name).read_text()) | changes)
    rows = []
    for row in read_rows(template / "metrics.jsonl"):
        changed = {"tokens": row["step"] * size}
        if "val_loss" in row:
            value = loss(row["step"]) if callable(loss) else loss
            changed |= {"val_loss": value, "val_bits_per_byte": value * 1.5}
        rows += [row | changed] if row["step"] <= steps else []
    (path / "metrics.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    return path


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *groups, name = key.split(".")
    if isinstance(config.get(key), dict):
        groups, name = [key], "name"
    elif key not in config and not groups:
        return  # an experiment, which no config.yaml has
    for group in groups:
        config = config[group]
    config[name] = value
