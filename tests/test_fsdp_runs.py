"""A run whose model is sharded over its ranks is the run that one process or DDP would make."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.checkpoint import open_checkpoint, step_dir
from tests.helpers_ranks import train_side_by_side
from tests.helpers_runs import rows, run, tiny_config, train_rows, write_text_set


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("fsdp") / "set")


def test_two_ranks(text: Path, tmp_path: Path) -> None:
    settings = {"model__dropout": 0.0, "trainer__micro_batch_size": 1}
    config = tiny_config(text, parallel="fsdp", **settings)
    answers = train_side_by_side(2, config, tmp_path / "fsdp")
    assert answers.errors == [None, None]
    run(tiny_config(text, **settings), tmp_path / "one")
    for ours, theirs in zip(rows(tmp_path / "fsdp"), rows(tmp_path / "one"), strict=True):
        print(ours, theirs)
    assert 0
