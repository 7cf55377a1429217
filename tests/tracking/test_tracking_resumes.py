"""W&B across resumes: the same run, every row of metrics.jsonl, each step once."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.config import TrainConfig
from harness.config_groups import TrackerConfig
from harness.training import trainer
from tests.helpers_runs import TIMES, rows, run, write_text_set
from tests.tracking.test_tracking_runs import logged, merged, own_home, tracked  # noqa: F401
from tests.tracking.wandb_reader import read_runs, union
from tests.tracking.wandb_server import Server, serve

KEY = "0123456789" * 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def without_times(by_step: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows of steps that were trained twice have two times."""
    return {step: {k: v for k, v in row.items() if k not in TIMES} for step, row in by_step.items()}


def check_mirror(path: Path, starts: int | None = None) -> None:
    """W&B's files of all starts hold the rows of metrics.jsonl, each step once, under one id.

    `starts`: how many files there must be, each with a whole record of its run.
    """
    runs = read_runs(path / "wandb")
    status = json.loads((path / "status.json").read_text())
    assert {one.id for one in runs if one.id or starts} == {status["wandb_id"]}
    assert starts in (None, len(runs))
    assert without_times(logged(union(runs))) == without_times(merged(path))
    assert status["wandb_last_step"] == max(merged(path))


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [line for line in caplog.messages if part in line]


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="harness")


def die_in_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The `number`-th step from here raises: what was logged and not saved is trained again."""
    calls = 0
    before = trainer.train_step

    def counting(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise RuntimeError("the machine is gone")
        return before(*arguments)

    monkeypatch.setattr(trainer, "train_step", counting)


def test_several_resumes_keep_the_id_and_send_no_step_twice(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    run(tracked(data, trainer__max_steps=5), path)
    for steps in (3, 6):  # each dies some steps after its last checkpoint, of step 5 and of step 8
        with monkeypatch.context() as patch:
            die_in_step(patch, steps)
            with pytest.raises(RuntimeError, match="gone"):
                run(tracked(data, resume=str(path)), path)
    run(tracked(data, resume=str(path)), path)
    run(tracked(data, resume=str(path), trainer__max_steps=14), path)
    check_mirror(path, starts=5)
    assert said(caplog, "W&B: it has steps") == [
        "W&B: it has steps 6 to 7 already: they are not sent twice",
        "W&B: it has steps 9 to 10 already: they are not sent twice",
    ]


def test_a_step_whose_evaluation_died_reaches_wandb_whole_and_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tracked(data), path)
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5]
    run(tracked(data, resume=str(path)), path)
    check_mirror(path, starts=2)
    assert {"loss", "val_loss"} <= set(union(read_runs(path / "wandb"))[5])


def test_an_evaluation_made_at_a_resume_joins_the_row_that_wandb_has(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tracked(data, trainer__max_steps=3, evaluation__interval=100), path)
    run(tracked(data, resume=str(path), trainer__max_steps=4, evaluation__interval=100), path)
    status = path / "status.json"
    # The evaluation of step 4 is taken away: as if that step had been none to be evaluated.
    lines = [line for line in (path / "metrics.jsonl").read_text().splitlines() if '"step": 4' in line]
    (path / "metrics.jsonl").write_text(
        "".join(line + "\n" for line in (path / "metrics.jsonl").read_text().splitlines() if line != lines[1])
    )
    run(tracked(data, resume=str(path), trainer__max_steps=6, evaluation__interval=4), path)
    runs = read_runs(path / "wandb")
    assert json.loads(status.read_text())["wandb_last_step"] == 6
    assert [sorted(one.rows) for one in runs] == [[1, 2, 3], [4], [4, 5, 6]]
    assert "val_loss" in runs[2].rows[4]
    assert "loss" not in runs[2].rows[4]


def test_rows_of_a_time_without_wandb_are_sent_when_it_is_back(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"

    def go_on(steps: int, **tracker: Any) -> dict[str, Any]:
        run(tracked(data, resume="auto", trainer__max_steps=steps, **tracker), path)
        status: dict[str, Any] = json.loads((path / "status.json").read_text())
        return status

    assert go_on(2, tracker=TrackerConfig())["wandb_id"] is None
    status = go_on(4)
    without = go_on(7, tracker=TrackerConfig())
    assert (without["wandb_id"], without["wandb_last_step"]) == (status["wandb_id"], 4)
    go_on(8)
    check_mirror(path, starts=2)
    assert said(caplog, "W&B") == [
        "W&B: it lacked 2 rows, of steps 1 to 2, which are sent now",
        "W&B: it lacked 3 rows, of steps 5 to 7, which are sent now",
    ]


def test_files_that_were_cleaned_away_after_a_sync_are_not_sent_again(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    run(tracked(data, trainer__max_steps=6), path)
    shutil.rmtree(path / "wandb")
    run(tracked(data, resume=str(path)), path)
    (again,) = read_runs(path / "wandb")
    assert sorted(again.rows) == [7, 8, 9, 10, 11, 12]
    (line,) = said(caplog, "are gone")
    assert "after step 6, the last that W&B was given" in line


def test_files_that_cannot_be_read_are_said_and_the_run_goes_on_after_what_it_gave_wandb(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    run(tracked(data, trainer__max_steps=6), path)
    (file,) = path.glob("wandb/offline-run-*/*.wandb")
    file.write_bytes(b"another kind of file")
    run(tracked(data, resume=str(path)), path)
    file.unlink()
    file.parent.rename(tmp_path / "aside")
    (again,) = read_runs(path / "wandb")
    assert sorted(again.rows) == [7, 8, 9, 10, 11, 12]
    (line,) = said(caplog, "cannot be read")
    assert "is no record of W&B" in line
    assert "after step 6" in line


def test_a_run_that_died_before_its_first_checkpoint_begins_again_as_the_same_wandb_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    for _ in range(2):
        with monkeypatch.context() as patch:
            die_in_step(patch, 4)
            with pytest.raises(RuntimeError, match="gone"):
                run(tracked(data, resume="auto"), path)
    run(tracked(data, resume="auto"), path)
    check_mirror(path, starts=3)


def test_another_run_in_the_place_of_one_that_died_early_is_another_wandb_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        die_in_step(patch, 4)
        with pytest.raises(RuntimeError, match="gone"):
            run(tracked(data, resume="auto"), path)
    run(tracked(data, resume="auto", optimizer__lr=0.5), path)
    runs = {one.id: one for one in read_runs(path / "wandb")}
    assert len(runs) == 2
    second = runs[json.loads((path / "status.json").read_text())["wandb_id"]]
    assert logged(second.rows) == merged(path)


def test_a_branch_is_a_wandb_run_of_its_own_that_names_its_parent(data: Path, tmp_path: Path) -> None:
    path, branch = tmp_path / "run", tmp_path / "branch"
    run(tracked(data), path)
    (original,) = read_runs(path / "wandb")
    begin = str(path / "checkpoints" / "step-00000008")
    run(tracked(data, resume=begin, trainer__max_steps=10), branch)
    run(tracked(data, resume=str(branch)), branch)
    check_mirror(branch, starts=2)
    first, second = read_runs(branch / "wandb")
    assert first.id != original.id
    assert first.notes == f"branch of run ({original.id}) at step 8"
    assert second.notes == ""  # whoever reads them may have written others
    trainer_json = json.loads((path / "checkpoints" / "step-00000012" / "trainer.json").read_text())
    parent = {"run_id": trainer_json["run_id"], "path": str(path), "step": 8, "wandb_id": original.id}
    assert first.config["parent"] == second.config["parent"] == parent
    assert "parent" not in original.config


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serve() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


def online(config: TrainConfig) -> TrainConfig:
    config.tracker.mode = "online"  # type: ignore[attr-defined]
    return config


def arrived(server: Server) -> dict[int, dict[str, Any]]:
    by_step = {row["_step"]: row for row in server.rows}
    assert len(by_step) == len(server.rows)
    return logged(by_step)


def test_an_online_run_goes_on_after_the_servers_last_step_and_sends_what_it_lost(
    data: Path, tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    run(online(tracked(data, trainer__max_steps=7)), path)
    (run_id,) = server.known
    server.rows = [row for row in server.rows if row["_step"] <= 4]  # the rest did not arrive
    server.known[run_id] = 4
    run(online(tracked(data, resume=str(path), trainer__max_steps=9)), path)
    assert server.known == {run_id: 9}
    # Then the network is gone for a while, and comes back.
    run(tracked(data, resume=str(path), trainer__max_steps=10), path)
    run(online(tracked(data, resume=str(path))), path)
    assert server.known == {run_id: 12}
    assert without_times(arrived(server)) == without_times(merged(path))
    assert [line.split("has ")[1] for line in said(caplog, "need no wandb sync")] == [
        "the steps to 4, the files here to 7: what it lacks is sent from metrics.jsonl, so those of before "
        "need no wandb sync",
        "the steps to 9, the files here to 10: what it lacks is sent from metrics.jsonl, so those of before "
        "need no wandb sync",
    ]


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "foo"), ("WANDB_BASE_URL", "no-url")])
def test_a_wandb_variable_that_cannot_be_meant_is_named_and_the_run_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, value: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    path = tmp_path / "run"
    assert run(tracked(data, trainer__max_steps=2), path).step == 2
    (line,) = said(caplog, "W&B")
    assert "metrics.jsonl has every row" in line
    assert "pip install" not in line
    assert "WANDB_MODE=foo is none of online, offline" in line or "base_url" in line
    assert not (path / "wandb").exists()


def test_an_empty_wandb_mode_is_none(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "")
    run(tracked(data, trainer__max_steps=2), tmp_path / "run")
    check_mirror(tmp_path / "run", starts=1)
