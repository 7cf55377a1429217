"""Sweepers that look for the best settings are told a finite number by every job."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness.sweep.job import FAILED_OBJECTIVE
from tests.helpers_cli import TINY, make_root
from tests.helpers_runs import ROOT, rows, train_py_from_nothing

pytestmark = pytest.mark.heavy

PLUGINS = ROOT / "tests" / "sweep" / "plugins"


def test_a_random_search_hears_a_finite_objective_of_every_trial(
    tmp_path: Path,
) -> None:
    data = make_root(tmp_path / "data")
    result = train_py_from_nothing(
        "-m", "hydra/sweeper=random", "hydra.sweeper.trials=5", *TINY, f"data.root={data}",
        "optimizer.lr=0.001,0.01,1.0", "optimizer.weight_decay=0.1,1000", "sweep.name=search",
        cwd=tmp_path, PYTHONPATH=f"{PLUGINS}:{ROOT}",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr  # some diverged
    folder = tmp_path / "multirun" / "search"
    trials = json.loads((folder / "trials.json").read_text())
    objectives = [trial["objective"] for trial in trials]
    assert all(math.isfinite(objective) for objective in objectives)
    assert FAILED_OBJECTIVE in objectives

    reached = {
        path.parent.name: rows(path.parent)[-1].get("val_loss") for path in folder.glob("*/metrics.jsonl")
    }
    losses = [loss for loss in reached.values() if loss is not None]
    assert min(objectives) == min(losses) < FAILED_OBJECTIVE
    by_words: dict[str, set[float]] = {}
    for trial in trials:
        by_words.setdefault(" ".join(trial["words"]), set()).add(trial["objective"])
    assert len(by_words) < len(trials)  # a setting was drawn twice: it says what it once reached
    assert all(len(values) == 1 for values in by_words.values())
    assert len(by_words) == len(reached)
    assert "done already" in result.stdout
