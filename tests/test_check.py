"""`check=true`: says what a start would do, refuses what it would refuse, and leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.check import check_run
from tests.helpers_runs import run, snapshot, tiny_config, train_rows, weights, write_text_set


@pytest.fixture(scope="module")
def text_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data"))


def plan(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What was printed, by the titles of its parts."""
    parts: dict[str, list[str]] = {}
    name = "before"
    for line in capsys.readouterr().out.splitlines():
        title = line[:11].strip()
        if title:
            name = title
        parts.setdefault(name, []).append(line[11:])
    return parts


def test_a_check_leaves_no_trace_and_the_run_after_it_is_the_same(
    text_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    before = snapshot(text_set)
    check_run(tiny_config(text_set), tmp_path / "runs" / "one")
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]
    assert snapshot(text_set) == before
    assert list(plan(capsys)) == [
        "before",
        "run",
        "data",
        "loader",
        "budget",
        "model",
        "memory",
        "dry step",
        "time",
    ]

    run(tiny_config(text_set), tmp_path / "runs" / "one")
    run(tiny_config(text_set), tmp_path / "runs" / "two")
    assert train_rows(tmp_path / "runs" / "one") == train_rows(tmp_path / "runs" / "two")
    assert weights(tmp_path / "runs" / "one", 12) == weights(tmp_path / "runs" / "two", 12)
