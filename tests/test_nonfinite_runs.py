"""A run whose numbers go wrong: nothing bad is learnt or saved, and it says how to go on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import launch
from harness.auditing.data_chain import batch_sha256
from harness.auditing.replay import open_run, reader_of
from harness.checkpoints import checkpoint
from harness.config_groups import SlidingWindowConfig
from harness.errors import RunFailed
from harness.model import GPT
from harness.run_files import incidents
from harness.training.guard import MOST_SKIPS
from harness.training.run import Run
from tests.helpers_runs import run, tiny_config, train_py, train_rows, weights, write_text_set
from tests.helpers_sets import write_set

RARE = 256  # a token on which the model of these tests overflows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def set_with_rare_tokens(directory: Path, steps: list[int]) -> Path:
    """Random tokens, with the rare one in the batches of `steps` (64 tokens each, in file order)."""
    generator = np.random.default_rng(3)
    train, val = generator.integers(0, RARE, 3000), generator.integers(0, RARE, 400)
    for step in steps:
        train[64 * step - 30] = RARE
    return write_set(
        directory, {"train": [train.tolist()], "val": [val.tolist()]}, preparation={"corpus": "stdlib"}
    )


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with an infinity in its activations wherever it reads the rare token."""
    hidden = GPT.hidden

    def with_infinity(self: GPT, inputs: Tensor) -> Tensor:
        return hidden(self, inputs) / (inputs != RARE).float()[..., None]

    monkeypatch.setattr(GPT, "hidden", with_infinity)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that are put together, as they are left when they end."""
    assemble, seen = launch.assemble, list[Run]()

    def remember(*arguments: Any, **options: Any) -> Run:
        seen.append(assemble(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(launch, "assemble", remember)
    return seen


def same_state(ours: dict[Any, Any], theirs: dict[Any, Any]) -> bool:
    return all(
        all(torch.equal(ours["state"][number][name], value) for name, value in state.items())
        for number, state in theirs["state"].items()
    )


@pytest.mark.usefixtures("overflowing")
def test_a_run_stops_before_the_step_that_is_not_finite(
    tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, path = set_with_rare_tokens(tmp_path / "set", [7]), tmp_path / "run"
    with pytest.raises(RunFailed) as failure:
        run(tiny_config(data), path)
    run(tiny_config(data, trainer__max_steps=6), tmp_path / "before")
    before = checkpoint.open_checkpoint(checkpoint.find(tmp_path / "before"))
    weights_now = runs[0].model.state_dict()
    assert all(torch.equal(weights_now[name], value) for name, value in before.weights().items())
    assert same_state(runs[0].optimizer.state_dict(), before.optimizer_state())

    assert [row["step"] for row in train_rows(path)] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.complete_steps(path) == [4]
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "step 7: the loss is nan" in status["error"]

    (row,) = incidents.read(path)
    assert math.isnan(row.pop("loss"))
    assert math.isnan(row.pop("grad_norm"))
    assert len(row.pop("batch_sha256")) == 64
    assert row == {
        "kind": "nonfinite",
        "step": 7,
        "epoch": 0,
        "position_before": 384,
        "position": 448,
        "action": "stop",
        "keep": [4],
    }
    said = str(failure.value)
    assert "at tokens [384, 448) of train, epoch 0" in said
    assert "Written to run/incidents.jsonl" in said
    assert "The last checkpoint from before it is run/checkpoints/step-00000004; it is kept. Go on:" in said
    assert "resume=run trainer.on_nonfinite=skip\n" in said
    assert "resume=run optimizer.lr=0.0005\n" in said
    assert said.endswith("run step=7")


@pytest.mark.usefixtures("overflowing")
def test_a_step_is_skipped_and_the_run_goes_on(tmp_path: Path) -> None:
    data, path = set_with_rare_tokens(tmp_path / "set", [7]), tmp_path / "run"
    settings = {"trainer__on_nonfinite": "skip", "checkpoint__interval": 1, "checkpoint__keep_last": None}
    assert run(tiny_config(data, **settings), path).step == 12
    saved = [checkpoint.open_checkpoint(checkpoint.step_dir(path, step)) for step in (6, 7, 8)]
    assert weights(path, 7) == weights(path, 6) != weights(path, 8)
    assert same_state(saved[1].optimizer_state(), saved[0].optimizer_state())
    assert [row["step"] for row in train_rows(path) if row.get("skipped")] == [7]
    assert all(math.isfinite(row["loss"]) for row in train_rows(path) if row["step"] != 7)
    (row,) = incidents.read(path)
    assert (row["step"], row["action"]) == (7, "skip")
    assert row["batch_sha256"] == train_rows(path)[6]["batch_sha256"]
    log = (path / "train.log").read_text()
    assert log.count("step 7: the loss is nan, the gradient norm nan, at tokens [384, 448) of train") == 1


@pytest.mark.usefixtures("overflowing")
@pytest.mark.parametrize("step", [6, 7, 8])
def test_a_run_that_skips_is_resumed_exactly(tmp_path: Path, step: int) -> None:
    data = set_with_rare_tokens(tmp_path / "set", [2, 6, 7, 10])
    settings = {"trainer__on_nonfinite": "skip", "checkpoint__interval": 1, "checkpoint__keep_last": None}
    run(tiny_config(data, **settings), tmp_path / "straight")
    path = tmp_path / "run"
    run(tiny_config(data, **settings, trainer__max_steps=step), path)
    run(tiny_config(data, **settings, resume=str(path)), path)
    assert weights(path, 12) == weights(tmp_path / "straight", 12)
    assert train_rows(path) == train_rows(tmp_path / "straight")
    straight = (tmp_path / "straight" / incidents.FILE).read_text()
    assert (path / incidents.FILE).read_text() == straight


@pytest.mark.usefixtures("overflowing")
def test_skips_in_a_row_end_the_run_even_across_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, path = set_with_rare_tokens(tmp_path / "set", list(range(6, 40))), tmp_path / "run"
    settings = {"trainer__on_nonfinite": "skip", "evaluation__interval": 100}
    run(tiny_config(data, **settings), path)
    with pytest.raises(RunFailed, match=f"^step {6 + MOST_SKIPS}: ") as failure:
        run(tiny_config(data, **settings, trainer__max_steps=40, resume=str(path)), path)
    stop = incidents.read(path)[-1]
    assert (stop["action"], stop["keep"]) == ("stop", [4])  # the later ones hold what was skipped
    assert "resume=run/checkpoints/step-00000004 optimizer.lr=0.0005\n" in str(failure.value)
    assert "on_nonfinite=skip" not in str(failure.value)


def test_a_run_that_diverges_goes_on_with_a_smaller_lr(data: Path, tmp_path: Path) -> None:
    settings = {"trainer__grad_clip": 0.0, "evaluation__interval": 100, "checkpoint__interval": 100}
    path = tmp_path / "run"
    run(tiny_config(data, **settings, trainer__max_steps=4), path)
    huge = {"optimizer__lr": 1000.0, "optimizer__weight_decay": 100.0}
    with pytest.raises(RunFailed, match=r"The last checkpoint from before it is .*step-00000004"):
        run(tiny_config(data, **settings, **huge, resume=str(path)), path)
    (stop,) = incidents.read(path)
    assert stop["step"] > 4
    assert stop["keep"] == [4]
    with pytest.raises(RunFailed):  # again, with nothing changed: it is one incident still
        run(tiny_config(data, **settings, **huge, resume=str(path)), path)
    assert len(incidents.read(path)) == 1
    often = settings | {"checkpoint__interval": 2, "checkpoint__keep_last": 1}
    run(tiny_config(data, **often, resume=str(path)), path)
    run(tiny_config(data, **settings), tmp_path / "straight")
    assert weights(path, 12) == weights(tmp_path / "straight", 12)
    # The stop is history that a resume does not undo: its checkpoint outlives the later ones.
    assert checkpoint.complete_steps(path) == [4, 12]
    assert [row["step"] for row in incidents.read(path)] == [stop["step"]]
    assert incidents.kept_steps(path) == {4}


@pytest.mark.usefixtures("overflowing")
def test_steps_that_are_not_logged_are_checked_all_the_same(tmp_path: Path) -> None:
    data, path = set_with_rare_tokens(tmp_path / "set", [7]), tmp_path / "run"
    with pytest.raises(RunFailed, match=r"^step 7: "):
        run(tiny_config(data, trainer__log_batch_hash=False, trainer__log_interval=100), path)
    assert train_rows(path) == []


@pytest.mark.usefixtures("overflowing")
def test_a_seeded_order_names_the_windows_and_the_epoch(tmp_path: Path) -> None:
    data, path = set_with_rare_tokens(tmp_path / "set", [12]), tmp_path / "run"
    settings = {"evaluation__interval": 100, "checkpoint__interval": 100, "trainer__log_batch_hash": False}
    config = tiny_config(data, trainer__max_steps=92, trainer__on_nonfinite="skip", **settings)
    config.loader = SlidingWindowConfig(seq_len=16, batch_size=4)
    run(config, path)
    rows, log = incidents.read(path), (path / "train.log").read_text()
    assert [row["epoch"] for row in rows] == [0, 1]
    record = open_run(path)
    for row in rows:
        step, place = row["step"], f"[{row['position_before']}, {row['position']})"
        assert f"at windows {place} of the order of epoch {row['epoch']}: skipped" in log
        reader = reader_of(record, step)
        assert reader.place(step) == (row["epoch"], row["position_before"], row["position"])
        assert RARE in reader.batch(step).inputs
        assert batch_sha256(reader.batch(step)) == row["batch_sha256"]


def test_the_command_ends_with_1_and_words(data: Path, tmp_path: Path) -> None:
    words = [
        f"data.path={data}", "run.name=x", "tracker=none", "loader.seq_len=16", "loader.batch_size=4",
        "model.n_layer=1", "model.n_embd=32", "trainer.max_steps=40", "schedule.warmup_steps=0",
        "optimizer.lr=1000", "optimizer.weight_decay=100", "trainer.grad_clip=0",
    ]  # fmt: skip
    ended = train_py(*words, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("error: step ")
    assert "Traceback" not in ended.stderr
    assert "There is no checkpoint from before it" in ended.stderr


def test_a_torn_last_incident_is_dropped_at_a_resume(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    whole = '{"kind": "spike", "step": 2, "action": "none"}\n'
    later = '{"kind": "spike", "step": 9, "action": "none"}\n'
    (path / incidents.FILE).write_text(whole + later + '{"kind": "spi')
    run(tiny_config(data, resume=str(path)), path)
    assert (path / incidents.FILE).read_text() == whole
