"""What stays of a run's checkpoints, and that nothing else is ever removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import retention
from harness.checkpoints.checkpoint import complete_steps, open_checkpoint, step_dir
from harness.checkpoints.saving import Saver
from harness.config import CheckpointConfig
from harness.errors import RunFailed, UserError
from harness.run_files import incidents
from tests.helpers_checkpoints import parts
from tests.helpers_disks import files_up_to, unwritable
from tests.helpers_runs import rows, run, tiny_config, write_text_set


def saved(path: Path, steps: range, best: int | None = None, **config: Any) -> list[int]:
    """The steps that are left of a run that saved `steps`, and evaluated each where `best` is the best."""
    saver = Saver(path, CheckpointConfig(**config))
    for step in steps:
        evaluated: dict[str, Any] = (
            {} if best is None else {"val_step": step, "val_loss": 1.0 if step == best else 2.0}
        )
        saver.save(parts(step, **evaluated))
    saver.finish()
    return complete_steps(path)


@pytest.mark.parametrize(
    ("config", "best", "left"),
    [
        ({"keep_last": 3}, None, [7, 8, 9]),
        ({"keep_last": 1}, None, [9]),
        ({"keep_last": None}, None, list(range(1, 10))),
        ({"keep_last": 2, "keep_every": 3}, None, [3, 6, 8, 9]),
        ({"keep_last": 2}, 4, [4, 8, 9]),
        ({"keep_last": 2, "keep_best": False}, 4, [8, 9]),
        ({"keep_last": 1, "keep_every": 5}, 2, [2, 5, 9]),
    ],
)
def test_the_newest_the_multiples_and_the_best_stay(
    tmp_path: Path, config: dict[str, Any], best: int | None, left: list[int]
) -> None:
    assert saved(tmp_path, range(1, 10), best, **config) == left
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000009\n"
    for step in left:
        assert open_checkpoint(step_dir(tmp_path, step)).step == step


def test_the_best_is_one_of_those_that_were_evaluated_and_saved(tmp_path: Path) -> None:
    """The loss that a checkpoint holds may be that of a step before it."""
    saver = Saver(tmp_path, CheckpointConfig(keep_last=1))
    for step, val_step, val_loss in ((2, None, None), (4, 4, 3.0), (6, 5, 1.0), (8, 8, 2.0), (10, 10, 2.5)):
        saver.save(parts(step, val_step=val_step, val_loss=val_loss, best_val_loss=1.0, best_step=5))
    saver.finish()
    assert complete_steps(tmp_path) == [8, 10]


def test_nothing_is_removed_that_the_run_did_not_write(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    saved(tmp_path, range(1, 3), keep_last=None)
    (tmp_path / "other").mkdir()
    saved(tmp_path / "other", range(3, 4))
    shutil.move(step_dir(tmp_path / "other", 3), step_dir(tmp_path, 3))  # of another run
    trainer = json.loads((step_dir(tmp_path, 3) / "trainer.json").read_text()) | {"run_id": "theirs"}
    (step_dir(tmp_path, 3) / "trainer.json").write_text(json.dumps(trainer))
    (step_dir(tmp_path, 2) / "notes.txt").write_text("the one for the paper")
    shutil.copytree(step_dir(tmp_path, 1), folder / "step-00000001.damaged")
    shutil.copytree(step_dir(tmp_path, 1), folder / "step-00000001 (copy)")
    shutil.copytree(step_dir(tmp_path, 1), tmp_path / "elsewhere")
    (folder / "step-00000000").symlink_to(tmp_path / "elsewhere")
    (folder / "mine").mkdir()
    before = {path.name for path in folder.iterdir()}
    saved(tmp_path, range(4, 9), keep_last=1)
    assert {path.name for path in folder.iterdir()} == before - {"step-00000001"} | {"step-00000008"}
    assert (tmp_path / "elsewhere" / "checkpoint.json").exists()


def test_a_foreign_newer_checkpoint_does_not_count_as_one_of_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, range(99, 100), keep_last=None)
    trainer = step_dir(tmp_path, 99) / "trainer.json"
    trainer.write_text(trainer.read_text().replace("ours", "theirs"))
    assert saved(tmp_path, range(1, 5), keep_last=2) == [3, 4, 99]


def test_checkpoints_from_before_an_incident_stay(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 4), keep_last=None)
    row = {"kind": "nonfinite", "step": 4, "action": "stop", "keep": [2, 3]}
    incidents.append(tmp_path, row)
    assert saved(tmp_path, range(4, 9), keep_last=1) == [2, 3, 8]


def test_incidents_that_cannot_be_read_keep_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "incidents.jsonl").write_text('{"step": 1}\nnoise\n{"step": 2}\n')
    assert saved(tmp_path, range(1, 6), keep_last=1) == [1, 2, 3, 4, 5]
    assert "line 2 is not a row" in caplog.text


def test_a_folder_that_may_not_be_removed_is_said_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, range(1, 3), keep_last=None)
    with unwritable(tmp_path / "checkpoints"), pytest.raises(OSError, match="Permission denied"):
        retention.remove_surplus(tmp_path, CheckpointConfig(keep_last=1), 2, "ours")
    assert {1, 2} <= {open_checkpoint(step_dir(tmp_path, step)).step for step in (1, 2)}
    (tmp_path / "checkpoints" / ".step-00000001.removed").write_text(
        "a file where the removal wants a folder"
    )
    assert saved(tmp_path, range(3, 5), keep_last=1)[-1] == 4
    assert complete_steps(tmp_path) == [1, 4]  # the others went
    assert caplog.text.count("older checkpoints could not be removed") == 1


def test_a_removal_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each of its calls in turn."""
    calls = [(os, "rename"), (retention, "fsync_dir"), (os, "unlink"), (os, "rmdir")]
    for number, (module, name) in enumerate(calls):
        path = tmp_path / str(number)
        path.mkdir()
        saved(path, range(1, 3), keep_last=None)

        def killed(*arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module, name, killed)
            with pytest.raises(KeyboardInterrupt):
                retention.remove_surplus(path, CheckpointConfig(keep_last=1), 2, "ours")
        for step in complete_steps(path):
            assert open_checkpoint(step_dir(path, step)).step == step
        assert complete_steps(path) == ([1, 2] if name == "rename" else [2])
        retention.clean_leftovers(path)
        assert {file.name for file in (path / "checkpoints").iterdir()} - {"step-00000001"} == {
            "latest", "step-00000002",
        }  # fmt: skip


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("step-00000004.tmp", ".step-00000002.removed"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".hydra").mkdir()
    ours = [
        tmp_path / ".status.json.123.tmp",
        folder / ".latest.9.tmp",
        tmp_path / ".hydra" / ".config.yaml.7.tmp",
    ]
    theirs = [
        tmp_path / "notes.tmp", tmp_path / ".notes.swp", folder / "step-4.tmp", folder / "mine.tmp",
        folder / "step-00000004.damaged", tmp_path / ".x.tmp", tmp_path / "step-00000004.tmp",
    ]  # fmt: skip
    for path in ours + theirs:
        path.write_text("x")
    (folder / "step-00000009.tmp").symlink_to(tmp_path)
    left = set(tmp_path.rglob("*"))
    gone = retention.clean_leftovers(tmp_path)
    assert set(gone) == {*ours, folder / "step-00000004.tmp", folder / ".step-00000002.removed"}
    assert set(tmp_path.rglob("*")) == {
        path for path in left if not any(path.is_relative_to(g) for g in gone)
    }
    assert retention.clean_leftovers(tmp_path) == []


def test_a_run_keeps_what_it_was_told_to_and_its_start_cleans_up(tmp_path: Path) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    settings = {"checkpoint__interval": 1, "checkpoint__keep_last": 2, "checkpoint__keep_every": 5}
    run(tiny_config(data, trainer__max_steps=7, **settings), path)
    losses = {row["step"]: row["val_loss"] for row in rows(path) if "val_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert complete_steps(path) == sorted({5, 6, 7, best})
    (path / "checkpoints" / "step-00000009.tmp").mkdir()
    run(tiny_config(data, trainer__max_steps=9, resume=str(path), **settings), path)
    assert {5, 8, 9} <= set(complete_steps(path))
    assert "step-00000009.tmp, which a writer that was killed had left" in (path / "train.log").read_text()


def test_latest_names_the_newest_before_anything_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, remove = [], retention.remove_surplus

    def looking(*arguments: Any) -> None:
        named.append((tmp_path / "checkpoints" / "latest").read_text())
        remove(*arguments)

    monkeypatch.setattr(retention, "remove_surplus", looking)
    assert saved(tmp_path, range(1, 4), keep_last=1) == [3]
    assert named == [f"step-0000000{step}\n" for step in (1, 2, 3)]


def test_what_a_kill_kept_from_going_goes_at_the_start_and_makes_room(tmp_path: Path) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    settings = {"checkpoint__interval": 1, "checkpoint__keep_last": 2, "evaluation__interval": 1000}
    run(tiny_config(data, trainer__max_steps=4, **settings | {"checkpoint__keep_last": None}), path)
    assert complete_steps(path) == [1, 2, 3, 4]

    with files_up_to(60_000), pytest.raises(RunFailed):
        run(tiny_config(data, trainer__max_steps=5, resume=str(path), **settings), path)
    assert complete_steps(path) == [3, 4]


@pytest.mark.parametrize("keep", [None, 5, ["4"]])
def test_an_incident_that_keeps_no_steps_is_named_and_removes_nothing(tmp_path: Path, keep: object) -> None:
    (tmp_path / incidents.FILE).write_text(json.dumps({"step": 3, "keep": keep}) + "\n")
    with pytest.raises(UserError, match="must be a list of steps"):
        incidents.kept_steps(tmp_path)


def test_the_checkpoint_from_before_skipped_steps_stays_while_they_last(tmp_path: Path) -> None:
    for step in range(4, 8):
        incidents.append(tmp_path, {"step": step, "action": "skip"})
    assert saved(tmp_path, range(1, 8), keep_last=2) == [3, 6, 7]
    assert saved(tmp_path, range(8, 10), keep_last=2) == [8, 9]
