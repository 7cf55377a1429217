"""A loss that jumps is written down with its batch, and nothing else is different for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config import TrainConfig
from harness.run_files import incidents
from tests.helpers_runs import run, tiny_config, train_rows, weights, write_text_set
from tests.helpers_sets import write_set

PATTERN = [3, 1, 4, 1, 5, 9, 2, 6]
STEPS = 70
CALM = {"evaluation__interval": 1000, "evaluation__sample_tokens": 0, "checkpoint__interval": 1000}


@pytest.fixture(scope="module")
def noisy_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that repeats itself, with a shard of random tokens that the steps 51 to 54 read."""
    noise = np.random.default_rng(1).integers(0, 257, 4 * 64).tolist()
    shards = [PATTERN * 400, noise, PATTERN * 400]
    return write_set(
        tmp_path_factory.mktemp("data") / "set",
        {"train": shards, "val": [PATTERN * 50]},
        preparation={"corpus": "stdlib"},
    )


def config(data: Path, **changes: Any) -> TrainConfig:
    settings = {"optimizer__lr": 1e-2, "trainer__max_steps": STEPS, "schedule__total_steps": STEPS}
    return tiny_config(data, **{**CALM, **settings, **changes})


@pytest.fixture(scope="module")
def straight(noisy_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "straight"
    run(config(noisy_set), path)
    return path


def test_a_shard_of_random_tokens_is_found_by_its_batches(straight: Path) -> None:
    rows = incidents.read(straight)
    assert [row["step"] for row in rows] == [51, 52, 53, 54]
    logged = {row["step"]: row for row in train_rows(straight)}
    for row in rows:
        assert (row["kind"], row["action"], row["epoch"]) == ("spike", "none", 0)
        assert (row["position_before"], row["position"]) == (64 * (row["step"] - 1), 64 * row["step"])
        assert row["zscore"] > 8
        assert row["loss"] > row["median"] + 1
        for key in ("loss", "grad_norm", "batch_sha256"):
            assert row[key] == logged[row["step"]][key]


def test_a_plateau_of_spikes_is_one_line(straight: Path) -> None:
    log = (straight / "train.log").read_text()
    assert log.count("the loss jumped") == 1
    assert "step 51: the loss jumped to " in log
    assert "at tokens [3200, 3264) of train, epoch 0. Look at the batch: " in log


def test_looking_for_spikes_changes_nothing_that_is_trained(
    noisy_set: Path, straight: Path, tmp_path: Path
) -> None:
    run(config(noisy_set, trainer__spike_zscore=None), tmp_path / "run")
    assert weights(tmp_path / "run", STEPS) == weights(straight, STEPS)
    assert not (tmp_path / "run" / incidents.FILE).exists()


@pytest.mark.parametrize("stopped_at", [50, 52])
def test_a_resumed_run_finds_the_same_spikes(
    noisy_set: Path, straight: Path, tmp_path: Path, stopped_at: int
) -> None:
    path = tmp_path / "run"
    run(config(noisy_set, trainer__max_steps=stopped_at), path)
    run(config(noisy_set, resume=str(path)), path)
    assert (path / incidents.FILE).read_text() == (straight / incidents.FILE).read_text()


def test_a_spike_between_logged_steps_is_found(noisy_set: Path, tmp_path: Path) -> None:
    run(config(noisy_set, trainer__log_batch_hash=False, trainer__log_interval=30), tmp_path / "run")
    assert [row["step"] for row in incidents.read(tmp_path / "run")] == [51, 52, 53, 54]


def test_a_calm_run_has_no_incidents(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set", train_tokens=20_000)
    run(config(data, trainer__max_steps=150, schedule__total_steps=150), tmp_path / "run")
    assert not (tmp_path / "run" / incidents.FILE).exists()
