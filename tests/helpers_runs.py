"""Tiny runs in this process: a set of a few thousand tokens and a model that steps in a millisecond."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import TrainConfig
from harness.launch import Outcome, launch
from tests.helpers_forks import ROOT as ROOT
from tests.helpers_forks import forked
from tests.helpers_sets import random_rows, write_rows, write_set

TIMES = (
    "tokens_per_s",
    "data_wait_ms",
    "data_wait_ms_max",
    "data_wait_share",
)  # what may differ between two equal runs


def write_text_set(
    directory: Path, train_tokens: int = 3000, val_tokens: int = 400, **overrides: Any
) -> Path:
    """A set of byte tokens in two train shards; the same arguments give the same tokens."""
    generator = np.random.default_rng(7)
    train = generator.integers(0, 257, train_tokens).tolist()
    val = generator.integers(0, 257, val_tokens).tolist()
    overrides.setdefault("preparation", {"corpus": "stdlib"})
    half = train_tokens // 2
    return write_set(directory, {"train": [train[:half], train[half:]], "val": [val]}, **overrides)


def write_row_set(directory: Path, width: int = 17, **overrides: Any) -> Path:
    """A set of padded rows in two train shards; some rows are full, some are nothing but padding."""
    overrides.setdefault("preparation", {"corpus": "stdlib"})
    train = [random_rows(count, width, seed=count) for count in (30, 21)]
    return write_rows(directory, {"train": train, "val": [random_rows(20, width, seed=1)]}, **overrides)


def write_pair_set(directory: Path, width: int = 17, neg_width: int = 17, **overrides: Any) -> Path:
    """A set of 51 train and 20 val pairs of random rows."""
    overrides.setdefault("preparation", {"corpus": "stdlib"})
    splits = {}
    for split, count in (("train", 51), ("val", 20)):
        splits[f"{split}.pos"] = [random_rows(count, width, seed=2 * count)]
        splits[f"{split}.neg"] = [random_rows(count, neg_width, seed=2 * count + 1)]
    return write_rows(directory, splits, **overrides)


def tiny_config(set_directory: Path, **changes: Any) -> TrainConfig:
    """A run of 12 steps with dropout; `changes` are dotted keys with `__` for the dot."""
    config = TrainConfig()
    settings: dict[str, Any] = {
        "data__path": str(set_directory),
        "loader__seq_len": 16,
        "loader__batch_size": 4,
        "model__n_layer": 2,
        "model__n_head": 2,
        "model__n_embd": 32,
        "model__dropout": 0.1,
        "schedule__warmup_steps": 2,
        "schedule__total_steps": 12,
        "trainer__max_steps": 12,
        "trainer__log_batch_hash": True,
        "evaluation__interval": 5,
        "evaluation__tokens": 200,
        "evaluation__sample_tokens": 4,
        "checkpoint__interval": 4,
        **changes,
    }
    for key, value in settings.items():
        *groups, name = key.split("__")
        target: Any = config
        for group in groups:
            target = getattr(target, group)
        assert name in {field.name for field in dataclasses.fields(target)}, key
        setattr(target, name, value)
    return config


def run(config: TrainConfig, path: Path, **composed: str) -> Outcome:
    return launch(config, path, composed)


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl without what measures time."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def train_rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in rows(path) if "loss" in row]


def weights(path: Path, step: int) -> bytes:
    return (path / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below `path` with its content and modification time."""
    return {
        str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def train_py(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py WORDS` as a process of its own, which begins with everything imported."""
    return forked("train.py", *words, cwd=cwd, environment={"WANDB_MODE": "offline", **environment})


def train_py_from_nothing(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same where it matters what is imported, and when: a new interpreter."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
