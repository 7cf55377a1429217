"""An audit confirms what a run saw, and names the first step where data or records were changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.auditing.audit import audit
from harness.auditing.audit_cli import report
from harness.auditing.data_chain import batch_sha256
from harness.auditing.replay import SegmentReader, budget_of, open_run, reader_of, source_of
from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    Hdf5DataConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.errors import UserError
from harness.storage.manifest import load_manifest, write_manifest
from tests.helpers_audit import edit_rows, faults, other_hash
from tests.helpers_runs import run, tiny_config, train_rows, write_pair_set, write_row_set, write_text_set
from tests.helpers_sets import write_set

SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 4}
SEQUENTIAL = LoaderConfig(**SIZES)
Rows = list[dict[str, Any]]


def _run(folder: Path, **changes: Any) -> Path:
    """A run of 12 steps over a set of its own, killed and gone on with once."""
    data = write_text_set(folder / "set", train_tokens=500)
    changes = {"model__n_layer": 1, "evaluation__interval": 5, "checkpoint__keep_last": None, **changes}
    run(tiny_config(data, **changes | {"trainer__max_steps": 6}), folder / "run")
    run(tiny_config(data, **changes, resume=str(folder / "run")), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that logged every batch's hash."""
    return _run(tmp_path_factory.mktemp("every")).parent


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that logged every third step, with the chain alone, and was saved at 6 and 12."""
    return _run(
        tmp_path_factory.mktemp("some"), trainer__log_batch_hash=False, trainer__log_interval=3,
        evaluation__interval=100, checkpoint__interval=100,
    ).parent  # fmt: skip


def _copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of such a folder's run, whose set lies beside it: `moved(...)` names it."""
    return Path(shutil.copytree(folder, tmp_path / "copy")) / "run"


def _found(path: Path) -> list[tuple[int, str]]:
    return list(faults(path, data_path=str(path.parent / "set")))


@pytest.mark.parametrize("fixture", ["every", "some"])
def test_a_run_that_is_as_it_claims_is_confirmed(fixture: str, request: pytest.FixtureRequest) -> None:
    assert faults(request.getfixturevalue(fixture) / "run") == []


LOADERS = {
    "permutation": SlidingWindowConfig(stride=7, **SIZES),
    "uniform": SlidingWindowConfig(sampling="uniform", **SIZES),
    "block_shuffle": BlockShuffleConfig(window_tokens=320, **SIZES),
    "padded_rows": PaddedRowsConfig(**SIZES),
    "contrastive_rows": ContrastiveRowsConfig(**SIZES),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_is_confirmed_over_several_epochs(name: str, tmp_path: Path) -> None:
    write = {"padded_rows": write_row_set, "contrastive_rows": write_pair_set}.get(name)
    data = write_text_set(tmp_path / "set", train_tokens=500) if write is None else write(tmp_path / "set")
    config = tiny_config(data, trainer__max_steps=30, evaluation__interval=100, model__n_layer=1)
    config.schedule.total_steps, config.loader = 30, LOADERS[name]
    run(config, tmp_path / "run")
    assert faults(tmp_path / "run") == []
    token = _change_tokens(data, 1)
    found = _found(tmp_path / "run")
    assert "the data is another" in found[0][1]
    assert _first(found) == _first_reading(tmp_path / "run", token)


def _first(found: list[tuple[int, str]]) -> int:
    return min(step for step, _ in found if step)


def _change_tokens(data: Path, count: int) -> int:
    """Change tokens of the last train shard and rewrite the manifest to match; the first one's number."""
    manifest = load_manifest(data)
    raw = manifest.raw
    split = raw["splits"]["train"]
    entry = split.get("pos", split)["shards"][-1]
    array = np.load(data / entry["file"])
    flat = array.reshape(-1)
    start = 3 * (array.shape[1] if array.ndim == 2 else 10)  # a row that is neither the first nor the last
    flat[start : start + count] = (flat[start : start + count] + 1) % 257
    np.save(data / entry["file"], array)
    entry["sha256"] = hashlib.sha256(array.tobytes()).hexdigest()
    write_manifest(data, raw)
    before = [shard.get("rows", shard["tokens"]) for shard in split.get("pos", split)["shards"][:-1]]
    return start // (array.shape[1] if array.ndim == 2 else 1) + sum(before)


def _first_reading(path: Path, number: int) -> int:
    """The first step that reads token (of rows: row) `number` of the train split, by where its rows lie."""
    record = open_run(path)
    reader = SegmentReader.open(source_of(record, record.segments[0]))
    width = 17
    for row in train_rows(path):
        for origin in reader.origins(row["step"]):
            if origin.start is None and origin.sample == number and origin.name != "neg":
                return int(row["step"])
            if origin.start is not None and origin.start <= number < origin.start + width:
                return int(row["step"])
    raise AssertionError("no step reads it")


@pytest.mark.parametrize(("fixture", "stretch"), [("every", (5, 5)), ("some", (4, 6))])
def test_a_changed_token_is_named_by_its_step(
    fixture: str, stretch: tuple[int, int], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Exactly where batch hashes are logged, else by the steps between two values of the chain."""
    path = _copy(request.getfixturevalue(fixture), tmp_path)
    token = _change_tokens(path.parent / "set", 1)
    assert token == 280  # of step 5: tokens 256 to 320
    found = _found(path)
    first, last = stretch
    assert found[0][0] == 0
    assert "the data is another" in found[0][1]
    named = f"step {first}" if first == last else f"one of the steps {first} to {last}"
    assert found[1][0] == first
    assert found[1][1].startswith(f"{named} saw other tokens than the data holds now")
    again = 12 if fixture == "every" else 10  # the token's batch comes again in the second epoch
    assert [step for step, _ in found[2:]] == [again]


def test_a_changed_token_that_no_step_read_is_said_without_a_step(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    manifest = load_manifest(path.parent / "set")
    raw = manifest.raw
    val = raw["splits"]["val"]["shards"][0]
    tokens = np.load(path.parent / "set" / val["file"])
    tokens[0] ^= 1
    np.save(path.parent / "set" / val["file"], tokens)
    val["sha256"] = hashlib.sha256(tokens.tobytes()).hexdigest()
    write_manifest(path.parent / "set", raw)
    assert [step for step, _ in _found(path)] == [0]


def test_a_token_changed_behind_the_manifest_is_found_too(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    data = path.parent / "set"
    raw = load_manifest(data).raw
    _change_tokens(data, 1)
    write_manifest(data, raw)
    assert [step for step, _ in _found(path)] == [5, 12]


def _set_row(step: int, key: str, change: Callable[[Any], Any]) -> Callable[[Rows], Rows]:
    def edit(rows: Rows) -> Rows:
        for row in rows:
            if row["step"] == step and "loss" in row:
                row[key] = change(row[key])
        return rows

    return edit


@pytest.mark.parametrize("fixture", ["every", "some"])
@pytest.mark.parametrize(
    ("step", "key", "message"),
    [
        (3, "data_chain", "was changed: data_chain"),
        (9, "data_chain", "was changed: data_chain"),
        (12, "data_chain", "was changed: data_chain"),
        (9, "position", "says epoch 1, position 65 after step 9; it is epoch 1, position 128"),
        (9, "epoch", "says epoch 2, position 128 after step 9; it is epoch 1, position 128"),
    ],
)
def test_an_edited_row_is_named_by_its_step(
    fixture: str, step: int, key: str, message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = _copy(request.getfixturevalue(fixture), tmp_path)
    new = {"data_chain": other_hash, "position": lambda position: 65, "epoch": lambda epoch: epoch + 1}[key]
    edit_rows(path, _set_row(step, key, new))
    ((at, text),) = _found(path)
    assert at == step
    assert message in text
    assert text.startswith("metrics.jsonl line")


def test_an_edited_batch_hash_is_named_by_its_step(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    edit_rows(path, _set_row(7, "batch_sha256", other_hash))
    ((at, text),) = _found(path)
    assert at == 7
    assert "was changed: batch_sha256" in text


def test_a_row_from_before_a_branch_is_named(every: Path, tmp_path: Path) -> None:
    branch = tmp_path / "branch"
    changes = {"trainer__max_steps": 10, "model__n_layer": 1, "evaluation__interval": 100}
    run(tiny_config(every / "set", resume=str(every / "run/checkpoints/step-00000008"), **changes), branch)
    edit_rows(branch, lambda rows: [rows[0] | {"step": 8}, *rows])
    assert any(
        "line 1 is of step 8, but the run's own steps begin after 8" in text for _, text in faults(branch)
    )


def test_two_edited_rows_are_two_differences(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    edit_rows(path, _set_row(4, "data_chain", other_hash))
    edit_rows(path, _set_row(7, "batch_sha256", other_hash))
    assert [step for step, _ in _found(path)] == [4, 7]


def _swapped(rows: Rows) -> Rows:
    return [*rows[:3], rows[4], rows[3], *rows[5:]]


def _without_a_chain(rows: Rows) -> Rows:
    return [{k: v for k, v in row.items() if k != "data_chain" or row["step"] != 4} for row in rows]


def _without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: [*rows[:3], *rows[2:]], r"line 4 is a second row of step 3"),
        (_swapped, r"line 5, of step 4, comes after step 5: out of order"),
        (lambda rows: rows[:2] + rows[4:], r"steps 3 to 4 are missing before metrics.jsonl line 3"),
        (lambda rows: [*rows, rows[-1] | {"step": 10**7}], r"line 17 has step=10000000, but .* 1 to 12"),
        (lambda rows: [*rows, {"loss": 1.0}], r"line 17, after step 12, is not a row"),
        (lambda rows: [{**rows[0], "step": "1"}, *rows[1:]], r"line 1 has step='1'"),
        (lambda rows: [{**rows[0], "data_chain": 5}, *rows[1:]], r"line 1: data_chain=5 is no SHA-256"),
        (lambda rows: [*rows, rows[-1]], r"line 17 is a second evaluation of step 12"),
        (lambda rows: [rows[-1], *rows[:-1]], r"line 2, of step 1, comes after step 12: out of order"),
        (lambda rows: [_without(rows[0], "loss"), *rows[1:]], r"line 1 has neither a loss nor a val_loss"),
        (lambda rows: [_without(rows[0], "epoch", "position"), *rows[1:]], r"line 1 has no epoch and no pos"),
        (lambda rows: [rows[0] | {"tokens": 63}, *rows[1:]], r"line 1 says 63 tokens after step 1; it is 64"),
        (lambda rows: rows[:1], r"no row of step 7, which was to be logged \(6 such steps\)"),
        (lambda rows: [], r"no row of step 7, which was to be logged"),
        (_without_a_chain, r"has no data_chain, but what was written up to step 12 has one"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_named(
    edit: Callable[[Rows], Rows], message: str, every: Path, tmp_path: Path
) -> None:
    path = _copy(every, tmp_path)
    edit_rows(path, edit)
    found = _found(path)
    assert any(re.search(message, text) for _, text in found), found


def test_a_run_that_is_being_written_is_audited_up_to_there(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    file = path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-40])  # a torn last line, the evaluation's
    (path / "checkpoints/step-00000012.tmp").mkdir()
    assert _found(path) == []


def test_what_a_checkpoint_says_is_compared(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    _edit_checkpoint(path / "checkpoints/step-00000008", "trainer.json", data_chain="0" * 64)
    _edit_checkpoint(path / "checkpoints/step-00000004", "loader.json", position=64)
    (path / "checkpoints/step-00000012/trainer.json").write_text("{}")
    found = _found(path)
    assert [step for step, _ in found] == [4, 8, 12]
    assert "checkpoints/step-00000004 says epoch 0, position 64" in found[0][1]
    assert "checkpoints/step-00000008 was changed: data_chain" in found[1][1]
    assert "trainer.json has 2 bytes" in found[2][1]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("loader.json", {"batch_size": 9}, "loader.json says batch_size=9, its lineage 4"),
        ("loader.json", {"split": "val"}, "loader.json says split='val', its lineage 'train'"),
        ("loader.json", {"metadata_sha256": "0" * 64}, "loader.json says metadata_sha256="),
        ("loader.json", {"position": None}, "has no position"),
        ("trainer.json", {"tokens": 9}, "says 9 tokens after step 8; it is 512"),
        ("trainer.json", {"data_chain": None}, "has no data_chain, but what was written up to step 12 has"),
    ],
)
def test_nothing_that_a_checkpoint_says_of_the_data_can_be_edited(
    name: str, values: dict[str, Any], message: str, every: Path, tmp_path: Path
) -> None:
    path = _copy(every, tmp_path)
    _edit_checkpoint(path / "checkpoints/step-00000008", name, **values)
    ((step, text),) = _found(path)
    assert step == 8
    assert message in text


def test_a_configuration_of_another_order_than_the_steps_had_is_named(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text.replace("mask_boundary: none", "mask_boundary: after"))
    ((_, text),) = _found(path)
    assert "config.yaml says loader.mask_boundary=after, its lineage none" in text


def test_steps_of_which_nothing_is_claimed_are_not_confirmed(some: Path, tmp_path: Path) -> None:
    path = _copy(some, tmp_path)
    shutil.rmtree(path / "checkpoints")
    edit_rows(path, lambda rows: [*rows[:1], *(_without(row, "data_chain") for row in rows[1:])])
    result = audit(open_run(path), data_path=str(path.parent / "set"))
    assert (result.faults, result.unclaimed) == ([], list(range(4, 13)))
    assert list(report(result))[-1].startswith("not confirmed as a whole, only 3 of 12 steps saw exactly")


def test_a_chain_without_a_beginning_confirms_nothing(some: Path, tmp_path: Path) -> None:
    path = _copy(some, tmp_path)
    shutil.rmtree(path / "checkpoints")
    record = json.loads((path / "lineage.json").read_text())
    record["segments"][0]["data_chain"] = None
    (path / "lineage.json").write_text(json.dumps(record))
    assert "lineage.json says that the run began without one" in _found(path)[0][1]


def _edit_checkpoint(folder: Path, name: str, **values: Any) -> None:
    """Change a small file of a checkpoint and its index."""
    content = json.dumps(json.loads((folder / name).read_text()) | values).encode()
    (folder / name).write_bytes(content)
    index = json.loads((folder / "checkpoint.json").read_text())
    index["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(index))


def test_a_branch_is_audited_from_the_first_step_of_its_parent(some: Path, tmp_path: Path) -> None:
    path = _copy(some, tmp_path)
    data, branch = path.parent / "set", tmp_path / "branch"
    config = tiny_config(data, resume=str(path / "checkpoints/step-00000006"), model__n_layer=1)
    run(config, branch)
    assert faults(branch) == []
    shutil.rmtree(path)
    assert faults(branch) == []
    _change_tokens(data, 1)
    found = faults(branch, data_path=str(data))
    assert [step for step, _ in found] == [0, 1, 12]
    assert found[1][1].startswith(
        "one of the steps 1 to 6 saw other tokens than the data holds now: data_chain"
    )
    assert "the lineage, where a new part of the run began" in found[1][1]


def _growing(folder: Path, shards: int) -> Path:
    """A set of 200 tokens a train shard; more of them are an older set and what was added."""
    tokens = np.random.default_rng(7).integers(0, 257, (5, 200)).tolist()
    splits = {"train": tokens[:shards], "val": tokens[4:]}
    return write_set(folder, splits, preparation={"corpus": "stdlib"})


def test_shards_that_were_accepted_are_part_of_the_chain(tmp_path: Path) -> None:
    data, path = _growing(tmp_path / "set", 2), tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=9), path)
    _growing(data, 4)
    assert faults(path) == []  # shards that were only added change none of its steps
    run(tiny_config(data, trainer__max_steps=20, resume=str(path), resume_accept=["data"]), path)
    assert faults(path) == []
    branch = tmp_path / "branch"
    run(tiny_config(data, trainer__max_steps=22, resume=str(path), run__name="branch"), branch)
    shutil.rmtree(path)  # the branch's own directory says what each of its steps read, and where epochs ended
    assert faults(branch) == []


def test_the_same_tokens_in_another_storage_are_part_of_the_chain(tmp_path: Path) -> None:
    npy = write_text_set(tmp_path / "npy", train_tokens=500)
    hdf5 = write_text_set(tmp_path / "hdf5", train_tokens=500, storage={"format": "hdf5"})
    path = tmp_path / "run"
    loader = {"model__n_layer": 1, "evaluation__interval": 100}
    config = tiny_config(npy, trainer__max_steps=6, **loader)
    config.loader = LOADERS["permutation"]
    run(config, path)
    config = tiny_config(hdf5, resume=str(path), resume_accept=["data"], **loader)
    config.data, config.loader = Hdf5DataConfig(path=str(hdf5)), LOADERS["permutation"]
    run(config, path)
    assert faults(path) == []
    record = open_run(path)
    assert [Path(segment.data_path) for segment in record.segments] == [npy, hdf5]
    moved = npy.rename(tmp_path / "moved")  # one of the two
    assert faults(path, data_path=str(moved)) == []


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (SEQUENTIAL, {"batch_size": 3}),
        (SEQUENTIAL, {"seq_len": 7}),
        (SEQUENTIAL, {"mask_boundary": "target"}),
        (SlidingWindowConfig(stride=5, **SIZES), {"seed": 1}),
        (SlidingWindowConfig(stride=5, **SIZES), {"batch_size": 3}),
        (SlidingWindowConfig(sampling="ordered", stride=5, **SIZES), {"stride": 9}),
        (BlockShuffleConfig(window_tokens=320, **SIZES), {"window_tokens": 160}),
    ],
    ids=str,
)
def test_a_branch_into_another_order_is_audited(
    first: LoaderConfig, change: dict[str, Any], tmp_path: Path
) -> None:
    data, branch = write_text_set(tmp_path / "set", train_tokens=500), tmp_path / "branch"
    config = tiny_config(data, trainer__max_steps=10, model__n_layer=1, evaluation__interval=100)
    config.loader = first
    run(config, tmp_path / "run")
    config.loader = dataclasses.replace(first, **change)
    config.trainer.max_steps, config.resume = 25, str(tmp_path / "run")
    config.resume_accept = [f"loader.{key}" for key in change]
    run(config, branch)
    assert faults(branch) == []
    record = open_run(branch)
    assert [segment.step for segment in record.segments] == [0, 10]
    assert budget_of(record) == 25
    for row in train_rows(branch):
        reader = reader_of(record, row["step"])
        assert reader.place(row["step"])[::2] == (row["epoch"], row["position"])
        assert batch_sha256(reader.batch(row["step"])) == row["batch_sha256"]


def test_a_run_without_anything_to_compare_is_refused(tmp_path: Path) -> None:
    path = _run(tmp_path, trainer__data_chain=False, trainer__log_batch_hash=False)
    with pytest.raises(UserError, match="no row and no checkpoint holds a data_chain or a batch_sha256"):
        faults(path)


def test_batch_hashes_alone_are_compared(tmp_path: Path) -> None:
    path = _run(tmp_path, trainer__data_chain=False)
    assert faults(path) == []
    _change_tokens(path.parent / "set", 1)
    assert [step for step, _ in _found(path)] == [0, 5, 12]


def test_a_set_that_no_batch_can_be_made_of_is_said(every: Path, tmp_path: Path) -> None:
    path = _copy(every, tmp_path)
    shutil.rmtree(path.parent / "set")
    write_text_set(path.parent / "set", train_tokens=50)
    found = _found(path)
    assert len(found) == 1
    assert "it cannot be read as the run read it" in found[0][1]
    shutil.rmtree(path.parent / "set")
    with pytest.raises(UserError, match="does not exist"):
        faults(path, data_path=str(path.parent / "set"))
