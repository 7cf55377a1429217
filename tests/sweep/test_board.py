"""What a sweep exits with is how its jobs are at the end, and a sweep that cannot be kept is not begun."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from harness.commandline.overrides import CommandLine
from harness.errors import UserError
from harness.sweep import parent
from harness.sweep.board import Board

SHA256 = "0123456789abcdef" * 4


def job_directory(folder: Path, **status: object) -> Path:
    path = folder / f"seed-0-{SHA256[:8]}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "status.json").write_text(json.dumps({"state": "done", "step": 4, **status}))
    return path


def test_a_done_job_that_is_found_to_fit_no_more_ends_the_sweep_with_1(tmp_path: Path) -> None:
    job_directory(tmp_path)
    board = Board(tmp_path, {SHA256: "seed=0"})
    with board.watching():
        assert board.exit_code(board.look(anew=True)) == 0
        job_directory(tmp_path, reason="other_data", error="other data now")
    assert "seed=0  failed at step 4: other_data: other data now" in board.table(board.look(anew=True))
    assert board.exit_code(board.look(anew=True)) == 1


def test_a_reason_that_announces_something_says_it_too(tmp_path: Path) -> None:
    board = Board(tmp_path, {SHA256: "seed=0"})
    for rest in ("\n  - a: 1\n  - b: 2\nTo mend it: c", "\n  a: 1; b: 2\nthen again"):
        job_directory(tmp_path, state="failed", reason="user", error=f"UserError: not as it was:{rest}")
        assert board.table(board.look(anew=True)).splitlines()[0].endswith("not as it was: a: 1; b: 2")


@pytest.mark.parametrize("in_the_way", ["multirun", "multirun/seed", "multirun/seed/.locks"])
def test_a_sweep_whose_folder_cannot_be_written_is_refused_before_its_first_job(
    in_the_way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / in_the_way
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with pytest.raises(UserError, match="cannot be made or written to"):
        parent.main(CommandLine(["-m"], ["seed=0,1"]))
    assert file.read_bytes() == b""


def test_a_sweep_that_its_launcher_fails_is_not_one_to_run_again_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    (tmp_path / "multirun" / "seed" / "multirun.yaml").mkdir(parents=True)  # a file that Hydra writes first
    with pytest.raises(SystemExit) as ended:
        parent.main(CommandLine(["-m"], ["seed=0,1"]))
    assert ended.value.code == 1
    assert "0 of 2 done, 2 waiting" in capsys.readouterr().out


def test_the_exit_code_is_that_of_the_table_whatever_another_launch_does_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_directory(tmp_path, state="running", pid=os.getpid(), host=socket.gethostname())
    board = Board(tmp_path, {SHA256: "seed=0"})
    monkeypatch.setattr(parent, "Board", lambda folder, labels: board)
    monkeypatch.setattr(parent, "_hydra", lambda line: None)
    monkeypatch.setattr(parent, "_report", lambda folder: job_directory(tmp_path))  # done in the meantime
    with pytest.raises(SystemExit) as ended:
        parent.main(CommandLine(["-m"], ["seed=0,1", f"hydra.sweep.dir={tmp_path}"]))
    assert "0 of 1 done, 1 running" in capsys.readouterr().out
    assert ended.value.code == 75
    assert json.loads((job / "status.json").read_text())["state"] == "done"
