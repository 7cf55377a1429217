"""Killed at any moment: the set is whole or absent, and the next run ends with the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config import PrepareScriptConfig
from harness.prepare import Summary, job, pipeline, prepare, workplace
from harness.prepare.documents import Part
from harness.prepare.pipeline import _job
from harness.prepare.rows import DocumentRowWriter
from harness.prepare.shards import StreamWriter
from harness.storage.manifest_schema import StorageInfo
from tests.helpers_kills import check_whole_or_absent, prepare_killed
from tests.helpers_prepare import (
    config_of,
    documents_of,
    gpt2,
    jsonl,
    prepared,
    refusal,
    small_chunks,
    snapshot,
    start_child,
    texts,
    write_jsonl,
    write_lines,
)

SETTINGS: dict[str, Any] = {"shard_tokens": 3000, "val_fraction": 0.2}


def rerun(
    monkeypatch: pytest.MonkeyPatch, directory: Path, source: Path, **settings: Any
) -> tuple[Summary, list[str]]:
    """Prepare in this process; returns the summary and what was said."""
    small_chunks(monkeypatch, 2000)
    said: list[str] = []
    return prepare(config_of(directory, jsonl(source), **SETTINGS | settings), report=said.append), said


@pytest.mark.parametrize("kind", ["npy-stream", "hdf5-stream", "gzip-rows", "npy-rows", "hdf5-pairs"])
def test_a_kill_at_any_moment_leaves_all_or_nothing_and_the_next_run_ends_the_same(
    tmp_path: Path, kind: str
) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(45)))

    def config(name: str) -> PrepareScriptConfig:
        return config_of(tmp_path / name, source, kind=kind, shard_tokens=1200, val_fraction=0.2)

    straight = prepare_killed(config("straight"), 0)
    assert straight is not None
    last = straight.moments
    moments = sorted({2, *range(9, last - 3, last // 6), *range(last - 3, last + 1)})
    resumed = 0
    for moment in moments:
        directory = tmp_path / f"set{moment}"
        assert prepare_killed(config(directory.name), moment) is None
        check_whole_or_absent(directory)
        ended = prepare_killed(config(directory.name), 0)
        assert ended is not None
        resumed += any("going on after" in line for line in ended.said)
        assert ended.digest == straight.digest
        assert snapshot(directory) == snapshot(tmp_path / "straight")
        assert sorted(p.name for p in tmp_path.glob(f"set{moment}.*")) == [f"set{moment}.lock"]
    assert resumed >= 3


def test_killed_again_and_again_it_gets_there(tmp_path: Path) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(45)))
    config = config_of(tmp_path / "set", source, kind="gzip-rows", shard_tokens=1200)
    runs = 0
    while prepare_killed(config, 23) is None:
        runs += 1
        assert runs < 40
    prepared(tmp_path / "straight", source, kind="gzip-rows", shard_tokens=1200)
    assert runs >= 4
    assert snapshot(tmp_path / "set") == snapshot(tmp_path / "straight")


@pytest.mark.parametrize("how", ["overwrite", "append", "source"])
def test_a_kill_while_replacing_leaves_the_old_set_or_the_new(tmp_path: Path, how: str) -> None:
    kind = "hdf5-stream" if how == "append" else "npy-stream"
    settings: dict[str, Any] = {"sharding": "source"} if how == "source" else {"shard_tokens": 1200}
    changes: dict[str, Any] = {"append": True} if how == "append" else {"overwrite": True}
    (tmp_path / "old").mkdir()
    for index in range(3):
        write_lines(tmp_path / "old" / f"{index}.jsonl", texts(15, seed=index))
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    write_lines(tmp_path / "new" / "3.jsonl", texts(15, seed=3))
    if how != "append":
        write_lines(tmp_path / "new" / "0.jsonl", texts(12, seed=9))

    def config(name: str, corpus: str, **more: Any) -> PrepareScriptConfig:
        return config_of(tmp_path / name, jsonl(tmp_path / corpus), kind=kind, **settings | more)

    def start(name: str) -> None:
        if name != "before":
            shutil.copytree(tmp_path / "before", tmp_path / name)

    prepare_killed(config("before", "old"), 0)
    start("straight")
    straight = prepare_killed(config("straight", "new", **changes), 0)
    assert straight is not None
    expected = {name: snapshot(tmp_path / name) for name in ("before", "straight")}
    last, seen = straight.moments, set()
    for moment in sorted({*range(3, last - 7, last // 4), *range(last - 7, last + 1)}):
        directory = tmp_path / f"set{moment}"
        start(directory.name)
        assert prepare_killed(config(directory.name, "new", **changes), moment) is None
        found = snapshot(directory) if check_whole_or_absent(directory) else None
        seen.add(next((name for name, files in expected.items() if files == found), "absent"))
        assert found is None or found in expected.values()
        ended = prepare_killed(config(directory.name, "new", **changes), 0)
        assert ended is not None
        assert ended.digest == straight.digest
        assert snapshot(directory) == expected["straight"]
        assert sorted(p.name for p in tmp_path.glob(f"set{moment}.*")) == [f"set{moment}.lock"]
    assert seen >= {"before", "straight"}


@pytest.mark.parametrize("layout", ["stream", "rows"])
def test_every_stage_of_sealing_a_shard_can_be_gone_on_from(tmp_path: Path, layout: str) -> None:
    storage = StorageInfo("hdf5", np.dtype("<u2"), layout, 64 if layout == "stream" else None, "gzip")

    def writer(folder: Path) -> StreamWriter | DocumentRowWriter:
        if layout == "stream":
            return StreamWriter(folder, "train", storage, 500)
        return DocumentRowWriter(folder, "train", storage, 500, 9, 0)

    parts = [Part(np.arange(1, 301, dtype="<u2"), np.array([100, 300]), 298) for _ in range(3)]
    straight = tmp_path / "straight"
    straight.mkdir()
    one = writer(straight)
    one.add(parts[0])
    one.sync()
    before = json.loads(json.dumps(one.state()))
    growing = {path.name: path.read_bytes() for path in straight.iterdir()}
    one.add(parts[1])  # fills a shard
    one.sync()
    after = json.loads(json.dumps(one.state()))
    sealed = {path.name: path.read_bytes() for path in straight.iterdir()}
    assert {"train_00000.h5", "train_00000.npy", "train_00001.npy"} <= sealed.keys()
    one.release()
    assert not (straight / "train_00000.npy").exists()
    released = {path.name: path.read_bytes() for path in straight.iterdir()}
    one.add(parts[2])
    entry = one.finish()
    one.release()

    half = {".train_00000.h5.1-a.tmp": b"half"}
    full = {name: data for name, data in sealed.items() if not name.startswith("train_00001")}
    unsealed = {name: data for name, data in full.items() if not name.endswith(".h5")}
    stages = {
        "growing": (growing, before),
        "full": (unsealed, before),
        "half written": (unsealed | half, before),
        "renamed": (full, before),
        "the next begun": (sealed, before),
        "in the journal": (sealed, after),
        "released": (released, after),
    }
    for name, (files, state) in stages.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        again = writer(folder)
        assert again.can_restore(state), name
        workplace.remove_temporaries(folder)
        again.restore(state)
        for part in parts[1:] if state is before else parts[2:]:
            again.add(part)
        assert again.finish() == entry, name
        again.release()
        assert snapshot(folder) == snapshot(straight), name
    for name in ("train_00000.h5", "train_00001.npy"):
        folder = tmp_path / f"without {name}"
        folder.mkdir()
        for file, data in released.items():
            (folder / file).write_bytes(data if file != name else data[:-1])
        assert not writer(folder).can_restore(after)


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
    # One of the process that was asked to stop; it may have been handling another exception just then.
    assert err.count("Traceback") - err.count("During handling of the above") == 1
    assert "KeyboardInterrupt" in err
    wait_for(lambda: not any(alive(pid) for pid in pids))
    _, said = rerun(monkeypatch, tmp_path / "set", source)
    assert any("going on after" in line for line in said)


def test_other_settings_or_another_corpus_start_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(200))
    config = config_of(tmp_path / "set", jsonl(source), **SETTINGS)
    assert prepare_killed(config, 60) is None
    assert journalled_tokens(tmp_path / "set.preparing") > 0
    more = texts(20, seed=2)
    with open(source, "a") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in more)
    _, said = rerun(monkeypatch, tmp_path / "set", source)
    assert "starting anew" in said[0]
    found = documents_of(tmp_path / "set", "train") + documents_of(tmp_path / "set", "val")
    assert sorted(found) == sorted(texts(200) + more)


DAMAGES: dict[str, Callable[[Path, str], object]] = {
    "a journal cut off": lambda folder, shard: (folder / "journal.json").write_text('{"identity": '),
    "a shard lost": lambda folder, shard: (folder / shard).unlink(),
    "a shard cut off": lambda folder, shard: os.truncate(folder / shard, 500),
    "a flipped header": lambda folder, shard: flip_byte(folder / shard, 40),
    "a flipped token": lambda folder, shard: flip_byte(folder / shard, 600),
}


@pytest.mark.parametrize("kind", ["npy-stream", "gzip-rows"])
def test_a_damaged_journal_or_shard_starts_anew(tmp_path: Path, kind: str) -> None:
    source = jsonl(write_lines(tmp_path / "a.jsonl", texts(60)))

    def config(name: str) -> PrepareScriptConfig:
        return config_of(tmp_path / name, source, kind=kind, shard_tokens=1200)

    straight = prepare_killed(config("straight"), 0)
    assert straight is not None
    assert prepare_killed(config("set"), straight.moments // 2) is None
    shard = next(
        path.name for path in (tmp_path / "straight").iterdir() if path.name.startswith("train_00000")
    )
    for name, damage in DAMAGES.items():
        shutil.copytree(tmp_path / "set.preparing", tmp_path / f"{name}.preparing")
        damage(tmp_path / f"{name}.preparing", shard)
        ended = prepare_killed(config(name), 0)
        assert ended is not None
        assert "starting anew" in ended.said[0]
        assert snapshot(tmp_path / name) == snapshot(tmp_path / "straight")
    ended = prepare_killed(config("set"), 0)
    assert ended is not None
    assert "going on after" in ended.said[0]


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
