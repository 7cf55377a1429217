"""Every key of a run has its kind at a resume, and each kind its words."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints.checkpoint import Checkpoint
from harness.config import TrainConfig
from harness.config_checks import validate
from harness.config_groups import (
    GROUPS,
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    OptimizerConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.config_record import flatten, to_dict
from harness.errors import UserError
from harness.resuming import resume, resume_data
from harness.resuming.resume import FATAL, FREE, ORDER, TABLE
from tests.helpers_runs import ROOT, run, snapshot, tiny_config, write_text_set


def test_every_key_of_a_run_is_in_the_table_once() -> None:
    groups = {field.name for field in dataclasses.fields(TrainConfig)} & {*GROUPS, "model", "prepare"}
    defaults = {key for key, _ in flatten(to_dict(TrainConfig()))}
    variants = {
        f"{group}.{field.name}"
        for group, kinds in GROUPS.items()
        for kind in kinds.values()
        for field in dataclasses.fields(kind)
    }
    counts = Counter(itertools.chain.from_iterable(row.keys for row in TABLE))
    assert set(counts) == defaults | variants | {"data", "vocabulary", "world_size"}
    assert set(counts.values()) == {1}
    assert {"loader", "optimizer", "model"} <= groups


def test_a_key_that_nobody_listed_is_refused() -> None:
    assert resume.row_of("trainer.invented").kind == FATAL


def test_the_table_for_the_documentation_names_every_key() -> None:
    lines = resume.table().splitlines()
    assert len(lines) == 2 + len(TABLE)
    assert all(line.count("|") == 5 for line in lines)
    assert "| order | `loader`, `loader.batch_size`" in resume.table()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def saved_with(config: TrainConfig) -> Checkpoint:
    """A checkpoint of a run with these settings, as far as settings are compared."""
    return Checkpoint(Path("runs/one/checkpoints/step-00000004"), 4, {}, {}, to_dict(config), "")


def window_config(**changes: Any) -> TrainConfig:
    loader = SlidingWindowConfig(seq_len=16, batch_size=4)
    for key in [key for key in changes if key.startswith("loader__")]:
        setattr(loader, key.removeprefix("loader__"), changes.pop(key))
    return tiny_config(Path("set"), loader=loader, **changes)


def refused(before: TrainConfig, now: TrainConfig) -> str:
    now.resume = now.resume or "runs/one"
    with pytest.raises(UserError) as error:
        resume.check_settings(saved_with(before), now)
    return str(error.value)


# key -> (the settings that hold it, its value in the checkpoint, another value, the word on the command line)
ORDERED: dict[str, tuple[Any, Any, Any, str]] = {
    "loader.batch_size": (window_config, 4, 8, "loader.batch_size"),
    "loader.seq_len": (window_config, 16, 8, "loader.seq_len"),
    "loader.seed": (window_config, 0, 5, "loader.seed"),
    "loader.stride": (window_config, 16, 8, "loader.stride"),
    "loader.sampling": (window_config, "permutation", "ordered", "loader.sampling"),
    "loader.epoch_seed": (window_config, "mixed", "additive", "loader.epoch_seed"),
    "loader.mask_boundary": (window_config, "none", "after", "loader.mask_boundary"),
    "trainer.dpo_beta": (window_config, 0.1, 0.2, "trainer.dpo_beta"),
    "loader.window_tokens": (
        lambda: tiny_config(Path("set"), loader=BlockShuffleConfig(seq_len=16, batch_size=4)),
        134_217_728, 64, "loader.window_tokens",
    ),
    "loader.name": (window_config, "sliding_window", "block_shuffle", "loader"),
    "seed": (window_config, 0, 5, "seed"),
}  # fmt: skip


def changed(make: Any, key: str, value: Any) -> TrainConfig:
    config: TrainConfig = make()
    if key == "loader.name":
        config.loader = BlockShuffleConfig(seq_len=16, batch_size=4)
        return config
    *groups, name = key.split(".")
    setattr(getattr(config, groups[0]) if groups else config, name, value)
    if key == "loader.seq_len":  # the stride, which follows it, stays: one key changes
        config.loader = SlidingWindowConfig(seq_len=value, batch_size=4, stride=16)
    if key == "seed":
        config.loader.seed = value
    return config


@pytest.mark.parametrize("key", [key for row in TABLE if row.kind == ORDER for key in row.keys])
def test_another_order_is_refused_with_both_values_and_the_words_that_go_on_anyway(key: str) -> None:
    make, before, now, word = ORDERED[key]
    text = refused(make(), changed(make, key, now))
    assert f"  - {key}: checkpoint {before}, now {now}: {resume.row_of(key).meaning}" in text
    assert (
        f"Drop {word} from the command; or go on anyway as a branch, in a run directory of its own: " in text
    )
    assert f"resume_accept=[{word}]" in text
    accepting = changed(make, key, now)
    accepting.resume, accepting.resume_accept = "runs/one", [word]
    changes = resume.check_settings(saved_with(make()), accepting)
    assert changes.accepted == {key: (before, now)}
    assert changes.lines == [f"accepted: {key} {before} -> {now} ({resume.row_of(key).meaning})"]


def test_several_orders_are_accepted_by_all_their_words() -> None:
    now = window_config(loader__batch_size=8, loader__seed=3, resume_accept=["data", "loader.seed"])
    text = refused(window_config(), now)
    assert "- loader.seed" not in text
    assert "Drop loader.batch_size from the command" in text
    assert "resume_accept=[data,loader.batch_size,loader.seed]" in text


FATAL_CHANGES: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("model.n_layer", {"model__n_layer": 3}, 2, 3),
    ("model.n_head", {"model__n_head": 4}, 2, 4),
    ("model.n_embd", {"model__n_embd": 64}, 32, 64),
    ("model.gelu", {"model__gelu": "erf"}, "tanh", "erf"),
    ("optimizer.name", {"optimizer": OptimizerConfig(name="other")}, "adamw", "other"),
    ("init_from", {"init_from": "runs/two"}, None, "runs/two"),
]


@pytest.mark.parametrize(("key", "change", "before", "now"), FATAL_CHANGES)
def test_what_cannot_go_on_is_refused_with_both_values(
    key: str, change: dict[str, Any], before: Any, now: Any
) -> None:
    text = refused(window_config(), window_config(**change, loader__seed=8))
    assert f"  - {key}: checkpoint {before}, now {now}: {resume.row_of(key).meaning}" in text
    assert f"- loader.seed: checkpoint 0, now 8: {resume.row_of('loader.seed').meaning}" in text
    for word in (key.removesuffix(".name"), "loader.seed"):
        assert word in text.splitlines()[-1].partition(" from the command")[0]
    assert "resume_accept" not in text


def test_every_fatal_key_is_tried() -> None:
    fatal = {key for row in TABLE if row.kind == FATAL for key in row.keys}
    assert {key for key, *_ in FATAL_CHANGES} | {"vocabulary"} == fatal
    assert set(ORDERED) == {key for row in TABLE if row.kind == ORDER for key in row.keys}


def test_longer_sequences_cannot_be_accepted() -> None:
    text = refused(window_config(), window_config(loader__seq_len=32, resume_accept=["loader.seq_len"]))
    assert "loader.seq_len: checkpoint 16, now 32: the model knows no position beyond 16" in text
    assert "init_from gives it none" in text


@pytest.mark.parametrize(
    ("loader", "words"),
    [(PaddedRowsConfig, "it reads rows"), (ContrastiveRowsConfig, "it reads pairs of rows")],
)
def test_a_loader_of_another_layout_cannot_be_accepted(loader: type, words: str) -> None:
    now = window_config(resume_accept=["loader"])
    now.loader = loader(seq_len=16, batch_size=4)
    text = refused(window_config(), now)
    assert f"loader.name: checkpoint sliding_window, now {now.loader.name}: {words}" in text
    assert "init_from" in text


def test_shorter_sequences_of_rows_say_how_to_keep_the_set(tmp_path: Path) -> None:
    def config(**sizes: Any) -> TrainConfig:
        loader = PaddedRowsConfig(batch_size=4, **sizes)
        return tiny_config(Path("set"), loader=loader, data__path=None, data__root=str(tmp_path))

    (tmp_path / "npy-rows17").mkdir()
    with pytest.raises(UserError, match=r"npy-rows9: there is no .*\n.*Keep its rows, loader\.row_width=17"):
        resume_data.check_place(saved_with(config(seq_len=16)), config(seq_len=8))
    resume_data.check_place(saved_with(config(seq_len=16)), config(seq_len=8, row_width=17))


def test_a_seed_that_changes_nothing_says_so() -> None:
    plain = tiny_config(Path("set"))
    text = refused(plain, tiny_config(Path("set"), seed=5, loader__seed=5))
    assert (
        "- seed: checkpoint 0, now 5: a change that changes nothing: loader=sequential takes no seed" in text
    )
    alone = tiny_config(Path("set"), seed=5, resume="runs/one")
    (line,) = resume.check_settings(saved_with(plain), alone).lines
    assert line.startswith("changed since the checkpoint: seed 0 -> 5 (seeds the sampled text only")


def test_either_name_accepts_a_seed_that_the_loaders_follows() -> None:
    for word in ("seed", "loader.seed"):
        now = window_config(seed=5, loader__seed=5, resume="runs/one", resume_accept=[word])
        assert resume.check_settings(saved_with(window_config()), now).accepted == {"seed": (0, 5)}


def test_keys_that_come_with_another_loader_are_not_named_and_those_of_both_are() -> None:
    now = tiny_config(Path("set"), loader__batch_size=8)
    text = refused(window_config(), now)
    assert "loader.stride" not in text
    assert "loader.epoch_seed" not in text
    assert "resume_accept=[loader,loader.batch_size]" in text


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        (["loader.batchsize"], ["there is no such change", "did you mean loader.batch_size?"]),
        (["everything"], ["there is no such change; it can be data, loader, loader.batch_size"]),
        (["optimizer.lr"], ["optimizer.lr is free to change", "Drop it"]),
        (["model.n_layer"], ["the weights have another shape: nothing can accept that"]),
        (["data.path"], ["resume_accept=[data] is the word for that"]),
    ],
)
def test_what_cannot_be_accepted_is_refused_by_its_kind(accept: list[str], words: list[str]) -> None:
    config = window_config(resume="runs/one", resume_accept=accept)
    with pytest.raises(UserError) as error:
        validate(config)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert str(error.value).splitlines()[1].strip("- ") == refused(window_config(), config)


def test_a_change_that_is_none_cannot_be_accepted() -> None:
    text = refused(window_config(), window_config(resume_accept=["loader.seed"]))
    assert "resume_accept=[loader.seed] accepts a change that" in text
    assert "loader.seed is 0 in both. Drop it" in text


def test_nothing_is_accepted_where_nothing_is_resumed() -> None:
    with pytest.raises(UserError, match=r"resume_accept=\[loader\.seed\] .* needs resume=RUN"):
        validate(window_config(resume_accept=["loader.seed"]))


# Every free key that a tiny run can change, with another value.
FREE_CHANGES: dict[str, Any] = {
    "trainer.max_steps": 5, "optimizer.lr": 5e-4, "optimizer.weight_decay": 0.0,
    "optimizer.betas": [0.5, 0.6], "schedule.name": "constant", "schedule.warmup_steps": 1,
    "schedule.total_steps": 10, "schedule.min_lr_ratio": 0.5, "trainer.grad_clip": 0.5,
    "trainer.on_nonfinite": "skip",
    "trainer.spike_zscore": None, "model.dropout": 0.0, "model.loss_chunk_tokens": 7,
    "model.activation_checkpointing": True, "trainer.micro_batch_size": 2, "device": "cpu",
    "precision": "float32", "compile": False, "deterministic": True, "parallel": "ddp", "profile": True,
    "evaluation.tokens": 100,
    "trainer.max_minutes": 100.0, "trainer.log_interval": 2, "trainer.log_batch_hash": False,
    "evaluation.interval": 2, "evaluation.sample_tokens": 0, "checkpoint.interval": 2,
    "checkpoint.minutes": 30.0, "checkpoint.keep_last": 2, "checkpoint.keep_every": 2,
    "checkpoint.keep_best": False, "checkpoint.background": False, "checkpoint.max_failures": 2,
    "loader.prefetch": 0, "data.mmap": False, "data.verify": "headers", "trainer.data_chain": False,
}  # fmt: skip
# Of variants that the tiny run has not, paths and digests; they are compared in the same way.
_NOT_TRIED = {
    "trainer.max_tokens", "optimizer.momentum", "schedule.decay_fraction", "evaluation.set",
    "data.expect_sha256", "run.name", "model.name", "resume", "resume_accept", "check", "sweep.name",
    "sweep.keys",
    "world_size",
}  # fmt: skip


def test_every_free_change_is_listed_with_old_and_new_value(data: Path, tmp_path: Path) -> None:
    free = {key for row in TABLE if row.kind == FREE for key in row.keys if not key.startswith("tracker.")}
    assert set(FREE_CHANGES) == free - _NOT_TRIED
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    config = tiny_config(data, resume=str(path))
    before = dict(flatten(to_dict(config)))
    for key, value in FREE_CHANGES.items():
        *groups, name = key.split(".")
        setattr(getattr(config, groups[0]) if groups else config, name, value)
    before["trainer.max_steps"] = 4
    run(config, path)
    log = (path / "train.log").read_text()
    for key, value in FREE_CHANGES.items():
        meaning = "" if key == "trainer.max_steps" else resume.row_of(key).meaning
        said = f" ({meaning})" if meaning else ""
        assert f"changed since the checkpoint: {key} {before[key]} -> {value}{said}\n" in log


def test_a_changed_budget_says_that_the_schedule_follows_it(data: Path) -> None:
    before = tiny_config(data, schedule__total_steps=None)
    now = tiny_config(data, schedule__total_steps=None, trainer__max_steps=20, resume="runs/one")
    (line,) = resume.check_settings(saved_with(before), now).lines
    assert "trainer.max_steps 12 -> 20 (the rest of the lr schedule changes with it" in line


def test_a_refused_resume_changes_nothing_on_disk(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    before = snapshot(tmp_path)
    for change in ({"loader__batch_size": 8}, {"model__n_layer": 3}, {"resume_accept": ["seed"]}):
        with pytest.raises(UserError):
            run(tiny_config(data, resume=str(path), **change), tmp_path / "branch")
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "branch").exists()


def test_the_documentation_holds_the_table() -> None:
    page = (ROOT / "docs" / "resume.md").read_text()
    assert page.endswith("\n\n" + resume.table() + "\n")


def test_a_stride_that_follows_the_length_is_no_change_of_its_own() -> None:
    before = tiny_config(Path("set"), loader=SlidingWindowConfig(seq_len=16, batch_size=4))
    now = tiny_config(Path("set"), loader=SlidingWindowConfig(seq_len=8, batch_size=4))
    text = refused(before, now)
    assert "loader.stride" not in text
    assert text.endswith("resume_accept=[loader.seq_len], or start a new run without resume=.")
    now.resume, now.resume_accept = "runs/one", ["loader.seq_len"]
    assert resume.check_settings(saved_with(before), now).accepted == {"loader.seq_len": (16, 8)}


def test_what_came_with_another_group_is_taken_back_by_words_that_can_be_said() -> None:
    now = tiny_config(Path("set"), loader=BlockShuffleConfig(), resume_accept=["loader"])
    text = refused(window_config(), now)
    assert "Say the checkpoint's loader.seq_len=16 loader.batch_size=4, or start a new run" in text
    now = tiny_config(Path("set"), loader=BlockShuffleConfig(seq_len=16), resume_accept=["loader"])
    text = refused(window_config(), now)
    assert "Say the checkpoint's loader.batch_size=4; or go on anyway as a branch" in text
    assert "resume_accept=[loader,loader.batch_size]" in text
    text = refused(window_config(), tiny_config(Path("set"), loader=BlockShuffleConfig()))
    assert "\nDrop loader from the command, or start a new run" in text
