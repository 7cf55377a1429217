"""The loop: what is logged is what happened, and looking at a run never changes it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import checkpoint
from harness.config import TrainConfig, total_steps
from harness.launch import Outcome, launch
from harness.storage import open_store
from tests.helpers_forks import forked
from tests.helpers_runs import rows, run, tiny_config, train_rows, weights, write_text_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def test_steps_count_from_one_and_name_the_position_after_them(data: Path, tmp_path: Path) -> None:
    run(tiny_config(data), tmp_path / "run")
    logged = train_rows(tmp_path / "run")
    assert [row["step"] for row in logged] == list(range(1, 13))
    assert [row["position"] for row in logged] == [64 * step for step in range(1, 13)]
    assert [row["tokens"] for row in logged] == [64 * step for step in range(1, 13)]
    assert logged[0]["lr"] == pytest.approx(1e-3 / 2)
    assert logged[1]["lr"] == pytest.approx(1e-3)
    assert logged[11]["lr"] == pytest.approx(1e-4)


def test_the_batch_hash_is_over_int64_inputs_then_targets(data: Path, tmp_path: Path) -> None:
    run(tiny_config(data, trainer__max_steps=3), tmp_path / "run")
    tokens = open_store(data, "train").read_tokens(0, 3 * 64 + 1).astype("<i8")
    for row in train_rows(tmp_path / "run"):
        start = row["position"] - 64
        inputs, targets = tokens[start : start + 64], tokens[start + 1 : start + 65]
        assert row["batch_sha256"] == hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()


def test_only_logged_steps_have_rows_and_the_last_one_always_does(data: Path, tmp_path: Path) -> None:
    run(tiny_config(data, trainer__log_batch_hash=False, trainer__log_interval=5), tmp_path / "run")
    assert [row["step"] for row in train_rows(tmp_path / "run")] == [5, 10, 12]
    expected = {
        "step",
        "epoch",
        "tokens",
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "data_wait_ms",
        "data_wait_ms_max",
        "data_wait_share",
        "position",
        "data_chain",
    }
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert set(first) == expected


def test_evaluation_comes_at_its_interval_and_at_the_last_step(data: Path, tmp_path: Path) -> None:
    run(tiny_config(data), tmp_path / "run")
    evaluations = [row for row in rows(tmp_path / "run") if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [5, 10, 12]
    last = evaluations[-1]
    # Every byte of this set is a token, so bits a byte are nats a token over ln 2.
    assert last["val_bits_per_byte"] == pytest.approx(last["val_loss"] / np.log(2))
    assert last["position"] == 12 * 64


@pytest.mark.parametrize("micro", [1, 2])
def test_micro_batches_train_as_the_whole_batch(data: Path, tmp_path: Path, micro: int) -> None:
    settings = {"model__dropout": 0.0, "optimizer__lr": 1e-3}
    run(tiny_config(data, **settings), tmp_path / "whole")
    run(tiny_config(data, trainer__micro_batch_size=micro, **settings), tmp_path / "micro")
    for ours, theirs in zip(train_rows(tmp_path / "micro"), train_rows(tmp_path / "whole"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["batch_sha256"] == theirs["batch_sha256"]


def test_a_budget_in_tokens_is_rounded_up_to_steps(data: Path, tmp_path: Path) -> None:
    config = tiny_config(
        data, trainer__max_steps=None, trainer__max_tokens=64 * 3 + 1, schedule__total_steps=None
    )
    assert total_steps(config) == 4
    assert run(config, tmp_path / "run").step == 4


def test_the_trainer_begins_the_epochs_and_the_order_repeats(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set", train_tokens=200)
    run(tiny_config(data, trainer__max_steps=9), tmp_path / "run")
    logged = train_rows(tmp_path / "run")
    assert [row["epoch"] for row in logged] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    hashes = [row["batch_sha256"] for row in logged]
    assert hashes[:3] == hashes[3:6] == hashes[6:]
    assert len(set(hashes)) == 3


def test_training_learns(tmp_path: Path) -> None:
    """A set that repeats seven tokens is learnt almost perfectly in 60 steps."""
    from tests.helpers_sets import write_set

    pattern = [3, 1, 4, 1, 5, 9, 2]
    data = write_set(
        tmp_path / "set", {"train": [pattern * 600], "val": [pattern * 50]}, preparation={"corpus": "stdlib"}
    )
    config = tiny_config(
        data, trainer__max_steps=60, schedule__total_steps=60, optimizer__lr=1e-2, model__dropout=0.0
    )
    outcome = run(config, tmp_path / "run")
    assert outcome.val_loss is not None
    assert outcome.val_loss < 0.3


def stopped_run(config: TrainConfig, path: Path, number: signal.Signals) -> Outcome:
    """A run that is sent a signal after five steps or more."""

    def send() -> None:
        while not (path / "metrics.jsonl").is_file() or len(train_rows(path)) < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    outcome = launch(config, path)
    sender.join()
    return outcome


def test_a_run_stopped_before_its_first_evaluation_can_be_shown(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, trainer__max_steps=400, evaluation__interval=1000)
    assert stopped_run(config, tmp_path / "run", signal.SIGTERM).val_loss is None
    shown = forked("scripts/show_run.py", str(tmp_path / "run"), "tokens=1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "no validation loss yet" in shown.stdout


@pytest.mark.parametrize("name", ["sample", "show_run"])
def test_text_is_not_decoded_with_another_tokenizer_than_the_models(tmp_path: Path, name: str) -> None:
    data = write_text_set(tmp_path / "set")
    run(tiny_config(data, trainer__max_steps=1), tmp_path / "run")
    write_text_set(data, tokenizer={"name": "bpe", "vocab_size": 300})  # in its place, another set
    shown = forked(f"scripts/{name}.py", str(tmp_path / "run"), "tokens=1", cwd=tmp_path)
    assert shown.returncode == 2, shown.stderr
    assert "its ids would mean other text" in shown.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_stops_and_the_run_goes_on_exactly(
    data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    settings = {"trainer__max_steps": 400, "schedule__total_steps": 400, "evaluation__interval": 1000}
    path = tmp_path / "run"
    outcome = stopped_run(tiny_config(data, **settings), path, number)
    assert outcome.stopped
    assert 5 <= outcome.step < 400
    assert checkpoint.complete_steps(path)[-1] == outcome.step
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 75, outcome.step)
    stop = outcome.step + 20
    run(tiny_config(data, **(settings | {"trainer__max_steps": stop}), resume=str(path)), path)
    run(tiny_config(data, **(settings | {"trainer__max_steps": stop})), tmp_path / "straight")
    assert weights(path, stop) == weights(tmp_path / "straight", stop)


def test_a_failure_in_the_loop_is_recorded_and_older_checkpoints_stay(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import harness.training.trainer as trainer

    original, calls = trainer.train_step, []

    def failing(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("the device fell off the bus")
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "train_step", failing)
    with pytest.raises(RuntimeError, match="fell off"):
        run(tiny_config(data), tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "fell off the bus" in status["error"]
    assert "fell off the bus" in (tmp_path / "run" / "train.log").read_text()
    assert checkpoint.open_checkpoint(checkpoint.find(tmp_path / "run")).step == 4


def test_status_says_where_the_run_ended(data: Path, tmp_path: Path) -> None:
    run(tiny_config(data), tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["phase"], status["step"], status["exit_code"]) == ("done", "end", 12, 0)
    assert status["pid"] == os.getpid()


def test_default_config_is_the_one_the_files_describe() -> None:
    """Dataclass defaults are what tests and libraries get; the YAML files are what people read."""
    from hydra import compose, initialize_config_dir

    from harness.commandline.composition import config_dir, register, to_dataclass

    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = to_dataclass(compose("train", overrides=["tracker=none"]))
    plain = TrainConfig()
    assert composed.trainer == plain.trainer
    assert composed.evaluation == plain.evaluation
    assert composed.loader == plain.loader
    assert dataclasses.replace(composed.model, name=plain.model.name) == plain.model
    assert composed.optimizer == plain.optimizer
    assert composed.prepare == plain.prepare
