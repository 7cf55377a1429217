"""Ranks stop together, whoever is asked or fails: after the same step, with what was trained saved."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness.auditing.data_chain import batch_sha256
from harness.auditing.replay import open_run, reader_of
from harness.checkpoints import checkpoint, checkpoint_writer
from harness.config import TrainConfig
from harness.distributed import meeting
from harness.distributed.agreement import Agreement
from harness.distributed.ranks import Ranks
from harness.launch import Outcome, launch
from harness.model import GPT
from harness.preemption import StopRequest
from harness.run_files import incidents, run_dir
from harness.tracking import NoTracker
from harness.training import trainer
from harness.training.evaluation import Evaluation
from harness.training.run import Run
from tests import helpers_ranks
from tests.helpers_ranks import side_by_side, train_side_by_side
from tests.helpers_runs import rows, run, tiny_config, train_rows, write_text_set
from tests.test_nonfinite_runs import RARE, set_with_rare_tokens


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def status(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "status.json").read_text())
    return found


def is_rank_1() -> bool:
    return os.environ["RANK"] == "1"


def ask(ranks: Ranks) -> list[Any]:
    """Rank 1 wishes to save before step 2 and to stop before step 4; rank 0 saves after step 3."""
    agreement, stop = Agreement(ranks), StopRequest()
    heard: list[Any] = []
    for step in range(1, 7):
        if step == 4 and ranks.rank == 1:
            stop.name = "SIGUSR1"
        heard.append((agreement.stops(stop, late=ranks.rank == 1 and step == 2), agreement.late))
        if step == 3:
            agreement.saved()
    agreement.end()
    return [heard, stop.name]


def test_what_one_rank_wishes_all_do_one_step_later() -> None:
    first, second = side_by_side(2, ask).values
    heard = [(False, False), (False, False), (False, True), (False, False), (True, False), (True, False)]
    assert first == [heard, "SIGUSR1 to another rank"]
    assert second == [heard, "SIGUSR1"]


def asked_after_five_steps() -> None:
    step = trainer.train_step

    def then_asked(run: Run, *arguments: Any) -> Any:
        if is_rank_1() and run.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, *arguments)

    trainer.train_step = then_asked  # type: ignore[assignment]


def test_a_signal_to_any_rank_saves_and_stops_all(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = tiny_config(data, trainer__max_steps=400, evaluation__interval=1000)
    first, second = train_side_by_side(2, config, path, asked_after_five_steps).values
    assert first == second == {"step": 6, "val_loss": None, "stopped": True}
    assert checkpoint.complete_steps(path)[-1] == 6
    assert (status(path)["state"], status(path)["exit_code"]) == ("stopped", 75)
    assert "stopped by SIGTERM to another rank after step 6" in (path / "train.log").read_text()


def asked_in_the_evaluation() -> None:
    evaluate = trainer.evaluate

    def asked(*arguments: Any, **options: Any) -> Evaluation:
        if is_rank_1():
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, **options)

    trainer.evaluate = asked


def test_a_signal_in_an_evaluation_leaves_it_on_all_ranks_to_be_made_later(
    data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    first, second = train_side_by_side(2, tiny_config(data), path, asked_in_the_evaluation).values
    assert first == second == {"step": 5, "val_loss": None, "stopped": True}
    assert not [row for row in rows(path) if "val_loss" in row]
    run(tiny_config(data, resume=str(path), trainer__max_steps=6), path)
    assert [row["step"] for row in rows(path) if "val_loss" in row] == [5, 6]


def fails_in_the_evaluation(config: TrainConfig, path: Path) -> tuple[str, list[int], int]:
    """Rank 1 fails, and the disk of rank 0 takes longer then than a rank has that holds nothing.

    How each ended, with the steps and what status.json says when it did.
    """
    write = checkpoint_writer.write

    def failing(*_: Any, **__: Any) -> Evaluation:
        raise OSError(5, "a disk that is read no more", "val")

    def slow(run_dir: Path, **parts: Any) -> Path:
        if parts["trainer"]["step"] == 5:
            time.sleep(3 * meeting.GRACE_S)
            assert "a disk that is read no more" in status(path)["error"]
        return write(run_dir, **parts)

    meeting.GRACE_S = 0.6
    if is_rank_1():
        trainer.evaluate = failing
    checkpoint_writer.write = slow
    try:
        launch(config, path)
    except Exception as error:
        return repr(error), checkpoint.complete_steps(path), status(path)["last_saved"]
    raise AssertionError("it did not fail")


def test_a_rank_that_fails_in_an_evaluation_costs_no_step_however_long_they_take_to_save(
    data: Path, tmp_path: Path
) -> None:
    """It ends after rank 0, as its launcher would end rank 0 for it."""
    answers = side_by_side(2, fails_in_the_evaluation, tiny_config(data), tmp_path / "run", joins=False)
    assert answers.errors == [None, None]
    (mine, *ours), (other, *theirs) = answers.values
    assert "PeerFailed" in mine
    assert "a disk that is read no more" in mine
    assert "OSError" in other
    assert ours == theirs == [[4, 5], 5]


def overflows(closed: Path) -> None:
    """The tracker of rank 0 takes its time; a launcher would not give it that, once rank 1 has ended."""

    def slow(*_: Any, **__: Any) -> None:
        time.sleep(1.0)
        closed.touch()

    def last(config: TrainConfig, path: Path) -> Outcome:
        try:
            return launch(config, path)
        finally:
            assert closed.exists()

    NoTracker.finish = slow  # type: ignore[method-assign]
    helpers_ranks.launch = last  # type: ignore[assignment]
    hidden = GPT.hidden

    def with_infinity(self: GPT, inputs: Tensor) -> Tensor:
        return hidden(self, inputs) / (inputs != RARE).float()[..., None]

    GPT.hidden = with_infinity  # type: ignore[method-assign]


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_number_that_goes_wrong_on_one_rank_is_judged_by_all(tmp_path: Path, on_nonfinite: str) -> None:
    """The rare token is in the rows of rank 1 alone; rank 0 writes down the whole batch."""
    data, path = set_with_rare_tokens(tmp_path / "set", [7]), tmp_path / "run"
    config = tiny_config(
        data, trainer__on_nonfinite=on_nonfinite, trainer__max_steps=8, evaluation__interval=100,
        evaluation__tokens=10,
    )  # fmt: skip
    answers = train_side_by_side(2, config, path, partial(overflows, tmp_path / "closed"))
    (row,) = incidents.read(path)
    assert (row["step"], row["action"]) == (7, on_nonfinite)
    reader = reader_of(open_run(path), 7)
    assert row["batch_sha256"] == batch_sha256(reader.batch(7))
    if on_nonfinite == "stop":
        assert [error.kind for error in answers.errors] == ["RunFailed", "PeerFailed"]
        assert answers.errors[1].rank == 0
        for error in answers.errors:
            assert "Written to" in error.text
        assert (status(path)["state"], status(path)["reason"]) == ("failed", "diverged")
    else:
        assert not any(answers.errors), answers.errors
        assert [row.get("skipped", False) for row in train_rows(path)] == [False] * 6 + [True, False]


def without_what_rank_0_alone_writes() -> None:
    if is_rank_1():
        run_dir.read_status = lambda path: {}


def test_a_run_that_is_complete_where_rank_0_runs_is_complete_for_all(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(data), path)
    config = tiny_config(data, resume=str(path))
    first, second = train_side_by_side(2, config, path, without_what_rank_0_alone_writes).values
    assert first == second
    assert first["step"] == tiny_config(data).trainer.max_steps
