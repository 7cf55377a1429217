"""Killed at any moment: the set is whole or absent, and the next run ends with the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.prepare import Summary, job, pipeline, prepare
from harness.prepare.pipeline import _job
from tests.helpers_prepare import (
    config_of,
    documents_of,
    gpt2,
    jsonl,
    read_split,
    refusal,
    small_chunks,
    snapshot,
    start_child,
    texts,
    write_jsonl,
)

SETTINGS: dict[str, Any] = {"shard_tokens": 3000, "val_fraction": 0.2}


def finish(child: subprocess.Popen[str]) -> dict[str, str]:
    out, err = child.communicate(timeout=60)
    words = out.split()
    return dict(zip(words[::2], words[1::2], strict=False)) if "events" in out else {"error": err}


def rerun(
    monkeypatch: pytest.MonkeyPatch, directory: Path, source: Path, **settings: Any
) -> tuple[Summary, list[str]]:
    """Prepare in this process; returns the summary and what was said."""
    small_chunks(monkeypatch, 2000)
    said: list[str] = []
    return prepare(config_of(directory, jsonl(source), **SETTINGS | settings), report=said.append), said


def check_whole_or_absent(directory: Path) -> None:
    if directory.exists():
        for split in ("train", "val"):
            read_split(directory, split)


def test_a_kill_at_any_write_leaves_all_or_nothing_and_the_next_run_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(150))
    straight = finish(start_child(source, tmp_path / "straight"))
    events = int(straight["events"])
    moments = sorted({1, 3, *range(9, events - 9, events // 5), *range(events - 12, events + 1)})
    children = []
    for moment in moments:
        children.append((moment, start_child(source, tmp_path / f"set{moment}", kill_at=moment)))
        if len(children) % 3 == 0:
            children[-3][1].wait()
    resumed = 0
    for moment, child in children:
        directory = tmp_path / f"set{moment}"
        child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL
        check_whole_or_absent(directory)
        summary, said = rerun(monkeypatch, directory, source)
        resumed += any("going on after" in line for line in said)
        assert summary.digest == straight["digest"]
        assert snapshot(directory) == snapshot(tmp_path / "straight")
        assert sorted(p.name for p in tmp_path.glob(f"set{moment}.*")) == [f"set{moment}.lock"]
    assert resumed >= 4


def test_a_kill_while_replacing_leaves_the_old_set_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_jsonl(tmp_path / "old.jsonl", texts(40, seed=1))
    new = write_jsonl(tmp_path / "new.jsonl", texts(40))
    rerun(monkeypatch, tmp_path / "old", old)
    rerun(monkeypatch, tmp_path / "straight", new)
    expected = {name: snapshot(tmp_path / name) for name in ("old", "straight")}

    def start(name: str, moment: int) -> subprocess.Popen[str]:
        rerun(monkeypatch, tmp_path / name, old)
        return start_child(new, tmp_path / name, overwrite=True, kill_at=moment)

    events = int(finish(start("first", 0))["events"])
    seen = set()
    children = [(m, start(f"set{m}", m)) for m in range(events - 12, events + 1)]
    for moment, child in children:
        directory = tmp_path / f"set{moment}"
        finish(child)
        if directory.exists():
            found = snapshot(directory)
            seen.add(next(name for name, files in expected.items() if files == found))
        else:
            seen.add("absent")
        summary, _ = rerun(monkeypatch, directory, new, overwrite=True)
        assert snapshot(directory) == expected["straight"]
        assert summary.documents == 40
        assert sorted(p.name for p in tmp_path.glob(f"set{moment}.*")) == [f"set{moment}.lock"]
    assert seen >= {"old", "straight"}


def test_after_a_kill_between_the_two_renames_the_set_comes_back_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(40))
    rerun(monkeypatch, tmp_path / "set", source)
    before = snapshot(tmp_path / "set")
    os.rename(tmp_path / "set", tmp_path / "set.replaced")
    summary, _ = rerun(monkeypatch, tmp_path / "set", source)
    assert summary.already_there
    assert snapshot(tmp_path / "set") == before


def test_no_worker_outlives_a_killed_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(4000))
    child = start_child(source, tmp_path / "set", workers=2)
    wait_for(lambda: journalled_tokens(tmp_path / "set.preparing") > 0)
    workers = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    child.kill()
    child.communicate(timeout=60)
    assert not (tmp_path / "set").exists()
    assert len(workers) >= 2
    wait_for(lambda: not any(alive(pid) for pid in workers))
    summary, said = rerun(monkeypatch, tmp_path / "set", source)
    assert any("going on after" in line for line in said)
    rerun(monkeypatch, tmp_path / "straight", source)
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "straight")
    assert summary.documents == 4000


def test_ctrl_c_ends_it_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(4000))
    child = start_child(source, tmp_path / "set", workers=2)
    wait_for(lambda: journalled_tokens(tmp_path / "set.preparing") > 0)
    pids = [child.pid, *map(int, Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split())]
    for pid in pids:  # what a terminal does
        os.kill(pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt" in err
    wait_for(lambda: not any(alive(pid) for pid in pids))
    _, said = rerun(monkeypatch, tmp_path / "set", source)
    assert any("going on after" in line for line in said)


def test_other_settings_or_another_corpus_start_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(200))
    finish(start_child(source, tmp_path / "set", kill_at=60))
    assert journalled_tokens(tmp_path / "set.preparing") > 0
    more = texts(20, seed=2)
    with open(source, "a") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in more)
    _, said = rerun(monkeypatch, tmp_path / "set", source)
    assert "starting anew" in said[0]
    found = documents_of(tmp_path / "set", "train") + documents_of(tmp_path / "set", "val")
    assert sorted(found) == sorted(texts(200) + more)


def test_a_damaged_journal_or_shard_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(200))
    rerun(monkeypatch, tmp_path / "straight", source)
    damages: list[Callable[[Path], object]] = [
        lambda folder: (folder / "journal.json").write_text('{"identity": '),
        lambda folder: (folder / "train_00000.npy").unlink(),
        lambda folder: os.truncate(folder / "train_00000.npy", 500),
        lambda folder: flip_byte(folder / "train_00000.npy", 40),
        lambda folder: flip_byte(folder / "train_00000.npy", 1000),
    ]
    for index, damage in enumerate(damages):
        finish(start_child(source, tmp_path / f"set{index}", kill_at=60))
        assert journalled_tokens(tmp_path / f"set{index}.preparing") > 3000
        damage(tmp_path / f"set{index}.preparing")
        _, said = rerun(monkeypatch, tmp_path / f"set{index}", source)
        assert "starting anew" in said[0]
        assert snapshot(tmp_path / f"set{index}") == snapshot(tmp_path / "straight")


def test_allowing_bad_documents_afterwards_costs_no_second_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(200))
    with open(source, "a") as file:
        file.write("nothing\n" * 20)
    small_chunks(monkeypatch, 2000)
    assert "20 of 220" in refusal(tmp_path / "set", jsonl(source), **SETTINGS)
    summary, said = rerun(monkeypatch, tmp_path / "set", source, max_bad_fraction=0.5)
    assert [line for line in said if f"going on after {summary.tokens:,} tokens" in line]
    assert (summary.documents, summary.bad_documents) == (200, 20)


def test_a_corpus_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(200))
    monkeypatch.setattr(pipeline, "JOURNAL_SECONDS", 0.0)
    small_chunks(monkeypatch, 2000)
    original = pipeline.workplace.write_journal

    def append_once(*args: object) -> None:
        original(*args)  # type: ignore[arg-type]
        if source.stat().st_size < 100_000:
            with open(source, "ab") as file:
                file.write(b" " * 100_000 + b"\n")

    monkeypatch.setattr(pipeline.workplace, "write_journal", append_once)
    assert f"{source} changed while" in refusal(tmp_path / "set", jsonl(source), **SETTINGS)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("package", ["harness", "tiktoken"])
def test_another_version_never_goes_on_with_the_tokens_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(40))
    config = config_of(tmp_path / "set", jsonl(source), gpt2())
    of_this = _job(config, tmp_path / "set", print).identity()
    assert of_this == _job(config, tmp_path / "set", print).identity()
    found = job.versions("gpt2")
    assert set(found) == {"harness", "tiktoken"}
    assert None not in found.values()
    monkeypatch.setattr(job, "versions", lambda name: found | {package: "0.0.0"})
    assert of_this != _job(config, tmp_path / "set", print).identity()


def flip_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def journalled_tokens(building: Path) -> int:
    try:
        train = json.loads((building / "journal.json").read_text())["state"]["splits"]["train"]
    except (OSError, ValueError):
        return 0
    return len(train["shards"]) * 3000 + int(train["partial_tokens"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
