"""`-m check=true`: the whole grid as it would be, and nothing is started or made."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.commandline import overrides
from harness.sweep import parent
from harness.sweep.grid import grid_of
from harness.sweep.job import run_job
from tests.helpers_cli import TINY
from tests.helpers_runs import snapshot, write_text_set

Captured = pytest.CaptureFixture[str]
WORDS = (*TINY, "data.root=data", "loader=sliding_window")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text_set(tmp_path / "data" / "npy-stream")
    return tmp_path


def checked(*words: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as stop:
        parent.main(overrides.split(["-m", *WORDS, *words, "check=true"]))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def table(capsys: Captured) -> tuple[list[list[str]], str]:
    """The rows as words, and all that was printed."""
    text = capsys.readouterr().out
    return [line.split() for line in text.splitlines() if line[:1].isdigit() and "jobs" not in line], text


def test_each_job_has_a_row_and_nothing_is_made(place: Path, capsys: Captured) -> None:
    before = snapshot(place)
    assert checked("loader.stride=8,16", "seed=0,1") == 0
    rows, text = table(capsys)
    assert [row[:4] for row in rows] == [
        ["0", "8", "0", "8"], ["1", "8", "1", "8"], ["2", "16", "0", "8"], ["3", "16", "1", "8"],
    ]  # fmt: skip
    assert "to train: 2,048 tokens, about" in text
    assert snapshot(place) == before
    assert not (place / "multirun").exists()


def test_impossible_combinations_are_named_with_job_words_and_reason(place: Path, capsys: Captured) -> None:
    assert checked("loader.seq_len=16,512", "loader.stride=8,16", "evaluation.tokens=100") == 2
    rows, text = table(capsys)
    assert [row[0] for row in rows if row[-1] == "impossible"] == ["2", "3"]
    reason = "impossible: loader.seq_len=512 needs 513 tokens, but val has 400"
    assert reason in text
    assert (
        "  job 2: loader.seq_len=512 loader.stride=8\n  job 3: loader.seq_len=512 loader.stride=16\n" in text
    )
    assert not (place / "multirun").exists()


def test_jobs_that_are_done_are_told_apart(place: Path, capsys: Captured) -> None:
    grid = grid_of(overrides.split(["-m", *WORDS, "optimizer.lr=1e-3,2e-3", "sweep.name=lrs"]))
    assert grid is not None
    ended = run_job(grid.jobs[0].config, grid.folder, grid.jobs[0].words, {})
    assert ended.state == "done"
    before = snapshot(place / "multirun")
    assert checked("optimizer.lr=1e-3,2e-3,3e-3", "sweep.name=lrs") == 0
    rows, text = table(capsys)
    assert [row[-1] == "done" for row in rows] == [True, False, False]
    assert "3 jobs, 1 done already, 0 impossible; to train: 1,024 tokens" in text

    write_text_set(place / "data" / "npy-stream", train_tokens=2000)  # its results are of other data now
    assert checked("optimizer.lr=1e-3,2e-3", "sweep.name=lrs") == 2
    assert "is done, on data of metadata_sha256" in table(capsys)[1]
    assert snapshot(place / "multirun") == before


def test_a_grid_without_data_says_who_prepares_it(place: Path, capsys: Captured) -> None:
    assert checked("optimizer.lr=1e-3,2e-3", "data.root=elsewhere") == 0
    assert "there is no prepared set at elsewhere/npy-stream: the first job" in table(capsys)[1]
    assert not (place / "elsewhere").exists()
