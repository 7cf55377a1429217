"""`train.py -m` as a user starts it: real processes, a tiny grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers_cli import TINY, make_root
from tests.helpers_runs import rows, snapshot, train_py

GRID = ("loader=sliding_window", "loader.stride=8,99999", "seed=0,1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("data"))


def test_a_sweep_ends_its_jobs_and_says_which_failed(data: Path, tmp_path: Path) -> None:
    words = ["-m", *TINY, f"data.root={data}"]
    result = train_py(*words, *GRID, cwd=tmp_path)
    assert result.returncode == 1
    assert "\nsweep seed-stride: 2 of 4 done, 2 failed\n" in result.stdout
    assert "val_loss after 512 tokens, 2 jobs in 1 group of 2 seeds" in result.stdout
    assert "error: loader.batch_size=4 needs 4 windows, but train has 1" in result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    folder = tmp_path / "multirun" / "seed-stride"
    done = sorted(path.parent for path in folder.glob("stride-8_*/metrics.jsonl"))
    assert [rows(path)[-1]["step"] for path in done] == [8, 8]
    failed = json.loads(next(folder.glob("stride-99999_seed-0-*/status.json")).read_text())
    assert (failed["state"], failed["reason"], failed["exit_code"]) == ("failed", "user", 2)
    assert "needs 4 windows" in failed["traceback"]

    before = [snapshot(path) for path in done]
    again = train_py(
        *words, "loader=sliding_window", "seed=1,0", "trainer.micro_batch_size=4", "loader.stride=8",
        "sweep.name=seed-stride", "hydra.verbose=false", cwd=tmp_path,
    )  # fmt: skip
    assert again.returncode == 0
    assert again.stdout.count("done already") == 2
    assert {"report.csv", "report.html"} <= {path.name for path in folder.iterdir()}
    assert [snapshot(path) for path in done] == before
