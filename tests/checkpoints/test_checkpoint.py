"""A checkpoint is whole or it is refused, by the file and both values."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from harness.checkpoints import checkpoint, checkpoint_writer
from harness.checkpoints.checkpoint import FILES
from harness.checkpoints.safetensors_file import write_safetensors
from harness.errors import UserError
from tests.helpers_checkpoints import parts
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


def flipped(content: bytes, bit: int) -> bytes:
    """`content` with one bit of it flipped."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_anywhere_is_refused(copy: Path) -> None:
    """At 50 places drawn over the bytes of all files, and at one of each file."""
    generator = random.Random(5)
    contents = {path: path.read_bytes() for path in sorted(newest(copy).iterdir())}
    assert {path.name for path in contents} == {*FILES, "checkpoint.json"}
    drawn = generator.choices(list(contents), [len(content) for content in contents.values()], k=50)
    for path in [*contents, *drawn]:
        content = contents[path]
        path.write_bytes(flipped(content, generator.randrange(8 * len(content))))
        with pytest.raises(UserError, match=str(newest(copy))):
            checkpoint.open_checkpoint(newest(copy))
        path.write_bytes(content)
    assert checkpoint.open_checkpoint(newest(copy)).step == 5


def test_no_bit_of_the_index_can_change_and_mean_the_same(tmp_path: Path) -> None:
    """No digest covers the index, so a thousand of its 8,000 bits are tried."""
    path = checkpoint_writer.write(tmp_path, **parts(1, torch.ones(3)))
    index = path / "checkpoint.json"
    content = index.read_bytes()
    for bit in random.Random(6).sample(range(8 * len(content)), 1000):
        index.write_bytes(flipped(content, bit))
        with pytest.raises(UserError):
            checkpoint.open_checkpoint(path)
    index.write_bytes(content)
    assert checkpoint.open_checkpoint(path).step == 1


def test_weights_are_written_as_their_library_writes_them(tmp_path: Path) -> None:
    """Every dtype, no elements, no dimension, views that are not contiguous, names that are not ASCII."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
    tensors = {f"w.{i}.größe": torch.arange(15).reshape(3, 5).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {
        "u": torch.arange(7, dtype=torch.uint8),
        "b": torch.tensor([True, False]),
        "empty": torch.ones(0),
    }
    tensors |= {"scalar": torch.tensor(2.5), "a.half": torch.ones(3).half()}
    with open(tmp_path / "ours", "wb") as file:
        write_safetensors({**tensors, "view": torch.arange(6.0).reshape(2, 3).t()}, file)
    tensors["view"] = torch.arange(6.0).reshape(2, 3).t().contiguous()
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with open(tmp_path / "ours", "wb") as file:
        write_safetensors(tensors, file, {"step": "3"})
    save_file(tensors, tmp_path / "theirs", {"step": "3"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


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
