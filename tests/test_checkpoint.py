"""A checkpoint is whole or it is refused, by the file and both values."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from harness import checkpoint, checkpoint_writer
from harness.checkpoint import FILES
from harness.errors import UserError
from tests.helpers_runs import run, snapshot, tiny_config, write_text_set


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    run(tiny_config(write_text_set(path / "set"), trainer__max_steps=5), path / "run")
    return path / "run"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run; its newest checkpoint is step 5, the one before it step 4."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def newest(run_dir: Path) -> Path:
    return checkpoint.step_dir(run_dir, 5)


def test_every_file_of_the_contract_is_there(finished: Path) -> None:
    assert {path.name for path in newest(finished).iterdir()} == {*FILES, "checkpoint.json"}
    assert (finished / "checkpoints" / "latest").read_text() == "step-00000005\n"
    assert checkpoint.complete_steps(finished) == [4, 5]


def test_readable_files_hold_what_they_promise(finished: Path) -> None:
    saved = checkpoint.open_checkpoint(newest(finished))
    assert list(saved.loader) == [
        "format_version",
        "position",
        "batch_size",
        "seq_len",
        "split",
        "metadata_sha256",
    ]
    assert {"step", "epoch", "tokens", "best_val_loss", "run_id", "versions"} <= set(saved.trainer)
    assert saved.trainer["tokens"] == 5 * 4 * 16
    assert yaml.safe_load((newest(finished) / "config.yaml").read_text())["loader"]["seq_len"] == 16
    tensors = load_file(newest(finished) / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_tensors_load_without_running_code(finished: Path) -> None:
    for name in ("optimizer.pt", "rng.pt"):
        assert torch.load(newest(finished) / name, weights_only=True)


def test_weights_of_equal_runs_are_equal_files(finished: Path, tmp_path: Path) -> None:
    run(tiny_config(write_text_set(tmp_path / "set"), trainer__max_steps=5), tmp_path / "run")
    ours, theirs = newest(finished) / "model.safetensors", newest(tmp_path / "run") / "model.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (newest(copy) / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing.*Use .*step-00000004"):
        checkpoint.open_checkpoint(newest(copy))


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_with_both_sizes(copy: Path, name: str) -> None:
    path = newest(copy) / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{name} has {size - 1} bytes, checkpoint.json says {size}"):
        checkpoint.open_checkpoint(newest(copy))


@pytest.mark.parametrize("name", [*FILES, "checkpoint.json"])
def test_one_flipped_bit_is_refused(copy: Path, name: str) -> None:
    path = newest(copy) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(newest(copy))):
        checkpoint.open_checkpoint(newest(copy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 9}, "format_version 9, this harness reads 1"),
        ({"step": 6}, "step 5, but checkpoint.json says 6"),
        ({"step": "5"}, "not an index"),
        ({"files": {}}, "expected config.yaml"),
        ({"extra": 1}, "not an index"),
    ],
)
def test_a_foreign_index_is_refused(copy: Path, change: dict[str, object], message: str) -> None:
    path = newest(copy) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        checkpoint.open_checkpoint(newest(copy))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_an_index_that_is_no_json_object_is_refused(copy: Path, content: bytes) -> None:
    (newest(copy) / "checkpoint.json").write_bytes(content)
    with pytest.raises(UserError, match=r"checkpoint\.json"):
        checkpoint.open_checkpoint(newest(copy))


def test_a_step_without_its_index_does_not_count(copy: Path) -> None:
    (newest(copy) / "checkpoint.json").unlink()
    assert checkpoint.find(copy) == checkpoint.step_dir(copy, 4)
    with pytest.raises(UserError, match=r"not a complete checkpoint.*step-00000004"):
        checkpoint.find(newest(copy))


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_a_path_without_checkpoints_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights.pt"
    if kind == "file":
        path.write_bytes(b"foreign")
    if kind == "empty":
        path.mkdir()
    with pytest.raises(UserError, match=r"weights\.pt.*checkpoints/step-N"):
        checkpoint.find(path)


def test_a_saved_step_is_left_as_it_is(copy: Path) -> None:
    before = snapshot(copy)
    saved = checkpoint.open_checkpoint(newest(copy))
    checkpoint_writer.write(
        copy, model={}, optimizer={}, rng={}, loader={}, trainer={"step": saved.step}, config={}
    )
    assert snapshot(copy) == before


def test_leftovers_of_a_killed_writer_are_replaced(copy: Path) -> None:
    leftover = copy / "checkpoints" / "step-00000006.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    model = {"weight": torch.ones(2)}
    trainer = checkpoint.open_checkpoint(newest(copy)).trainer | {"step": 6}
    path = checkpoint_writer.write(
        copy, model=model, optimizer={}, rng={}, loader={}, trainer=trainer, config={}
    )
    assert checkpoint.open_checkpoint(path).step == 6
    assert not leftover.exists()


def test_a_failed_save_leaves_no_checkpoint_and_keeps_the_others(copy: Path) -> None:
    with pytest.raises(TypeError):
        checkpoint_writer.write(
            copy, model={"w": torch.ones(2)}, optimizer={}, rng={}, loader={"bad": object()},
            trainer={"step": 6}, config={},
        )  # fmt: skip
    assert checkpoint.complete_steps(copy) == [4, 5]
    assert checkpoint.open_checkpoint(newest(copy)).step == 5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer.json", b'{"step": 5}'),
        ("trainer.json", b'{"step": true}'),
        ("config.yaml", b"[1]"),
        ("config.yaml", b"a: [b"),
        ("config.yaml", b"\xff\xfe\x00"),
        ("model.safetensors", b"junk"),
        ("optimizer.pt", b"junk"),
        ("rng.pt", b"junk"),
        ("loader.json", b"{}"),
    ],
)
def test_an_intact_but_foreign_file_is_refused_before_anything_is_written(
    copy: Path, finished: Path, name: str, content: bytes
) -> None:
    """Its index agrees with it, so only what it holds can tell."""
    index = newest(copy) / "checkpoint.json"
    value = json.loads(index.read_text())
    (newest(copy) / name).write_bytes(content)
    value["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    index.write_text(json.dumps(value))
    before = snapshot(copy)
    config = tiny_config(finished.parent / "set", trainer__max_steps=9, resume=str(newest(copy)))
    with pytest.raises(UserError, match=name if name != "loader.json" else "loader"):
        run(config, copy)
    assert snapshot(copy) == before
