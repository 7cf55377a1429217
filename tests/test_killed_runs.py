"""A run that is killed at any moment of a save loses one step, and goes on to the very same end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoints import checkpoint
from harness.config import TrainConfig
from tests.helpers_forks import ROOT, forked
from tests.helpers_kills import train_killed
from tests.helpers_runs import rows, tiny_config, write_text_set

STEPS = 8


def config_of(tmp_path: Path) -> TrainConfig:
    return tiny_config(
        tmp_path / "set",
        trainer__max_steps=STEPS,
        checkpoint__interval=1,
        evaluation__interval=3,
        tracker__name="none",
        resume="auto",
    )


def last_files(run: Path) -> dict[str, str]:
    """The digests of what the last checkpoint must hold exactly."""
    saved = checkpoint.step_dir(run, STEPS)
    files = json.loads((saved / "checkpoint.json").read_text())["files"]
    exact = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.RNG, checkpoint.LOADER)
    return {name: files[name]["sha256"] for name in exact}


def check_left(run: Path, expected: list[dict[str, object]], background: bool) -> int:
    """What a kill left is whole; lost is one interval, and that of a save under way; the newest step."""
    steps = checkpoint.complete_steps(run)
    for step in steps:
        checkpoint.open_checkpoint(checkpoint.step_dir(run, step))
    latest = run / "checkpoints" / "latest"
    if latest.exists():
        assert latest.read_text().strip() in [checkpoint.step_dir(run, step).name for step in steps]
    found = rows(run) if (run / "metrics.jsonl").exists() else []
    assert found == expected[: len(found)]
    newest = steps[-1] if steps else 0
    assert max((int(str(row["step"])) for row in found), default=0) - newest <= 1 + background
    return newest


@pytest.mark.parametrize(("first", "background", "keep_last"), [(31, True, 1), (38, False, 2)])
def test_killed_in_one_save_after_another_it_gets_to_the_same_end(
    tmp_path: Path, first: int, background: bool, keep_last: int
) -> None:
    write_text_set(tmp_path / "set", train_tokens=400)
    config = config_of(tmp_path)
    config.checkpoint.background, config.checkpoint.keep_last = background, keep_last
    straight, run, newest, kills = tmp_path / "straight", tmp_path / "run", 0, 0
    assert train_killed(config, straight, 0) is not None
    while train_killed(config, run, first + 5 * kills) is None:
        kills += 1
        left = check_left(run, rows(straight), background)
        assert len(checkpoint.complete_steps(run)) <= keep_last + 2  # the best, and one about to go
        assert left >= newest
        newest = left
    assert kills >= 6
    assert rows(run) == rows(straight)
    assert last_files(run) == last_files(straight)
    assert names(run) == names(straight)


def names(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.heavy
def test_the_proof_kills_real_processes_and_finds_nothing_wrong(tmp_path: Path) -> None:
    words = ["--model=small", "--steps=8", "--random=1", "--every=0", "--full-disk=0", f"--folder={tmp_path}"]
    done = forked("scripts/prove_kill.py", *words, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    row = done.stdout.splitlines()[2].strip("| ").split(" | ")
    assert [row[0], row[1], row[-1]] == ["at random", "1", "0"]
    assert int(row[-2]) >= 1
    assert list(tmp_path.iterdir()) == []
