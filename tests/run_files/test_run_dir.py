"""status.json: never half written, never behind at a change of phase, and cheap between two of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.run_files import run_dir
from harness.run_files.run_dir import Status, read_status


def test_a_noted_step_is_in_the_next_write(tmp_path: Path) -> None:
    status = Status(tmp_path / "status.json")
    status.note(step=7, wandb_last_step=7)
    status.update(phase="save")
    written = read_status(tmp_path)
    assert (written["step"], written["wandb_last_step"], written["phase"]) == (7, 7, "save")


@pytest.mark.parametrize(("interval", "step"), [(0.0, 7), (3600.0, 0)])
def test_a_note_is_written_once_the_interval_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float, step: int
) -> None:
    monkeypatch.setattr(run_dir, "_NOTE_INTERVAL", interval)
    status = Status(tmp_path / "status.json")
    status.note(step=7)
    assert read_status(tmp_path)["step"] == step
