"""A run that was stopped before the evaluation of its last saved step makes it when it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints.checkpoint import step_dir
from harness.training import trainer
from harness.training.run import Run
from tests.helpers_runs import rows, run, snapshot, tiny_config, write_text_set


def _without_evaluation_of(path: Path, step: int) -> None:
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not (f'"step": {step},' in line and "val_loss" in line)]
    assert len(kept) == len(lines) - 1
    file.write_text("".join(kept))


@pytest.mark.parametrize(("saved", "budget"), [(10, 12), (12, 12)])
def test_a_missing_evaluation_is_made_first(tmp_path: Path, saved: int, budget: int) -> None:
    data = write_text_set(tmp_path / "set")
    config = tiny_config(data, checkpoint__interval=5)
    run(config, tmp_path / "straight")
    path = tmp_path / "run"
    run(tiny_config(data, checkpoint__interval=5, trainer__max_steps=saved), path)
    _without_evaluation_of(path, saved)

    again = tiny_config(data, checkpoint__interval=5, trainer__max_steps=budget, resume=str(path))
    run(again, path)
    assert rows(path) == rows(tmp_path / "straight")
    before = snapshot(path)
    run(again, path)  # complete now
    assert snapshot(path) == before


def test_its_loss_is_not_forgotten_where_the_run_dies_before_it_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    again = tiny_config(data, resume=str(path))
    step = trainer.train_step

    def dying_after_six(run_: Run, *arguments: Any) -> Any:
        return 1 / 0 if run_.progress.step == 6 else step(run_, *arguments)

    for name, broken in (("evaluate", lambda *_, **__: 1 / 0), ("train_step", dying_after_six)):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, broken)
            with pytest.raises(ZeroDivisionError):
                run(tiny_config(data) if name == "evaluate" else again, path)
    run(again, path)
    (evaluation,) = (row for row in rows(path) if row["step"] == 5 and "val_loss" in row)
    saved = json.loads((step_dir(path, 8) / "trainer.json").read_text())
    assert (saved["val_loss"], saved["best_val_loss"], saved["best_step"]) == (
        evaluation["val_loss"], evaluation["val_loss"], 5,
    )  # fmt: skip
