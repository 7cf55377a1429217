"""What show_run.py says of a run before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from harness.checkpoints.checkpoint import step_dir
from harness.run_files.run_history import history
from tests.helpers_forks import forked
from tests.helpers_runs import run, tiny_config, write_text_set


def test_a_branch_that_was_resumed_names_its_starts_its_parent_and_its_incidents(tmp_path: Path) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "branch"
    run(tiny_config(data), tmp_path / "run")
    begin = str(step_dir(tmp_path / "run", 8))
    run(tiny_config(data, resume=begin, trainer__max_steps=9), path)
    run(tiny_config(data, resume=str(path), trainer__max_steps=10), path)
    rows = [{"step": step, "kind": "spike", "action": "none"} for step in (9, 10)]
    (path / "incidents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = history(path)
    assert lines == history(step_dir(path, 9))
    said = "\n".join(lines)
    assert "state      done at step 10, in the phase end" in said
    assert "starts     2\n           after step 8, 20" in said
    assert "\n           after step 9, 20" in said
    assert f"branch of  {tmp_path / 'run'} at step 8\n" in said
    assert f"incidents  2 spike (none), the last at step 10: {path / 'incidents.jsonl'}" in said
    assert "saved      2 checkpoints, of steps 9, 10" in said


def test_many_starts_are_shown_by_their_ends(tmp_path: Path) -> None:
    starts = [{"step": step, "time": "now", "host": "here"} for step in range(20)]
    (tmp_path / "environment.json").write_text(json.dumps({"starts": starts}))
    lines = history(tmp_path)
    assert lines[0] == "starts     20"
    assert len(lines) == 10
    assert lines[5] == "           ..."
    assert lines[-1] == "           after step 19, now, on here"


def test_whatever_is_missing_or_damaged_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(write_text_set(tmp_path / "set"), trainer__max_steps=4), path)
    for name, damage in (
        ("incidents.jsonl", "no\nrow\n"),
        ("environment.json", '{"starts": {}}'),
        ("status.json", "[]"),
        ("environment.json", None),
        ("status.json", None),
    ):
        if damage is None:
            (path / name).unlink()
        else:
            (path / name).write_text(damage)
        assert history(path)[-1] == "saved      1 checkpoints, of steps 4"
    shutil.rmtree(path / "checkpoints")
    assert history(path) == []
    assert history(tmp_path / "nowhere") == []


def test_a_run_that_died_before_its_first_checkpoint_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "status.json").write_text(json.dumps({"state": "failed", "step": 3, "error": "RuntimeError: no"}))
    shown = forked("scripts/show_run.py", str(path), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "state      failed at step 3" in shown.stdout
    assert "error      RuntimeError: no" in shown.stdout
