"""A run that was stopped before the evaluation of its last saved step makes it when it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

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
