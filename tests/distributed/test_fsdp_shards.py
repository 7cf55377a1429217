"""A model in shards learns what a whole one does, and any number of ranks can take up what it saved."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.checkpoints import checkpoint_writer, convert_checkpoint, retention
from harness.checkpoints.checkpoint import FILES, complete_steps, open_checkpoint, step_dir
from harness.checkpoints.restore import cut, restore
from harness.checkpoints.sharded_checkpoint import named_state
from harness.checkpoints.sharded_saving import ShardedSaver
from harness.config import CheckpointConfig, TrainConfig
from harness.config_groups import ModelConfig, OptimizerConfig
from harness.distributed.fsdp import shard
from harness.distributed.ranks import ALONE, Ranks
from harness.errors import RunFailed, UserError
from harness.model import GPT
from harness.optim import make_optimizer
from harness.planning.memory_estimate import estimate
from tests.helpers_checkpoints import parts
from tests.helpers_ranks import side_by_side

SEQ_LEN, ROWS, VOCAB = 10, 4, 257
Learner = tuple[GPT, torch.optim.Optimizer]


def learner(*, sharded: bool = True, seq_len: int = SEQ_LEN, seed: int = 0, n_layer: int = 2) -> Learner:
    torch.manual_seed(seed)
    config = ModelConfig(n_layer=n_layer, n_head=2, n_embd=30, dropout=0.0)  # 30 rows are no multiple of 4
    model = GPT(config, vocab_size=VOCAB, seq_len=seq_len)
    if sharded:
        shard(model, torch.device("cpu"), bf16=False, compiled=False)
    return model, make_optimizer(model, OptimizerConfig(lr=1e-2), "cpu")


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: range, ranks: Ranks) -> None:
    """Each rank its rows of the same batches."""
    share = ROWS // ranks.size
    for step in steps:
        ids = torch.randint(VOCAB, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
        mine = ids[ranks.rank * share : (ranks.rank + 1) * share]
        (model.loss(mine[:, :-1], mine[:, 1:]) * ranks.size / (ROWS * SEQ_LEN)).backward()
        optimizer.step()
        optimizer.zero_grad()


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, without the keys' biases: attention cancels them, and what rounding leaves of
    their gradient AdamW scales up to whole steps."""
    assert ours.keys() == theirs.keys()
    distances = {name: (ours[name] - theirs[name]).abs() for name in ours}
    for name, distance in distances.items():
        if name.endswith("c_attn.bias"):
            distance.chunk(3)[1].zero_()
    return max(distance.max().item() for distance in distances.values())


def whole_state(model: GPT) -> dict[str, Tensor]:
    """A sharded model's weights by name, put together. Every rank calls it."""
    weights = model.state_dict().items()
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in weights}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def saved_parts(model: GPT, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    small = {key: value for key, value in parts(step).items() if key not in ("model", "optimizer")}
    return {"model": model, "optimizer": optimizer, **small}


def trains_and_saves(ranks: Ranks, run: Path) -> tuple[dict[str, Tensor], int]:
    """5 steps, the third saved in the background: the weights, and the bytes that this rank holds."""
    model, optimizer = learner()
    train(model, optimizer, range(3), ranks)
    saver = ShardedSaver(run, CheckpointConfig(), ranks)
    saver.save(saved_parts(model, optimizer, 3))
    train(model, optimizer, range(3, 5), ranks)
    saver.finish()
    trained = whole_state(model)
    before = {name: local(tensor).clone() for name, tensor in named_state(model, optimizer).items()}
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as the guard holds a step back
    train(model, optimizer, range(5, 6), ranks)
    assert all(before[name].equal(local(tensor)) for name, tensor in named_state(model, optimizer).items())
    return trained, sum(tensor.nbytes for tensor in before.values() if tensor.dim())


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Tensor]]:
    """The weights of one process after 3 and after 5 steps."""
    model, optimizer = learner(sharded=False)
    result = []
    for steps in (range(3), range(3, 5)):
        train(model, optimizer, steps, ALONE)
        result.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, whole: list[dict[str, Tensor]]) -> Path:
    """A run of two ranks, with step 3 in shards."""
    path = tmp_path_factory.mktemp("sharded")
    answers = side_by_side(2, trains_and_saves, path)
    assert answers.errors == [None, None]
    for weights, held in answers.values:
        assert furthest(weights, whole[1]) < 1e-5
        assert held == estimate(TrainConfig(), learner(sharded=False)[0], torch.device("cpu"), 2).held
    return path


def test_shards_are_a_checkpoint_whose_files_are_all_named_and_hashed(run: Path) -> None:
    assert complete_steps(run) == [3]
    files = {path.name for path in step_dir(run, 3).iterdir()}
    assert files == {
        "checkpoint.json", "config.yaml", "loader.json", "rng.pt", "shards.json", "trainer.json",
        "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors",
        "optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors",
    }  # fmt: skip
    index = json.loads((step_dir(run, 3) / "checkpoint.json").read_text())
    assert set(index["files"]) == files - {"checkpoint.json"}
    assert (run / "checkpoints" / "latest").read_text() == "step-00000003\n"


def test_one_process_reads_shards_as_it_reads_a_whole_model(
    run: Path, whole: list[dict[str, Tensor]]
) -> None:
    saved = open_checkpoint(step_dir(run, 3))
    assert furthest(saved.weights(), whole[0]) < 1e-5
    model, optimizer = learner(sharded=False, seed=1)
    restore(saved, model, optimizer)
    train(model, optimizer, range(3, 5), ALONE)
    assert furthest(model.state_dict(), whole[1]) < 1e-5


def resumes(ranks: Ranks, run: Path, plain: Path) -> list[Any]:
    """Whether shards give what a whole model does; steps 4 and 5; weights of fewer positions; refusals."""
    saved = open_checkpoint(step_dir(run, 3))
    states = []
    for source in (open_checkpoint(plain), saved):
        model, optimizer = learner(seed=1)
        restore(source, model, optimizer)
        states.append({name: local(tensor).clone() for name, tensor in named_state(model, optimizer).items()})
    one, other = states
    result: list[Any] = [one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)]
    train(model, optimizer, range(3, 5), ranks)
    result.append(whole_state(model))
    model, optimizer = learner(seq_len=6, seed=1)
    restore(saved, model, optimizer)
    result.append(whole_state(model))
    for n_layer in (1, 3):
        try:
            restore(saved, *learner(n_layer=n_layer))
        except UserError as error:
            result.append(str(error))
    return result


def test_another_number_of_ranks_goes_on_from_shards_and_from_a_whole_model(
    run: Path, whole: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    saved = open_checkpoint(step_dir(run, 3))
    both = {"model": saved.weights(), "optimizer": saved.optimizer_state()}
    plain = checkpoint_writer.write(tmp_path, **parts(3) | both)
    answers = side_by_side(4, resumes, run, plain)
    assert answers.errors == [None] * 4
    plain_too, sharded, shorter, fewer, more = answers.values[0]
    assert plain_too
    assert furthest(sharded, whole[1]) < 1e-5
    assert furthest(shorter, cut(saved.weights(), 6)) == 0
    for text, words in (
        (fewer, "model.h.1.attn.c_attn.bias is unexpected"),
        (more, "h.2.ln_1.bias is missing"),
    ):
        assert words in text
        assert "shards.json does not fit this run" in text


def test_shards_are_converted_to_a_whole_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", str(folder)])
    convert_checkpoint.main()
    assert "step-00000003.plain: step 3, model.safetensors and optimizer.pt" in capsys.readouterr().out
    saved, converted = (open_checkpoint(step_dir(folder, 3).with_suffix(end)) for end in ("", ".plain"))
    both = {"model": saved.weights(), "optimizer": saved.optimizer_state()}
    plain = checkpoint_writer.write(tmp_path, **parts(3) | both)
    assert {path.name for path in converted.path.iterdir()} == {*FILES, "checkpoint.json"}
    for name in FILES:
        assert (converted.path / name).read_bytes() == (plain / name).read_bytes(), name
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "file").touch()
    for argument, output, words in (
        (folder, None, "plain exists"),
        (folder, tmp_path / "mine", "mine.tmp exists"),
        (folder, tmp_path / "file" / "new", "cannot be written"),
        (converted.path, None, "is not in shards"),
    ):
        more = [] if output is None else [f"output={output}"]
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", str(argument), *more])
        with pytest.raises(SystemExit):
            convert_checkpoint.main()
        assert words in capsys.readouterr().err
    assert complete_steps(folder) == [3]
    assert (tmp_path / "mine.tmp").is_dir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index["tensors"]["model.ln_f.bias"]["pieces"].pop(), "15 of its 30 elements"),
        (lambda index: index["tensors"]["model.ln_f.bias"].update(shape=[29]), "outside of it"),
        (lambda index: index["tensors"]["model.ln_f.bias"]["pieces"][1].update(offsets=[0]), "overlap"),
        (lambda index: index["tensors"].pop("model.ln_f.bias"), "Missing key"),
        (lambda index: index.pop("param_groups"), "no index of shards"),
    ],
)
def test_shards_that_are_intact_but_not_a_whole_model_are_refused(
    run: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    path = Path(shutil.copytree(step_dir(run, 3), tmp_path / "step-00000003"))
    index = json.loads((path / "shards.json").read_text())
    change(index)
    content = json.dumps(index).encode()
    (path / "shards.json").write_bytes(content)
    entries = json.loads((path / "checkpoint.json").read_text())
    entries["files"]["shards.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "checkpoint.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match=words):
        restore(open_checkpoint(path), *learner(sharded=False))


def swapped_ranks(path: Path) -> None:
    one, other = (path / f"model-0000{rank}-of-00002.safetensors" for rank in range(2))
    one.rename(path / "kept")
    other.rename(one)
    (path / "kept").rename(other)


def of_another_step(path: Path) -> None:
    rewrite(path / "optimizer-00001-of-00002.safetensors", {"rank": "1", "world_size": "2", "step": "2"})


def of_an_older_version(path: Path) -> None:
    rewrite(path / "optimizer-00001-of-00002.safetensors", None)


def with_a_shorter_piece(path: Path) -> None:
    file = path / "model-00001-of-00002.safetensors"
    rewrite(file, {"rank": "1", "world_size": "2", "step": "3"}, {"model.ln_f.bias": torch.zeros(14)})


def rewrite(file: Path, metadata: dict[str, str] | None, changed: dict[str, Tensor] | None = None) -> None:
    save_file(load_file(file) | (changed or {}), file, metadata)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swapped_ranks, r"model-0000[01]\S+ is of rank ([01]), step 3, world_size 2, and .* rank (?!\1)"),
        (of_another_step, r"optimizer-00001\S+ is of rank 1, step 2, world_size 2, and .* step 3, world"),
        (of_an_older_version, r"optimizer-00001\S+ is of an older version, .*scripts/convert_checkpoint\.py"),
        (with_a_shorter_piece, r"model-00001\S+ has model\.ln_f\.bias as \[14\], shards\.json as \[15\]"),
    ],
)
def test_shards_that_were_not_saved_together_are_refused_though_their_index_was_remade(
    run: Path, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    path = Path(shutil.copytree(step_dir(run, 3), tmp_path / "step-00000003"))
    change(path)
    index = json.loads((path / "checkpoint.json").read_text())
    for name in index["files"]:
        content = (path / name).read_bytes()
        index["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "checkpoint.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=words):
        restore(open_checkpoint(path), *learner(sharded=False))


def test_a_shard_that_is_missing_or_damaged_is_named(run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(step_dir(run, 3), tmp_path / "step-00000003"))
    shard_file = path / "optimizer-00001-of-00002.safetensors"
    content = bytearray(shard_file.read_bytes())
    content[-1] ^= 1
    shard_file.write_bytes(content)
    with pytest.raises(UserError, match=r"optimizer-00001-of-00002\.safetensors: SHA-256 is"):
        open_checkpoint(path)
    shard_file.unlink()
    with pytest.raises(UserError, match=r"optimizer-00001-of-00002\.safetensors is missing"):
        open_checkpoint(path)


class Prompt(ShardedSaver):
    """Its part is written, or has failed, before a save returns: as on a fast disk, or a full one."""

    def _begin(self, *arguments: Any) -> None:
        super()._begin(*arguments)
        self._idle.wait()


def fails_at_times(ranks: Ranks, run: Path) -> list[Any]:
    """Saves of which those of step 4, 6 and 7 fail on rank 1; what is kept after each, and the error."""
    model, optimizer = learner()
    said: list[Any] = []
    for background in (True, False):
        config = CheckpointConfig(background=background, max_failures=2, keep_last=1)
        kind = Prompt if ranks.rank == 1 else ShardedSaver
        with contextlib.closing(kind(run / str(background), config, ranks)) as saver:
            for step in (3, 4, 5, 6, 7):
                limit = 1000 if ranks.rank == 1 and step not in (3, 5) else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                saver.save(saved_parts(model, optimizer, step))
                ranks.any(False)  # the rank whose part failed at once goes on as the others do
                saver._agree()
                said.append(complete_steps(run / str(background)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            try:
                saver.save(saved_parts(model, optimizer, 8))
            except RunFailed as error:
                said.append(str(error))
    (run / f"{ranks.rank}").mkdir()
    with contextlib.closing(ShardedSaver(run / f"{ranks.rank}", CheckpointConfig(), ranks)) as saver:
        saver.save(saved_parts(model, optimizer, 9))
        try:
            saver.finish()
        except RunFailed as error:
            said.append(str(error))
    return said


def test_a_save_that_fails_on_one_rank_has_failed_on_all(tmp_path: Path) -> None:
    for background in ("True", "False"):
        (tmp_path / background).mkdir()
    answers = side_by_side(2, fails_at_times, tmp_path)
    assert answers.errors == [None, None]
    assert answers.values[0][:-1] == answers.values[1][:-1]
    assert "the run directory must lie where all hosts see it" in answers.values[0][-1]
    for said in (answers.values[0][:6], answers.values[0][6:-1]):
        assert said[:5] == [[3], [3], [5], [5], [5]]
        assert "2 saves in a row failed" in said[5]
        assert "model-00001-of-00002.safetensors: File too large" in said[5]
    assert not list(tmp_path.glob("*/checkpoints/*.tmp"))


class Killed(ShardedSaver):
    def _give_up_if_told(self) -> None:
        super()._give_up_if_told()
        temporary = self._run_dir / "checkpoints" / "step-00000005.tmp"
        if temporary.is_dir() and len(list(temporary.iterdir())) > 2:
            os.kill(os.getpid(), signal.SIGKILL)


def is_killed(ranks: Ranks, run: Path) -> None:
    """Rank 0 is killed when it has written some of step 5."""
    model, optimizer = learner()
    kind = Killed if ranks.leads else ShardedSaver
    with contextlib.closing(kind(run, CheckpointConfig(), ranks)) as saver:
        for step in (4, 5):
            saver.save(saved_parts(model, optimizer, step))
        saver.finish()


def test_a_step_that_was_being_written_when_a_rank_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    answers = side_by_side(2, is_killed, tmp_path, ends=[1])
    assert answers.errors[1].kind == "PeerFailed"
    assert (tmp_path / "checkpoints" / "step-00000005.tmp").is_dir()
    assert complete_steps(tmp_path) == [4]
    assert (
        open_checkpoint(step_dir(tmp_path, 4)).weights().keys()
        == learner(sharded=False)[0].state_dict().keys()
    )
    retention.clean_leftovers(tmp_path)
    assert not list(tmp_path.glob("checkpoints/*.tmp"))
