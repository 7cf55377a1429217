"""What a row says of the time since the row before."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from harness.run_files.run_dir import Status
from harness.sweep.curves import read_metrics
from harness.tracking import NoTracker
from harness.tracking.jsonl import MetricsFile
from harness.training import garbage
from harness.training.run import Progress
from harness.training.step_log import StepLog


def test_a_row_has_the_median_and_the_longest_wait_and_their_share(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = StepLog(MetricsFile(path), NoTracker(), Status(tmp_path / "status.json"), 1, None)
    progress = Progress()
    log.begin(progress, 6, 100)
    for waits in ([0.001, 0.5, 0.002], [0.003, 0.004, 0.005]):
        for wait in waits:
            log.waited(wait)
            progress.step, progress.tokens = progress.step + 1, progress.tokens + 100
        log.step(progress, progress.tokens, {"loss": 1.0, "lr": 1.0, "grad_norm": 1.0})
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["data_wait_ms"], first["data_wait_ms_max"]) == (2.0, 500.0)
    assert (second["data_wait_ms"], second["data_wait_ms_max"]) == (4.0, 5.0)
    seconds = 300 / first["tokens_per_s"]  # no time passed but the log's own
    assert first["data_wait_share"] == pytest.approx(0.503 / seconds, rel=1e-2)
    log.take_times(progress)
    assert progress.waited_s == pytest.approx(0.515)


def test_a_reports_share_is_of_all_waits_also_of_rows_without_one(tmp_path: Path) -> None:
    """Rows of older versions have the mean of an interval, and no share."""
    path = tmp_path / "metrics.jsonl"
    old = {"step": 10, "tokens": 1000, "loss": 2.0, "tokens_per_s": 100.0, "data_wait_ms": 50.0}
    new = {"step": 20, "tokens": 2000, "loss": 2.0, "tokens_per_s": 100.0, "data_wait_ms": 0.1}
    new |= {"data_wait_ms_max": 2000.0, "data_wait_share": 0.25}
    path.write_text("".join(json.dumps(row) + "\n" for row in (old, new)))
    metrics = read_metrics(path)
    assert metrics.seconds == pytest.approx(20.0)
    assert metrics.waited_s == pytest.approx(10 * 0.05 + 0.25 * 10)


def test_what_a_run_leaves_is_collected_again_also_after_an_error() -> None:
    gc.unfreeze()  # Python 3.12 begins with a few frozen ones
    frozen = []

    @garbage.frozen()
    def fails() -> None:
        frozen.append((gc.get_freeze_count(), gc.isenabled()))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert frozen[0][0] > 10_000
    assert frozen[0][1]
    assert gc.get_freeze_count() == 0
