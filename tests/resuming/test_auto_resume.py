"""One unchanged command with `resume=auto` is right whatever happened to the run before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import checkpoint
from harness.config import TrainConfig
from harness.errors import UserError
from tests.helpers_runs import rows, run, snapshot, tiny_config, train_py, train_rows, weights, write_text_set

KEPT: dict[str, Any] = {"checkpoint__keep_last": None}


def auto(folder: Path, **changes: Any) -> TrainConfig:
    """Twelve steps, saved at 4, 8 and 12, evaluated at 5, 10 and 12."""
    return tiny_config(folder / "set", resume="auto", **KEPT, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    write_text_set(folder / "set")
    run(auto(folder), folder / "run")
    return folder


@pytest.fixture
def path(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "run", tmp_path / "run"))


def status(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((path / "status.json").read_text())
    return result


def everything(path: Path) -> dict[str, Any]:
    """Also folders, with their times: nothing was made and removed again."""
    return {str(p): p.stat().st_mtime_ns for p in [path, *path.rglob("*")]} | snapshot(path)


def assert_whole(path: Path, folder: Path) -> None:
    assert rows(path) == rows(folder / "run")
    assert weights(path, 12) == weights(folder / "run", 12)
    assert (status(path)["state"], status(path)["step"]) == ("done", 12)
    assert (path / "checkpoints/latest").read_text() == "step-00000012\n"


def test_a_finished_run_is_not_touched(folder: Path, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = everything(path)
    with caplog.at_level("INFO", "harness"):
        outcome = run(auto(folder), path)
    assert (outcome.step, outcome.stopped) == (12, False)
    assert outcome.val_loss == rows(folder / "run")[-1]["val_loss"]
    assert caplog.messages[0].startswith("already complete at step 12, the budget is 12")
    assert everything(path) == before


def test_a_finished_run_needs_no_data(folder: Path, path: Path, tmp_path: Path) -> None:
    config = auto(folder, data__path=None, data__root=str(tmp_path / "gone"))
    run(config, path)
    assert not (tmp_path / "gone").exists()


def _killed_before_latest(path: Path) -> None:
    (path / "checkpoints/latest").write_text("step-00000008\n")
    _running(path)


def _killed_before_the_last_word(path: Path) -> None:
    _running(path)


def _without_status(path: Path) -> None:
    (path / "status.json").unlink()


def _running(path: Path) -> None:
    (path / "status.json").write_text(json.dumps(status(path) | {"state": "running", "exit_code": None}))


def _killed_in_the_last_save(path: Path) -> None:
    (path / "checkpoints/step-00000012").rename(path / "checkpoints/step-00000012.tmp")
    (path / "checkpoints/step-00000012.tmp/checkpoint.json").unlink()
    (path / "checkpoints/latest").write_text("step-00000008\n")
    _running(path)


def _killed_while_words_were_written(path: Path) -> None:
    _killed_in_the_last_save(path)
    (path / ".config.yaml.123.tmp").write_text("half")
    (path / ".hydra").mkdir(exist_ok=True)
    (path / ".hydra/.overrides.yaml.123.tmp").write_text("half")


def _killed_before_the_first_checkpoint(path: Path) -> None:
    for name in ("step-00000004", "step-00000008", "step-00000012"):
        shutil.rmtree(path / "checkpoints" / name)
    (path / "checkpoints/latest").unlink()
    (path / "metrics.jsonl").write_bytes((path / "metrics.jsonl").read_bytes()[:700])
    _running(path)


def _killed_before_its_config(path: Path) -> None:
    shutil.rmtree(path)
    (path / ".hydra").mkdir(parents=True)


def _with_an_empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _with_no_folder(path: Path) -> None:
    shutil.rmtree(path)


STATES = [
    _killed_before_latest, _killed_before_the_last_word, _without_status, _killed_in_the_last_save,
    _killed_while_words_were_written, _killed_before_the_first_checkpoint, _killed_before_its_config,
    _with_an_empty_folder, _with_no_folder,
]  # fmt: skip


@pytest.mark.parametrize("happened", STATES, ids=lambda state: state.__name__.strip("_"))
def test_the_same_command_finishes_the_run_whatever_happened(folder: Path, path: Path, happened: Any) -> None:
    happened(path)
    run(auto(folder), path)
    assert_whole(path, folder)
    assert not list(path.rglob("*.tmp"))
    before = everything(path)
    run(auto(folder), path)
    assert everything(path) == before


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_it_used(
    folder: Path, path: Path, name: str
) -> None:
    file = path / "checkpoints/step-00000012" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run(auto(folder), path)
    assert_whole(path, folder)
    log = (path / "train.log").read_text()
    assert "damaged and not used, kept as" in log
    assert f"step-00000012/{name}: SHA-256 is " in log
    assert "checkpoint.json says" in log
    assert "resumed   at step 8" in log
    aside = path / "checkpoints/step-00000012.damaged"
    assert (aside / name).read_bytes() == bytes(content)


def test_several_damaged_checkpoints_are_set_aside_and_one_without_an_index_is_damaged(
    folder: Path, path: Path
) -> None:
    (path / "checkpoints/step-00000012/checkpoint.json").unlink()
    (path / "checkpoints/step-00000008/rng.pt").unlink()
    (path / "checkpoints/step-00000008.damaged").mkdir()  # of an earlier time
    run(auto(folder), path)
    assert_whole(path, folder)
    names = {p.name for p in (path / "checkpoints").iterdir()}
    assert names == {
        "latest", "step-00000004", "step-00000008", "step-00000012",
        "step-00000008.damaged", "step-00000008.damaged1", "step-00000012.damaged",
    }  # fmt: skip


def test_a_damaged_checkpoint_that_is_named_is_refused(folder: Path, path: Path) -> None:
    (path / "checkpoints/step-00000012/model.safetensors").write_bytes(b"x")
    before = everything(path)
    config = auto(folder, trainer__max_steps=20)
    config.resume = str(path)
    with pytest.raises(UserError, match=r"model\.safetensors has 1 bytes, checkpoint\.json says \d+"):
        run(config, path)
    assert everything(path) == before


def test_a_newer_step_that_lost_its_index_is_not_passed_over_in_silence(folder: Path, path: Path) -> None:
    (path / "checkpoints/step-00000012/checkpoint.json").unlink()
    before = everything(path)
    config = auto(folder, trainer__max_steps=20)
    config.resume = str(path)
    with pytest.raises(
        UserError, match=r"step-00000012 has no checkpoint\.json.* newest complete .*step-00000008"
    ):
        run(config, path)
    assert everything(path) == before

    config.resume = str(checkpoint.step_dir(path, 8))  # said by name, the older one is taken
    run(config, path)
    aside = path / "checkpoints/step-00000012.damaged"
    assert weights(path, 12) == weights(folder / "run", 12) == (aside / "model.safetensors").read_bytes()


def test_a_checkpoint_may_be_named_by_a_link_to_it(folder: Path, path: Path, tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(checkpoint.step_dir(path, 12))
    config = auto(folder, trainer__max_steps=13)
    config.resume = str(tmp_path / "best")
    run(config, path)
    assert checkpoint.complete_steps(path)[-1] == 13


def test_a_file_in_the_place_of_the_checkpoints_is_refused_before_training(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "fresh"
    path.mkdir()
    (path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="is no folder: no step could be saved"):
        run(auto(folder), path)
    assert [p.name for p in path.iterdir()] == ["checkpoints"]


def test_a_run_without_a_whole_checkpoint_is_not_started_over(folder: Path, path: Path) -> None:
    for step in (4, 8, 12):
        (checkpoint.step_dir(path, step) / "loader.json").write_text("{}")
    before = everything(path)
    with pytest.raises(UserError, match="has no checkpoint that is whole") as error:
        run(auto(folder), path)
    assert [line.count("loader.json has 2 bytes") for line in str(error.value).splitlines()] == [
        0,
        1,
        1,
        1,
        0,
    ]
    assert everything(path) == before


def test_nothing_is_set_aside_by_a_resume_that_is_refused(folder: Path, path: Path) -> None:
    (path / "checkpoints/step-00000012/model.safetensors").write_bytes(b"x")
    before = everything(path)
    with pytest.raises(UserError, match=r"model\.n_layer"):
        run(auto(folder, model__n_layer=3), path)
    other = write_text_set(path.parent / "other", train_tokens=3002)
    with pytest.raises(UserError, match="other data"):
        run(auto(folder, data__path=str(other)), path)
    assert everything(path) == before


def test_a_lower_budget_than_was_trained_is_complete_too(folder: Path, path: Path) -> None:
    before = everything(path)
    assert run(auto(folder, trainer__max_steps=6), path).step == 12
    assert everything(path) == before


WORDS = [
    "data.root=data", "run.name=one", "loader.seq_len=16", "loader.batch_size=4", "model.n_layer=1",
    "model.n_embd=16", "model.n_head=2", "tracker=none", "evaluation.tokens=200", "checkpoint.interval=2",
    "evaluation.sample_tokens=0",
]  # fmt: skip


def test_one_unchanged_command_starts_goes_on_and_ends(tmp_path: Path) -> None:
    """As a scheduler runs it: the real command, with a damaged checkpoint between the first two times."""
    write_text_set(tmp_path / "data/npy-stream")
    first = train_py(*WORDS, "resume=auto", "trainer.max_steps=4", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    path = tmp_path / "runs/one"
    (path / "checkpoints/step-00000004/optimizer.pt").write_bytes(b"")
    # Only some of the words again: the run's own are replayed.
    second = train_py("run.name=one", "resume=auto", "trainer.max_steps=6", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "optimizer.pt has 0 bytes" in second.stdout + second.stderr
    assert [row["step"] for row in rows(path) if "val_loss" in row][-1] == 6
    before = everything(path)
    third = train_py(*WORDS, "resume=auto", "trainer.max_steps=6", cwd=tmp_path)
    assert (third.returncode, third.stderr) == (0, "")
    assert "already complete at step 6" in third.stdout
    assert everything(path) == before


def test_the_words_of_a_refusal_make_a_branch_named_by_date_and_time(tmp_path: Path) -> None:
    write_text_set(tmp_path / "data/npy-stream")
    first = train_py(*WORDS, "trainer.max_steps=2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = everything(tmp_path / "runs/one")
    words = ["resume=runs/one", "loader.batch_size=8", "trainer.max_steps=4"]
    refused = train_py(*words, cwd=tmp_path)
    assert refused.returncode == 2
    accept = next(word for word in refused.stderr.split() if word.startswith("resume_accept=")).rstrip(",")
    branch = train_py(*words, accept, cwd=tmp_path)
    assert branch.returncode == 0, branch.stderr
    assert everything(tmp_path / "runs/one") == before
    (made,) = (file.parent for file in (tmp_path / "runs").glob("*/*/metrics.jsonl"))
    assert [row["step"] for row in train_rows(made)][-1] == 4
    assert status(made)["parent"]["step"] == 2


def test_a_checkpoint_under_a_name_that_no_step_has_is_left_alone(folder: Path, path: Path) -> None:
    renamed = path / "checkpoints/step-000000012"
    (path / "checkpoints/step-00000012").rename(renamed)
    before = snapshot(renamed)
    run(auto(folder), path)
    assert_whole(path, folder)
    assert snapshot(renamed) == before


def test_lost_rows_are_said_when_a_run_goes_on(
    folder: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path / "metrics.jsonl").unlink()
    with caplog.at_level("INFO", "harness"):
        run(auto(folder, trainer__max_steps=13), path)
    assert any("metrics.jsonl is gone" in line and "up to 12" in line for line in caplog.messages)
    assert [row["step"] for row in train_rows(path)] == [13]
