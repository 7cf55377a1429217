"""How often a run is looked at, logged, saved or read ahead changes no bit of what is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints.checkpoint import step_dir
from harness.config import TrainConfig, layout
from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
    TrackerConfig,
)
from tests.helpers_runs import (
    run,
    tiny_config,
    train_rows,
    weights,
    write_pair_set,
    write_row_set,
    write_text_set,
)
from tests.tracking.test_tracking_runs import own_home, tracked  # noqa: F401

STEPS = 12
SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 6}
LOADERS: dict[str, LoaderConfig] = {
    "sequential": LoaderConfig(**SIZES),
    "permutation": SlidingWindowConfig(**SIZES),
    "uniform": SlidingWindowConfig(sampling="uniform", **SIZES),
    "padded_rows": PaddedRowsConfig(**SIZES),
    "block_shuffle": BlockShuffleConfig(window_tokens=320, **SIZES),
    "contrastive_rows": ContrastiveRowsConfig(**SIZES),
}
QUIET: dict[str, Any] = {
    "evaluation__interval": 1000,
    "evaluation__sample_tokens": 0,
    "loader__prefetch": 0,
    "trainer__log_interval": 50,
    "trainer__log_batch_hash": False,
    "trainer__data_chain": False,
    "trainer__spike_zscore": None,
    "checkpoint__interval": 1000,
    "checkpoint__background": False,
}
BUSY: dict[str, Any] = {
    "evaluation__interval": 1,
    "evaluation__sample_tokens": 8,
    "loader__prefetch": 8,
    "trainer__log_interval": 1,
    "trainer__log_batch_hash": True,
    "trainer__data_chain": True,
    "trainer__spike_zscore": 0.1,
    "trainer__on_nonfinite": "skip",
    "trainer__max_minutes": 60,
    "checkpoint__interval": 1,
    "checkpoint__background": True,
    "checkpoint__keep_last": 1,
}
# Each of them alone, against QUIET.
CHANGES: list[dict[str, Any]] = [
    *({key: value} for key, value in BUSY.items() if key != "checkpoint__keep_last"),
    {"checkpoint__interval": 1, "checkpoint__keep_last": 1, "checkpoint__keep_best": False},
    {"checkpoint__interval": 1, "checkpoint__keep_last": None, "checkpoint__background": True},
    {"checkpoint__minutes": 1e-6},
]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sets of less than an epoch and a half, so that a run of 12 steps begins a second one."""
    folder = tmp_path_factory.mktemp("sets")
    return {
        "stream": write_text_set(folder / "stream", train_tokens=900),
        "rows": write_row_set(folder / "rows"),
        "contrastive": write_pair_set(folder / "contrastive"),
    }


@pytest.fixture(scope="module")
def quiet(sets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each loader that nothing looks at before its end."""
    folder = tmp_path_factory.mktemp("quiet")
    for name in LOADERS:
        run(config_of(name, sets, **QUIET), folder / name)
    return {name: folder / name for name in LOADERS}


def config_of(name: str, sets: dict[str, Path], **changes: Any) -> TrainConfig:
    return tiny_config(sets[layout(LOADERS[name])], loader=LOADERS[name], **changes)


def check_equal(path: Path, expected: Path) -> None:
    """The same weights, optimizer, random state and cursor; and the same row of a step that both logged."""
    assert weights(path, STEPS) == weights(expected, STEPS)
    for name in ("optimizer.pt", "rng.pt"):
        ours, theirs = (
            torch.load(step_dir(one, STEPS) / name, weights_only=True) for one in (path, expected)
        )
        assert as_bytes(ours) == as_bytes(theirs), name
    assert cursor(path) == cursor(expected)
    assert cursor(path)["epoch" if "epoch" in cursor(path) else "position"] > 0
    known = {row["step"]: row for row in train_rows(expected)}
    common = [row for row in train_rows(path) if row["step"] in known]
    assert common
    for row in common:
        for key in ("loss", "lr", "grad_norm", "epoch", "tokens", "position"):
            assert row[key] == known[row["step"]][key]


def as_bytes(state: Any) -> Any:
    """A state with each tensor as its bytes."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: as_bytes(value) for key, value in state.items()}
    return [as_bytes(value) for value in state] if isinstance(state, list | tuple) else state


def cursor(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((step_dir(path, STEPS) / "loader.json").read_text())
    return state


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_that_is_looked_at_all_the_time_trains_what_an_unobserved_one_does(
    name: str, sets: dict[str, Path], quiet: dict[str, Path], tmp_path: Path
) -> None:
    run(config_of(name, sets, **BUSY), tmp_path / "busy")
    check_equal(tmp_path / "busy", quiet[name])


@pytest.mark.parametrize("name", ["permutation", "contrastive_rows"])
def test_the_cadences_may_change_at_a_resume(
    name: str, sets: dict[str, Path], quiet: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    run(config_of(name, sets, trainer__max_steps=7, **QUIET), path)
    run(config_of(name, sets, resume=str(path), **BUSY), path)
    check_equal(path, quiet[name])


@pytest.mark.parametrize(
    "change", CHANGES, ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items())
)
def test_each_of_them_alone_changes_nothing(
    change: dict[str, Any], sets: dict[str, Path], quiet: dict[str, Path], tmp_path: Path
) -> None:
    run(config_of("permutation", sets, **QUIET | change), tmp_path / "run")
    check_equal(tmp_path / "run", quiet["permutation"])


def test_a_tracker_changes_nothing(sets: dict[str, Path], quiet: dict[str, Path], tmp_path: Path) -> None:
    config = config_of("permutation", sets, **BUSY)
    config.tracker = tracked(sets["stream"]).tracker
    assert config.tracker != TrackerConfig()
    run(config, tmp_path / "run")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    check_equal(tmp_path / "run", quiet["permutation"])
