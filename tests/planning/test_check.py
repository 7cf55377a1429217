"""`check=true`: says what a start would do, refuses what it would refuse, and leaves no trace."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import CheckpointConfig, TrainConfig
from harness.config_groups import ContrastiveRowsConfig, ModelConfig, PaddedRowsConfig, SlidingWindowConfig
from harness.errors import RunFailed, UserError
from harness.model import GPT, parameter_count
from harness.planning.check import check_run
from harness.planning.memory_estimate import estimate
from harness.planning.plan_text import checkpoints_kept, size
from harness.planning.step_cost import shape_of
from harness.storage import open_split
from tests.helpers_cli import TINY, make_root
from tests.helpers_runs import (
    run,
    snapshot,
    tiny_config,
    train_py,
    train_rows,
    weights,
    write_pair_set,
    write_text_set,
)
from tests.helpers_sets import random_rows, write_rows

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def text_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def done(text_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps."""
    path = tmp_path_factory.mktemp("runs") / "done"
    run(tiny_config(text_set, trainer__max_steps=8), path)
    return path


def plan(config: TrainConfig, path: Path, capsys: Captured) -> dict[str, str]:
    """What a check prints, by the titles of its parts."""
    capsys.readouterr()
    check_run(config, path)
    return parts(capsys)


def parts(capsys: Captured) -> dict[str, str]:
    found, name = dict[str, str](), "before"
    for line in capsys.readouterr().out.splitlines():
        name = line[:11].strip() or name
        found[name] = found.get(name, "") + line[11:] + "\n"
    return found


def test_a_check_leaves_no_trace_and_the_run_after_it_is_the_same(
    text_set: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = shutil.copytree(text_set, tmp_path / "data", ignore=shutil.ignore_patterns("verified.json"))
    (tmp_path / "runs").mkdir()
    before = snapshot(tmp_path)
    printed = plan(tiny_config(data), tmp_path / "runs" / "one", capsys)
    assert snapshot(tmp_path) == before
    assert not any((tmp_path / "runs").iterdir())
    assert {"run", "data", "loader", "budget", "model", "memory", "dry step", "time"} <= printed.keys()

    run(tiny_config(data), tmp_path / "runs" / "one")  # after the check, in its process
    torch.rand(7)
    run(tiny_config(data), tmp_path / "runs" / "two")
    assert train_rows(tmp_path / "runs" / "one") == train_rows(tmp_path / "runs" / "two")
    assert weights(tmp_path / "runs" / "one", 12) == weights(tmp_path / "runs" / "two", 12)


def test_the_figures_are_those_of_the_run(
    text_set: Path, done: Path, tmp_path: Path, capsys: Captured
) -> None:
    config = tiny_config(text_set)
    printed = plan(config, tmp_path / "one", capsys)
    manifest = open_split(text_set, "train").manifest
    model = GPT(config.model, vocab_size=257, seq_len=16)
    assert f"metadata_sha256 {manifest.metadata_sha256}\n" in printed["data"]
    assert "train 3,000 tokens of 2 documents; val 400 tokens of 1 document\n" in printed["data"]
    assert "0.07% of the train tokens are boundaries" in printed["data"]
    assert "an epoch: 187 rows, 46 batches; 3 rows, 55 tokens dropped at its end\n" in printed["loader"]
    assert "12 steps, 768 tokens = 0.261 epochs\n3 evaluations of at most 200 tokens\n" in printed["budget"]
    assert "2 steps of warm-up to 0.001, 0.0001 at the last step" in printed["budget"]
    embeddings = (257 + 16) * 32
    assert f"{parameter_count(model):,} parameters" in printed["model"]
    assert f"{parameter_count(model) - embeddings:,} without embeddings; vocabulary 257" in printed["model"]
    assert abs(float(printed["dry step"].split("loss ")[1].split(";")[0]) - math.log(257)) < 0.2

    step = done / "checkpoints" / "step-00000008"
    tensors = sum((step / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    stored = sum(parameter.numel() for parameter in model.parameters())
    memory = shape_of(config, 257, torch.device("cpu")).memory
    assert (memory.weights, memory.optimizer) == (4 * stored, 8 * stored)
    assert abs(tensors / (12 * stored) - 1) < 0.1
    assert f"3 checkpoints of {size(12 * stored)}; at most 3 stay: {size(36 * stored)}" in printed["budget"]


@pytest.mark.parametrize(
    ("stride", "line"),
    [(4, "overlap: an epoch shows a token 4 times"), (48, "1,984 target tokens that no epoch reads")],
)
def test_overlap_and_gaps_of_a_stride_are_said(
    text_set: Path, tmp_path: Path, capsys: Captured, stride: int, line: str
) -> None:
    loader = SlidingWindowConfig(seq_len=16, batch_size=4, stride=stride)
    printed = plan(tiny_config(text_set, loader=loader), tmp_path / "one", capsys)["loader"]
    assert line in printed
    windows = 1 + (3000 - 17) // stride
    assert f"{windows:,} windows, {windows // 4:,} batches; {windows % 4} windows, " in printed


def test_the_padding_of_rows_is_counted(tmp_path: Path, capsys: Captured) -> None:
    rows, mask = random_rows(51, 17, seed=3)
    mask[:, 0] = False  # as prepared rows have it: context only
    shard = (rows, mask)
    path = write_rows(tmp_path / "set", {"train": [shard], "val": [shard]}, preparation={"corpus": "stdlib"})
    loader = PaddedRowsConfig(seq_len=10, batch_size=4)  # of wider rows the first 11 columns
    printed = plan(tiny_config(path, loader=loader), tmp_path / "one", capsys)["loader"]
    assert f"{1 - mask[:, 1:11].mean():.2%} of the places in a batch hold no target" in printed
    assert f"{mask[:, 11:].sum()} target tokens that no epoch reads" in printed


def test_a_run_on_preferences_begins_at_ln_2(tmp_path: Path, capsys: Captured) -> None:
    path = write_pair_set(tmp_path / "set")
    config = tiny_config(
        path, loader=ContrastiveRowsConfig(seq_len=16, batch_size=4), model__dropout=0.0,
        trainer__micro_batch_size=2,
    )  # fmt: skip
    printed = plan(config, tmp_path / "one", capsys)
    assert printed["dry step"].startswith("loss 0.6931; ln 2 = 0.6931")
    assert "reference" in printed["memory"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loader__seq_len": 5000}, "needs 5001 tokens"),
        ({"schedule__warmup_steps": 99, "schedule__total_steps": None}, "more than the schedule's 12 steps"),
        ({"device": "cuda:63"}, "CUDA devices"),
        ({"data__expect_sha256": "0" * 64}, "this is another set"),
        ({"corpus__name": "text", "data__path": "none/such"}, "there is no prepared set at"),
        ({"evaluation__set": "none/such"}, "does not exist"),
    ],
)
def test_what_a_start_refuses_is_refused_in_the_same_words(
    text_set: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = tiny_config(text_set, **changes)
    with pytest.raises(UserError, match=message) as checked:
        check_run(config, tmp_path / "one")
    with pytest.raises(UserError) as started:
        run(config, tmp_path / "one")
    assert str(checked.value) == str(started.value)
    assert not (tmp_path / "one").exists()


def test_weights_of_another_tokenizer_are_refused(done: Path, tmp_path: Path) -> None:
    other = write_text_set(tmp_path / "set", tokenizer={"vocab_size": 300})
    with pytest.raises(UserError, match="its ids would mean other text"):
        check_run(tiny_config(other, init_from=str(done)), tmp_path / "one")


def test_an_occupied_directory_is_refused_after_the_plan(
    text_set: Path, done: Path, capsys: Captured
) -> None:
    before = snapshot(done)
    with pytest.raises(UserError, match="already holds a run"):
        check_run(tiny_config(text_set), done)
    assert {"refused", "budget", "time"} <= parts(capsys).keys()
    assert snapshot(done) == before


def test_a_resume_says_where_it_goes_on_and_what_has_changed(
    text_set: Path, done: Path, tmp_path: Path, capsys: Captured
) -> None:
    before = snapshot(done)
    config = tiny_config(text_set, resume="auto", optimizer__lr=5e-4)
    printed = plan(config, done, capsys)
    assert "goes on after step 8, epoch 0, position 512" in printed["run"]
    assert "optimizer.lr 0.001 -> 0.0005" in printed["run"]
    assert "12 steps, 768 tokens = 0.261 epochs; 4 steps are left" in printed["budget"]
    assert "2 evaluations" in printed["budget"]  # at 10 and 12
    assert "with its weights, loss " in printed["dry step"]

    branch = plan(tiny_config(text_set, resume=str(done)), tmp_path / "branch", capsys)
    assert f"a branch of {done} after step 8" in branch["run"]
    complete = plan(tiny_config(text_set, resume="auto", trainer__max_steps=8), done, capsys)
    assert "already complete at step 8" in complete["run"]
    assert snapshot(done) == before
    assert not (tmp_path / "branch").exists()


def test_a_missing_set_is_named_and_not_prepared(tmp_path: Path, capsys: Captured) -> None:
    printed = plan(tiny_config(tmp_path / "set"), tmp_path / "one", capsys)
    assert "a start would prepare it first" in printed["data"]
    assert (
        f"prepare_data.py data=npy corpus=stdlib tokenizer=byte data.path={tmp_path / 'set'}"
        in printed["data"]
    )
    assert printed["dry step"].startswith("on random tokens, loss ")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("dropout", "again"), [(0.0, False), (0.1, False), (0.0, True)])
def test_the_activations_of_the_estimate_are_those_that_autograd_keeps(
    text_set: Path, dropout: float, again: bool
) -> None:
    config = tiny_config(text_set, loader__seq_len=64, model__dropout=dropout, model__n_layer=6)
    config.model.activation_checkpointing = again
    model = GPT(config.model, vocab_size=257, seq_len=64)
    kept = kept_by_autograd(model)
    memory = estimate(config, model, torch.device("cpu"))
    later = (
        4 * 64 * 16 * 4 * 32 if again else 0
    )  # of one layer, in the backward pass: 16 C a token in float32
    assert abs((kept - memory.logits / 3) / (memory.activations - later) - 1) < 0.05


def test_what_a_chunked_loss_keeps_does_not_grow_with_the_batch(text_set: Path) -> None:
    config = tiny_config(text_set, loader__seq_len=64, model__loss_chunk_tokens=32)
    whole = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32), vocab_size=257, seq_len=64)
    chunked = GPT(dataclasses.replace(whole.config, loss_chunk_tokens=32), vocab_size=257, seq_len=64)
    memory = estimate(config, chunked, torch.device("cpu"))
    without_logits = kept_by_autograd(whole) - 4 * 64 * 257 * 4
    head = 4 * chunked.wte.weight.numel()  # its gradient is kept instead
    assert abs(kept_by_autograd(chunked) - without_logits - head) < 64
    assert memory.logits == 2 * head + 32 * 257 * 8


def kept_by_autograd(model: GPT) -> int:
    """Bytes that the loss of 4 sequences keeps for its backward pass, beside the weights."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros((4, 64), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(tokens, tokens)
    assert loss.isfinite()
    return sum(kept.values())


def test_a_step_that_does_not_fit_says_which_micro_batch_would(text_set: Path, tmp_path: Path) -> None:
    config = tiny_config(  # attention with dropout keeps T x T on a CPU: some ten terabytes
        text_set, loader=SlidingWindowConfig(seq_len=384, batch_size=2560, stride=1), model__n_layer=80,
        model__n_head=32, trainer__max_steps=1, schedule__total_steps=1, schedule__warmup_steps=0,
    )  # fmt: skip
    with pytest.raises(
        RunFailed, match=r"out of memory .* 2560 sequences .* trainer.micro_batch_size=\d+ takes"
    ):
        check_run(config, tmp_path / "one")


@pytest.mark.parametrize("keep_every", [None, 4, 6])
@pytest.mark.parametrize("keep_last", [1, 3, None])
@pytest.mark.parametrize("keep_best", [True, False])
def test_the_checkpoints_that_stay_are_counted(
    keep_last: int | None, keep_every: int | None, keep_best: bool
) -> None:
    for budget in range(1, 40):
        for interval in (1, 2, 3, 5, 50):
            config = TrainConfig()
            config.checkpoint = CheckpointConfig(interval, None, keep_last, keep_every, keep_best)
            saved = sorted({*range(interval, budget + 1, interval), budget})
            older = [] if keep_last is None else saved[:-keep_last]
            gone = [step for step in older if keep_every is None or step % keep_every]
            expected = len(saved) - len(gone) + (keep_best and bool(gone))
            assert checkpoints_kept(config, budget) == expected, (budget, interval)


def test_the_command_line_checks_and_leaves_nothing(tmp_path: Path) -> None:
    root = make_root(tmp_path / "data")
    before = snapshot(tmp_path)
    result = train_py(*TINY, f"data.root={root}", "check=true", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "run        a folder in runs named by the time of its start, a new run\n" in result.stdout
    assert snapshot(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
