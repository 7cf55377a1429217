"""A run on several devices is the run on one: the same batches, the same losses, whoever takes it up."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import checkpoint
from harness.config import TrainConfig
from harness.config_groups import ContrastiveRowsConfig, LoaderConfig, PaddedRowsConfig
from harness.distributed.parallel import check_shares
from harness.distributed.ranks import Ranks
from harness.errors import UserError
from harness.planning.check import check_run
from tests.helpers_ranks import side_by_side, train_side_by_side
from tests.helpers_runs import rows, run, tiny_config, weights, write_pair_set, write_row_set, write_text_set

EXACT = {"model__dropout": 0.0, "checkpoint__keep_last": None}


def trained(size: int, config: TrainConfig, path: Path) -> Path:
    if size == 1:
        run(config, path)
    else:
        answers = train_side_by_side(size, config, path)
        assert not any(answers.errors), answers.errors
        assert answers.values == [answers.values[0]] * size
    return path


def assert_alike(ours: Path, theirs: Path) -> None:
    """The same rows, each float within 1e-5 of the other's."""
    for mine, other in zip(rows(ours), rows(theirs), strict=True):
        floats = {key for key, value in other.items() if isinstance(value, float)}
        assert {key: value for key, value in mine.items() if key not in floats} == {
            key: value for key, value in other.items() if key not in floats
        }
        for key in floats:
            assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), (key, other["step"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Finished runs of 1, 2 and 4 processes."""
    folder = tmp_path_factory.mktemp("straight")
    return {size: trained(size, tiny_config(data, **EXACT), folder / str(size)) for size in (1, 2, 4)}


def until(step: int, source: Path, path: Path) -> Path:
    """A copy of a run as it was when it had saved `step`."""
    shutil.copytree(source, path)
    for later in checkpoint.complete_steps(path):
        if later > step:
            shutil.rmtree(checkpoint.step_dir(path, later))
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_batches_give_the_same_losses_on_more_devices(straight: dict[int, Path], size: int) -> None:
    logged = [row for row in rows(straight[size]) if "loss" in row]
    assert all({"batch_sha256", "data_chain", "grad_norm"} <= set(row) for row in logged)
    assert_alike(straight[size], straight[1])


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 4), (4, 2)])
def test_a_run_goes_on_with_the_same_batches_on_another_number_of_devices(
    data: Path, straight: dict[int, Path], tmp_path: Path, before: int, now: int
) -> None:
    path = until(8, straight[before], tmp_path / "run")
    trained(now, tiny_config(data, **EXACT, resume=str(path)), path)
    assert_alike(path, straight[1])
    log = (path / "train.log").read_text()
    assert f"changed since the checkpoint: world_size {before} -> {now} (all random numbers begin anew" in log


def plan(config: TrainConfig, path: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        check_run(config, path)
    return printed.getvalue()


def test_the_plan_of_a_resume_counts_the_processes_that_would_train(
    data: Path, straight: dict[int, Path], tmp_path: Path
) -> None:
    path = until(8, straight[2], tmp_path / "run")
    config = tiny_config(data, **EXACT, resume=str(path))
    answers = side_by_side(2, plan, config, path, joins=False)
    assert answers.errors == [None, None]
    assert "goes on after step 8" in answers.values[0]
    assert "world_size" not in answers.values[0]
    assert "world_size 2 -> 1 (all random numbers begin anew" in plan(config, path)


def test_random_numbers_go_on_exactly_on_the_same_number_of_devices(data: Path, tmp_path: Path) -> None:
    """Three, so that sums depend on their order, in micro-batches and with dropout on each device."""
    settings: dict[str, Any] = {"loader__batch_size": 6, "trainer__micro_batch_size": 1, "model__n_embd": 64}
    straight = trained(3, tiny_config(data, **settings), tmp_path / "straight")
    path = until(8, straight, tmp_path / "run")
    trained(3, tiny_config(data, **settings, resume=str(path)), path)
    assert weights(path, 12) == weights(straight, 12)
    assert rows(path) == rows(straight)


@pytest.mark.parametrize("kind", ["rows", "pairs"])
def test_devices_whose_rows_have_unequal_targets_train_as_one(tmp_path: Path, kind: str) -> None:
    """Where one counts fewer targets than the other, a mean of their means would be another loss."""
    loader: LoaderConfig
    if kind == "rows":
        data, loader = write_row_set(tmp_path / "set"), PaddedRowsConfig(seq_len=16, batch_size=4)
    else:
        data = write_pair_set(tmp_path / "set", neg_width=12)
        loader = ContrastiveRowsConfig(seq_len=16, batch_size=4)
    changes = {"trainer__max_steps": 6, "trainer__micro_batch_size": 1, "evaluation__interval": 3}
    config = tiny_config(data, **EXACT, **changes)
    config.loader = loader
    one = trained(1, dataclasses.replace(config), tmp_path / "one")
    assert_alike(trained(2, dataclasses.replace(config), tmp_path / "two"), one)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loader__batch_size": 5},
            r"loader\.batch_size=5 cannot be shared by 2 processes.* as many processes as divide 5",
        ),
        ({"trainer__micro_batch_size": 4}, r"leaves 2 sequences to each.*trainer\.micro_batch_size=4"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(data: Path, changes: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_shares(tiny_config(data, **changes), Ranks(0, 2))
