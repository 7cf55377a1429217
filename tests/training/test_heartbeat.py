"""status.json says what a run is doing, and is renewed where the run gets on: there alone, and everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import checkpoint_writer, saving
from harness.checkpoints.saving import Saver
from harness.config import CheckpointConfig
from harness.config_groups import ModelConfig
from harness.model import GPT, generate
from harness.run_files import run_dir
from harness.run_files.run_dir import Status
from harness.storage import open_split
from harness.training.evaluation import evaluate
from tests.helpers_runs import run, tiny_config, write_text_set


class Left(Exception):
    pass


def counting(limit: int) -> tuple[list[int], Callable[[], None]]:
    """A list that grows with each call, and the call, which raises the `limit`-th time."""
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) == limit:
            raise Left

    return calls, call


def test_a_run_says_each_phase_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []
    original = run_dir.write_json

    def write(path: Path, value: Any) -> None:
        if path.name == "status.json":
            written.append((value["phase"], value["step"]))
        original(path, value)

    monkeypatch.setattr(run_dir, "write_json", write)
    monkeypatch.setattr(run_dir, "_NOTE_INTERVAL", 3600.0)
    data = write_text_set(tmp_path / "set")
    config = tiny_config(data, trainer__max_steps=3, evaluation__interval=2, checkpoint__background=False)
    run(config, tmp_path / "often")
    phases = [one for i, one in enumerate(written) if one != written[i - 1] or i == 0]
    look = [[(phase, step) for phase in ("evaluate", "sample", "train")] for step in (2, 3)]
    assert phases == [
        ("start", 0), ("train", 0), *look[0], *look[1], ("save", 3), ("train", 3), ("save", 3), ("end", 3)
    ]  # fmt: skip

    few = len(written)
    written.clear()
    monkeypatch.setattr(run_dir, "_NOTE_INTERVAL", 0.0)  # as if every step, batch and token took so long
    run(config, tmp_path / "seldom")
    assert len(written) > few + 3 + 2 * 4 + 2 * 4  # steps, batches, tokens


@pytest.mark.parametrize("limit", [0, 2])
def test_an_evaluation_can_be_left_before_each_batch(tmp_path: Path, limit: int) -> None:
    store = open_split(write_text_set(tmp_path / "set"), "val")
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=32), vocab_size=257, seq_len=16)
    calls, call = counting(limit)

    def look() -> None:
        evaluate(model, store, tokens=160, batch_size=2, seq_len=16, autocast=torch.no_grad, between=call)

    if limit:
        with pytest.raises(Left):
            look()
    else:
        look()
    assert len(calls) == (limit or 5)
    assert model.training


@pytest.mark.parametrize("limit", [0, 2])
def test_a_text_can_be_left_before_each_token(limit: int) -> None:
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=32), vocab_size=257, seq_len=16)
    calls, call = counting(limit)
    start = torch.zeros((1, 1), dtype=torch.int64)
    if limit:
        with pytest.raises(Left):
            generate(model, start, 5, temperature=0.0, between=call)
    else:
        generate(model, start, 5, temperature=0.0, between=call)
    assert len(calls) == (limit or 5)
    assert model.training


@pytest.mark.parametrize("background", [False, True])
def test_a_save_beats_as_long_as_blocks_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_BLOCK", 1 << 10)
    monkeypatch.setattr(saving, "_BEAT_S", 1e-4)
    beats: list[int] = []
    saver = Saver(tmp_path, CheckpointConfig(background=background), lambda: beats.append(1))
    saver.save(
        {
            "model": {"weight": torch.zeros(1 << 20)},
            "optimizer": {},
            "rng": {},
            "loader": {},
            "trainer": {"step": 1, "run_id": "a", "best_step": None},
            "config": {},
        }
    )
    saver.finish()
    saver.close()
    assert beats
    assert saver.seconds is not None


def test_what_was_said_at_the_end_stays(tmp_path: Path) -> None:
    status = Status(tmp_path / "status.json")
    status.end(130)
    status.update(phase="train")  # of a main thread that does not know yet
    status.end(0)
    written = run_dir.read_status(tmp_path)
    assert (written["state"], written["phase"], written["exit_code"]) == ("stopped", "end", 130)
