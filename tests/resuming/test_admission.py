"""Who may write into a run directory: one process, and only what goes on from the run's newest state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.checkpoints import checkpoint
from harness.errors import UserError
from harness.launch import launch
from harness.resuming import admission
from tests.helpers_runs import run, snapshot, tiny_config, train_rows, write_text_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture
def finished(data: Path, tmp_path: Path) -> Path:
    """Twelve steps, saved at 4, 8 and 12."""
    run(tiny_config(data), tmp_path / "run")
    return tmp_path / "run"


def test_an_older_checkpoint_never_goes_on_in_its_own_directory(data: Path, finished: Path) -> None:
    before = snapshot(finished)
    older = checkpoint.step_dir(finished, 8)
    with pytest.raises(UserError, match=r"step-00000008 is not the newest .* step 12 is.*run\.name="):
        run(tiny_config(data, resume=str(older), optimizer__lr=0.1), finished)
    assert snapshot(finished) == before


def test_a_second_process_is_refused_while_one_writes(data: Path, finished: Path) -> None:
    before = snapshot(finished)
    config = tiny_config(data, resume=str(finished), trainer__max_steps=20)
    with admission.locked(finished), pytest.raises(UserError, match=r"another process is writing .*pid"):
        launch(config, finished)
    assert snapshot(finished) == before
    assert launch(config, finished).step == 20


def test_of_two_fresh_starts_the_later_one_is_refused(data: Path, tmp_path: Path) -> None:
    """The first one has begun between the later one's checks and its first write."""
    (tmp_path / "run").mkdir()
    with admission.locked(tmp_path / "run"):
        with pytest.raises(UserError, match="another process is writing"):
            run(tiny_config(data), tmp_path / "run")
        assert not any((tmp_path / "run").iterdir())


def test_a_fresh_start_into_a_run_that_lives_names_its_process(data: Path, finished: Path) -> None:
    with admission.locked(finished), pytest.raises(UserError, match=r"another process is writing .*pid"):
        run(tiny_config(data), finished)
    with pytest.raises(UserError, match="already holds a run"):
        run(tiny_config(data), finished)


def test_auto_does_not_start_again_over_checkpoints_that_lost_their_index(data: Path, finished: Path) -> None:
    for index in finished.glob("checkpoints/*/checkpoint.json"):
        index.unlink()
    before = snapshot(finished)
    with pytest.raises(UserError, match=r"step-00000004, step-00000008, step-00000012.*would lose them"):
        run(tiny_config(data, resume="auto"), finished)
    assert snapshot(finished) == before


def test_auto_starts_again_where_nothing_was_saved(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    run(tiny_config(data, resume="auto"), path)
    assert [row["step"] for row in train_rows(path)] == list(range(1, 13))


def test_a_renamed_checkpoint_is_refused(finished: Path) -> None:
    checkpoint.step_dir(finished, 12).rename(checkpoint.step_dir(finished, 99))
    with pytest.raises(UserError, match=r"step-00000099 was renamed: checkpoint.json says step 12"):
        checkpoint.open_checkpoint(checkpoint.find(finished))


def test_a_path_with_dots_is_the_same_run(
    data: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished / "checkpoints")
    run(tiny_config(data, resume="../../run", trainer__max_steps=14), Path("../../run"))
    assert [row["step"] for row in train_rows(finished)] == list(range(1, 15))


def test_a_copied_run_goes_on_on_its_own(data: Path, finished: Path, tmp_path: Path) -> None:
    before = snapshot(finished)
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    run(tiny_config(data, resume=str(copy), trainer__max_steps=14), copy)
    assert snapshot(finished) == before
    assert len(train_rows(copy)) == 14


def test_a_loss_that_is_no_number_is_kept_readable(data: Path, tmp_path: Path) -> None:
    config = tiny_config(
        data, optimizer__lr=1000.0, optimizer__weight_decay=100.0, trainer__grad_clip=0.0,
        schedule__warmup_steps=0, model__dropout=0.0, trainer__max_steps=8, trainer__on_nonfinite="skip",
    )  # fmt: skip
    outcome = run(config, tmp_path / "run")
    losses = [row["loss"] for row in train_rows(tmp_path / "run")]
    assert losses[-1] in ("NaN", "Infinity"), losses[-3:]
    assert outcome.val_loss is None
    saved = checkpoint.open_checkpoint(checkpoint.find(tmp_path / "run"))
    assert saved.trainer["val_loss"] is None
