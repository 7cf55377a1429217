"""Resuming by the command line: the run's own words, refusals, damaged records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.storage.manifest import manifest_digest
from tests.helpers_cli import TINY, make_root, make_run
from tests.helpers_runs import snapshot, train_py, train_rows, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("trained"), data)


@pytest.fixture
def one(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, as `runs/one` of the test's own folder."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "one"))


def test_a_second_launch_into_a_finished_directory_changes_nothing(data: Path, tmp_path: Path) -> None:
    words = (*TINY, f"data.root={data}", f"hydra.run.dir={tmp_path}/run")
    assert train_py(*words, cwd=tmp_path).returncode == 0
    before = snapshot(tmp_path / "run")
    result = train_py(*words, "optimizer.lr=0.5", cwd=tmp_path)
    assert result.returncode == 2
    assert "already holds a run" in result.stderr
    assert snapshot(tmp_path / "run") == before
    again = train_py(f"resume={tmp_path}/run", cwd=tmp_path)
    assert again.returncode == 0
    assert "already complete at step 8" in again.stdout
    assert snapshot(tmp_path / "run") == before


def test_resume_works_from_anywhere_with_signs_in_the_path_and_own_configs(
    data: Path, tmp_path: Path
) -> None:
    """Another working directory, `=` and `,` in the path, the user's --config-dir, and data that moved."""
    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\noptimizer:\n  lr: 5.0e-3\n")
    straight, stopped = tmp_path / "straight", tmp_path / "lr=1,seed=2" / "run"
    words = ("--config-dir", str(tmp_path / "own"), "experiment=mine", *TINY)
    assert train_py(*words, f"data.root={data}", f"hydra.run.dir={straight}", cwd=tmp_path).returncode == 0
    shutil.copytree(data, tmp_path / "here" / "data")
    first = train_py(
        *words, "trainer.max_steps=4", "data.root=data", f"hydra.run.dir={stopped}", cwd=tmp_path / "here"
    )
    assert first.returncode == 0, first.stderr
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "here" / "data", tmp_path / "elsewhere" / "moved=data")
    result = train_py(
        f"resume={stopped}/checkpoints/step-00000004", "trainer.max_steps=8", "data.root=moved=data",
        cwd=tmp_path / "elsewhere",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "optimizer.lr" not in result.stdout
    assert train_rows(stopped) == train_rows(straight)
    assert weights(stopped, 8) == weights(straight, 8)
    # A second resume replays the words of the first.
    assert "already complete at step 8" in train_py(f"resume={stopped}", cwd=tmp_path).stdout


def test_resuming_an_older_step_branches_into_a_new_directory(one: Path, tmp_path: Path) -> None:
    before = snapshot(one)
    result = train_py("resume=runs/one/checkpoints/step-00000004", "trainer.max_steps=6", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "branch    of runs/one at step 4" in result.stdout
    assert snapshot(one) == before
    (branch,) = [path.parent for path in tmp_path.glob("runs/2*/*/metrics.jsonl")]
    assert [row["step"] for row in train_rows(branch)] == [5, 6]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["model.n_layer=2"], ["model.n_layer: checkpoint 1, now 2"]),
        (["loader.seq_len=8"], ["loader.seq_len: checkpoint 16, now 8"]),
    ],
)
def test_a_refused_resume_is_exit_code_2_without_traceback(
    one: Path, tmp_path: Path, words: list[str], values: list[str]
) -> None:
    before = snapshot(one)
    result = train_py("resume=runs/one", "trainer.max_steps=9", *words, cwd=tmp_path)
    assert result.returncode == 2
    assert all(value in result.stderr for value in values), result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert snapshot(one) == before


@pytest.mark.parametrize(
    ("group", "key", "value", "named"),
    [
        ("preparation", "val_fraction", 0.02, "preparation.val_fraction: then None, now 0.02"),
        ("tokenizer", "vocab_size", 300, "vocabulary: checkpoint 257"),
    ],
)
def test_a_changed_manifest_stops_a_resume_with_exit_code_2(
    data: Path, one: Path, tmp_path: Path, group: str, key: str, value: object, named: str
) -> None:
    root = Path(shutil.copytree(data, tmp_path / "root"))
    manifest = root / "npy-stream" / "metadata.json"
    raw = json.loads(manifest.read_text())
    raw[group][key] = value
    manifest.write_text(json.dumps(raw))
    before = snapshot(one)
    words = ["prepare.val_fraction=0.02"] if key == "val_fraction" else []
    words.append(f"data.root={root}")
    result = train_py("resume=runs/one", "trainer.max_steps=9", *words, cwd=tmp_path)
    assert result.returncode == 2
    assert named in result.stderr
    assert manifest_digest(raw) in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert snapshot(one) == before


def test_naming_one_budget_unsets_the_other_also_at_a_resume(data: Path, tmp_path: Path) -> None:
    result = train_py(*TINY[:-5], f"data.root={data}", "run.name=one", "trainer.max_tokens=256", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert train_rows(tmp_path / "runs" / "one")[-1]["step"] == 4
    result = train_py("resume=runs/one", "trainer.max_steps=6", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert train_rows(tmp_path / "runs" / "one")[-1]["step"] == 6
    result = train_py("resume=runs/one", "trainer.max_steps=6", "trainer.max_tokens=64", cwd=tmp_path)
    assert result.returncode == 2
    assert "set one of them" in result.stderr


def test_auto_finds_the_run_whatever_its_name_looks_like(data: Path, tmp_path: Path) -> None:
    words = [*TINY, f"data.root={data}", "run.name=1e3", "resume=auto"]
    assert train_py(*words, "trainer.max_steps=4", cwd=tmp_path).returncode == 0
    assert train_py(*words, cwd=tmp_path).returncode == 0
    assert [row["step"] for row in train_rows(tmp_path / "runs" / "1e3")] == list(range(1, 9))
    unclear = train_py("run.name=${seed}", "resume=auto", cwd=tmp_path)
    assert unclear.returncode == 2
    assert "add a plain run.name=NAME" in unclear.stderr


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (".hydra/hydra.yaml", b"{}"),
        (".hydra/overrides.yaml", b"- 5"),
        (".hydra/overrides.yaml", b"\xff\xfe"),
        (".hydra/overrides.yaml", None),
        ("config.yaml", b"data: 5"),
        ("manifest.json", b"["),
    ],
)
def test_a_damaged_record_of_a_run_is_no_traceback(
    one: Path, tmp_path: Path, file: str, content: bytes | None
) -> None:
    path = one / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    result = train_py("resume=runs/one", "trainer.max_steps=9", cwd=tmp_path)
    assert "Traceback" not in result.stderr + result.stdout
    assert result.returncode in (0, 2)
    if file != "manifest.json" and result.returncode:
        assert "checkpoints/step-N/config.yaml" in result.stderr  # where the settings are still to be had


def test_a_folder_in_the_place_of_a_runs_file_is_no_traceback(one: Path, tmp_path: Path) -> None:
    (one / "checkpoints/latest").unlink()
    (one / "checkpoints/latest").mkdir()
    result = train_py("resume=runs/one", "trainer.max_steps=9", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: {one}/checkpoints/latest: Is a directory")
