"""A run whose model is sharded over its ranks is the run that one process makes, whoever goes on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints.checkpoint import complete_steps, open_checkpoint, step_dir
from harness.config_groups import ContrastiveRowsConfig
from harness.training import evaluation_cli
from tests.helpers_ranks import train_side_by_side
from tests.helpers_runs import rows, run, tiny_config, train_rows, write_pair_set, write_text_set

SETTINGS: dict[str, Any] = {"model__dropout": 0.0, "trainer__micro_batch_size": 1}


def assert_alike(ours: Path, theirs: Path) -> None:
    """Steps and the last evaluation: equal in what counts and hashes, within 1e-5 in what was computed."""
    pairs = list(zip(train_rows(ours), train_rows(theirs), strict=True))
    assert pairs
    for mine, other in [*pairs, (rows(ours)[-1], rows(theirs)[-1])]:
        numbers = {key for key, value in other.items() if isinstance(value, float)}
        assert {k: v for k, v in mine.items() if k not in numbers} == {
            k: v for k, v in other.items() if k not in numbers
        }
        assert max(abs(mine[key] - other[key]) for key in numbers) < 1e-5, (mine, other)


def test_one_process_goes_on_with_a_run_of_two_ranks_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, sharded, whole = write_text_set(tmp_path / "set"), tmp_path / "sharded", tmp_path / "whole"
    first = tiny_config(data, **SETTINGS, parallel="fsdp", trainer__max_steps=6)
    assert train_side_by_side(2, first, sharded).errors == [None] * 2
    run(tiny_config(data, **SETTINGS, resume=str(sharded)), sharded)
    run(tiny_config(data, **SETTINGS), whole)
    assert_alike(sharded, whole)
    kept = {step: open_checkpoint(step_dir(sharded, step)).sharded for step in complete_steps(sharded)}
    assert kept == {6: True, 8: False, 12: False}  # checkpoint.keep_last=3

    monkeypatch.setattr("sys.argv", ["evaluate.py", str(sharded), "tokens=200"])
    capsys.readouterr()
    evaluation_cli.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["loss"] == pytest.approx(rows(whole)[-1]["val_loss"], rel=0, abs=1e-5)


def test_preferences_are_learnt_in_shards_and_against_the_same_reference(tmp_path: Path) -> None:
    data, sharded, whole = write_pair_set(tmp_path / "set"), tmp_path / "sharded", tmp_path / "whole"

    def config(steps: int, **changes: Any) -> Any:
        result = tiny_config(data, **SETTINGS, trainer__max_steps=steps, **changes)
        result.loader = ContrastiveRowsConfig(seq_len=16, batch_size=4)
        return result

    first = config(4, parallel="fsdp")
    assert train_side_by_side(2, first, sharded).errors == [None] * 2
    run(config(6, resume=str(sharded)), sharded)
    run(config(6), whole)
    assert_alike(sharded, whole)
    files = [path / "reference.safetensors" for path in (sharded, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
