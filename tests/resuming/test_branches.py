"""A change of the data's order that is accepted goes on as a branch, from where that is meaningful."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.auditing.data_chain import batch_sha256
from harness.checkpoints import checkpoint
from harness.config import TrainConfig
from harness.config_checks import validate
from harness.config_groups import (
    BlockShuffleConfig,
    ContrastiveRowsConfig,
    Hdf5DataConfig,
    LoaderConfig,
    PaddedRowsConfig,
    SlidingWindowConfig,
)
from harness.config_record import to_dict
from harness.errors import UserError
from harness.loaders import make_loader
from harness.prepare.convert import convert
from harness.resuming import lineage
from harness.storage import open_split
from tests.helpers_audit import faults
from tests.helpers_runs import (
    run,
    snapshot,
    tiny_config,
    train_rows,
    weights,
    write_pair_set,
    write_row_set,
    write_text_set,
)

# 3000 tokens and a step of 64: step 4 is at token 256 of 2944, or at window 16 of 184 of an epoch.
SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set, and runs of four steps over it in several orders."""
    folder = tmp_path_factory.mktemp("branches")
    data = write_text_set(folder / "set")
    loaders: dict[str, LoaderConfig] = {
        "sequential": LoaderConfig(**SIZES),
        "windows": SlidingWindowConfig(**SIZES),
        "ordered": SlidingWindowConfig(**SIZES, sampling="ordered"),
        "blocks": BlockShuffleConfig(**SIZES, window_tokens=320),
    }
    for name, loader in loaders.items():
        run(tiny_config(data, loader=loader, trainer__max_steps=4, schedule__total_steps=8), folder / name)
    return folder


def resumed(folder: Path, parent: str, loader: LoaderConfig, *accept: str, **changes: Any) -> TrainConfig:
    settings = {"trainer__max_steps": 8, "schedule__total_steps": 8, **changes}
    return tiny_config(
        folder / "set", loader=loader, resume=str(folder / parent), resume_accept=list(accept), **settings
    )


def expected(config: TrainConfig, state: dict[str, Any], steps: int) -> list[str]:
    """The hashes of the batches of a loader that starts at this epoch and position."""
    store = open_split(config.data.path or "", "train")
    loader = make_loader(config.loader, store)
    loader.start_epoch(state["epoch"])
    loader.load_state_dict(loader.state_dict() | {"position": state["position"]})
    hashes = [batch_sha256(loader.next_batch()) for _ in range(steps)]
    loader.close()
    store.close()
    return hashes


# name -> parent, the branch's loader, words, the epoch and position it begins at, and what the log says of it
CASES: dict[str, tuple[str, LoaderConfig, list[str], int, int, str]] = {
    "batch_size in file order": (
        "sequential", LoaderConfig(seq_len=16, batch_size=8), ["loader.batch_size"], 0, 256,
        "data goes on at token 256 of epoch 0\n",
    ),
    "seq_len in file order": (
        "sequential", LoaderConfig(seq_len=8, batch_size=4), ["loader.seq_len"], 0, 256,
        "data goes on at token 256 of epoch 0\n",
    ),
    "mask_boundary": (
        "windows", SlidingWindowConfig(**SIZES, mask_boundary="after"), ["loader.mask_boundary"], 0, 16,
        "the order of the data stays",
    ),
    "batch_size": (
        "windows", SlidingWindowConfig(seq_len=16, batch_size=8), ["loader.batch_size"], 1, 0,
        "data goes on with epoch 1 from its start: 2,688 tokens that epoch 0 had left are skipped\n",
    ),
    "seq_len": (
        "windows", SlidingWindowConfig(seq_len=8, batch_size=4, stride=16), ["loader.seq_len"], 1, 0,
        "2,688 tokens that epoch 0 had left are skipped",
    ),
    "stride": (
        "windows", SlidingWindowConfig(**SIZES, stride=5), ["loader.stride"], 1, 0,
        "2,688 tokens that epoch 0 had left are skipped",
    ),
    "seed": (
        "windows", SlidingWindowConfig(**SIZES, seed=3), ["loader.seed"], 1, 0,
        "2,688 tokens that epoch 0 had left are skipped",
    ),
    "epoch_seed": (
        "windows", SlidingWindowConfig(**SIZES, epoch_seed="additive"), ["loader.epoch_seed"], 1, 0,
        "2,688 tokens that epoch 0 had left are skipped",
    ),
    "sampling": (
        "windows", SlidingWindowConfig(**SIZES, sampling="uniform", stride=None),
        ["loader.sampling", "loader.stride"], 1, 0, "2,688 tokens that epoch 0 had left are skipped",
    ),
    "window_tokens": (
        "blocks", BlockShuffleConfig(**SIZES, window_tokens=640), ["loader.window_tokens"], 1, 0,
        "2,688 tokens that epoch 0 had left are skipped",
    ),
    "from file order to a seeded one": (
        "sequential", SlidingWindowConfig(**SIZES), ["loader"], 1, 0,
        "2,688 tokens that epoch 0 had left are skipped",
    ),
    "from a seeded order to file order": (
        "windows", LoaderConfig(**SIZES), ["loader"], 1, 0, "data goes on with epoch 1 from its start",
    ),
    "from windows in file order to the stream": (
        "ordered", LoaderConfig(**SIZES), ["loader"], 0, 256, "data goes on at token 256 of epoch 0\n",
    ),
    "another stride in file order": (
        "ordered", SlidingWindowConfig(**SIZES, sampling="ordered", stride=24), ["loader.stride"], 0, 11,
        "data goes on at token 264 of epoch 0, where the next window begins: 8 tokens are skipped\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_accepted_change_of_the_order_goes_on_as_a_branch(folder: Path, tmp_path: Path, name: str) -> None:
    parent, loader, accept, epoch, position, said = CASES[name]
    before, branch = snapshot(folder / parent), tmp_path / "branch"
    config = resumed(folder, parent, loader, *accept)
    run(config, branch)

    assert snapshot(folder / parent) == before
    rows = train_rows(branch)
    assert [row["step"] for row in rows] == [5, 6, 7, 8]
    assert {row["epoch"] for row in rows} == {epoch}
    assert [row["batch_sha256"] for row in rows] == expected(
        config, {"epoch": epoch, "position": position}, 4
    )
    size = loader.batch_size * loader.seq_len
    assert [row["tokens"] for row in rows] == [256 + size * k for k in (1, 2, 3, 4)]
    assert said in (branch / "train.log").read_text()

    trainer = checkpoint.open_checkpoint(checkpoint.step_dir(branch, 8)).trainer
    original = checkpoint.open_checkpoint(checkpoint.step_dir(folder / parent, 4)).trainer
    begun_from = {"run_id": original["run_id"], "path": str(folder / parent), "step": 4}
    assert trainer["parent"].items() >= begun_from.items()
    first, second = lineage.read(branch)
    assert (first.step, first.run_id, first.cursor["position"]) == (0, original["run_id"], 0)
    assert (second.step, second.run_id, second.loader) == (4, trainer["run_id"], to_dict(loader))
    assert (second.epoch, second.cursor["position"]) == (epoch, position)
    assert second.cursor.get("epoch", epoch) == epoch
    assert second.cursor["batch_size"] == loader.batch_size
    assert faults(branch) == []  # what the lineage says is what was trained on, from the first step on


def test_preferences_go_on_with_another_beta_and_shorter_rows(tmp_path: Path) -> None:
    data = write_pair_set(tmp_path / "set")
    loader = ContrastiveRowsConfig(**SIZES)
    common: dict[str, Any] = {"schedule__total_steps": 4, "evaluation__interval": 4}
    run(tiny_config(data, loader=loader, trainer__max_steps=2, **common), tmp_path / "run")
    config = tiny_config(
        data, loader=ContrastiveRowsConfig(seq_len=8, batch_size=4, row_width=17), trainer__dpo_beta=0.5,
        resume=str(tmp_path / "run"), resume_accept=["trainer.dpo_beta", "loader.seq_len"],
        trainer__max_steps=4, **common,
    )  # fmt: skip
    run(config, tmp_path / "branch")
    assert [row["step"] for row in train_rows(tmp_path / "branch")] == [3, 4]
    config.resume, config.resume_accept = str(tmp_path / "branch"), []
    config.trainer.max_steps = 5  # against the same reference, whose file still has all positions
    run(config, tmp_path / "branch")
    files = [(tmp_path / name / "reference.safetensors").read_bytes() for name in ("run", "branch")]
    assert files[0] == files[1]


def test_a_branch_that_goes_on_is_the_branch_that_was_never_stopped(folder: Path, tmp_path: Path) -> None:
    loader = LoaderConfig(seq_len=8, batch_size=8)
    accept = ["loader.seq_len", "loader.batch_size"]
    run(resumed(folder, "sequential", loader, *accept), tmp_path / "straight")
    run(resumed(folder, "sequential", loader, *accept, trainer__max_steps=6), tmp_path / "two")
    go_on = resumed(folder, "sequential", loader)
    go_on.resume = str(tmp_path / "two")
    run(go_on, tmp_path / "two")
    assert train_rows(tmp_path / "two") == train_rows(tmp_path / "straight")
    assert weights(tmp_path / "two", 8) == weights(tmp_path / "straight", 8)
    assert [segment.step for segment in lineage.read(tmp_path / "two")] == [0, 4]


def test_a_branch_of_a_branch_knows_every_step(folder: Path, tmp_path: Path) -> None:
    first, second = LoaderConfig(seq_len=16, batch_size=8), SlidingWindowConfig(seq_len=16, batch_size=8)
    run(resumed(folder, "sequential", first, "loader.batch_size", checkpoint__interval=2), tmp_path / "one")
    again = resumed(folder, "sequential", second, "loader")
    again.resume = str(
        checkpoint.step_dir(tmp_path / "one", 6)
    )  # what one trained after it is no part of two
    run(again, tmp_path / "two")
    segments = lineage.read(tmp_path / "two")
    assert [segment.step for segment in segments] == [0, 4, 6]
    assert [Path(segment.path).name for segment in segments] == ["sequential", "one", "two"]
    assert (
        lineage.tokens_at(segments, 8)
        == 4 * 64 + 2 * 128 + 2 * 128
        == train_rows(tmp_path / "two")[-1]["tokens"]
    )
    trainer = checkpoint.open_checkpoint(checkpoint.step_dir(tmp_path / "two", 8)).trainer
    assert lineage.from_record(trainer["lineage"], "trainer.json") == segments
    # Another branch of the first one, over it: the parent's steps alone.
    run(again, tmp_path / "three")
    assert [segment.run_id for segment in lineage.read(tmp_path / "three")][:2] == [
        s.run_id for s in segments[:2]
    ]


def test_tokens_are_counted_by_the_segment_they_were_trained_in() -> None:
    def segment(step: int, batch_size: int) -> lineage.Segment:
        loader = {"batch_size": batch_size, "seq_len": 10}
        return lineage.Segment(
            step=step,
            run_id="",
            path="",
            data_path="",
            metadata_sha256="",
            loader=loader,
            cursor={},
            epoch=0,
            data_chain=None,
        )

    segments = [segment(0, 1), segment(4, 2), segment(6, 5)]
    assert [lineage.tokens_at(segments, step) for step in (0, 3, 4, 5, 6, 8)] == [0, 30, 40, 60, 80, 180]


def test_a_budget_in_tokens_counts_those_the_parent_trained(folder: Path, tmp_path: Path) -> None:
    """256 tokens are trained; 1000 - 256 are 5.8 steps of 128."""
    budget: dict[str, Any] = {
        "trainer__max_steps": None,
        "trainer__max_tokens": 1000,
        "schedule__total_steps": None,
    }
    loader = LoaderConfig(seq_len=16, batch_size=8)
    run(resumed(folder, "sequential", loader, "loader.batch_size", **budget), tmp_path / "branch")
    rows = train_rows(tmp_path / "branch")
    assert [(row["step"], row["tokens"]) for row in rows][-1] == (10, 256 + 6 * 128)
    assert rows[-1]["lr"] == pytest.approx(1e-4)  # the schedule ends with the budget
    assert faults(tmp_path / "branch") == []
    again = resumed(folder, "sequential", loader, **budget)
    again.resume = str(tmp_path / "branch")
    before = snapshot(tmp_path / "branch")
    assert run(again, tmp_path / "branch").step == 10  # complete
    assert snapshot(tmp_path / "branch") == before


def test_shorter_sequences_keep_the_first_positions_and_their_moments(folder: Path, tmp_path: Path) -> None:
    loader = LoaderConfig(seq_len=8, batch_size=4)
    config = resumed(
        folder, "sequential", loader, "loader.seq_len", optimizer__lr=0.0, optimizer__weight_decay=0.0
    )
    config.trainer.max_steps = 5
    run(config, tmp_path / "branch")
    old, new = (
        checkpoint.open_checkpoint(checkpoint.find(p)) for p in (folder / "sequential", tmp_path / "branch")
    )
    assert torch.equal(new.weights()["wpe.weight"], old.weights()["wpe.weight"][:8])
    moments = [c.optimizer_state()["state"] for c in (old, new)]
    (positions,) = [i for i, m in moments[0].items() if m["exp_avg"].shape == (16, 32)]
    assert moments[1][positions]["exp_avg"].shape == moments[1][positions]["exp_avg_sq"].shape == (8, 32)
    assert int(moments[1][positions]["step"]) == 5


def test_a_branch_needs_a_directory_of_its_own(folder: Path) -> None:
    before = snapshot(folder / "sequential")
    for word in (str(folder / "sequential"), "auto"):
        config = resumed(folder, "sequential", LoaderConfig(seq_len=16, batch_size=8), "loader.batch_size")
        config.resume = word
        with pytest.raises(
            UserError, match=r"resume_accept=\[loader.batch_size\] starts a branch.*run\.name=NEW"
        ):
            run(config, folder / "sequential")
    assert snapshot(folder / "sequential") == before


def test_a_branch_without_a_step_to_train_is_refused(folder: Path, tmp_path: Path) -> None:
    config = resumed(folder, "sequential", LoaderConfig(seq_len=16, batch_size=8), "loader.batch_size")
    config.trainer.max_steps = 4
    with pytest.raises(UserError, match=r"at step 4 and the budget is 4 steps: .*trainer\.max_steps=8"):
        run(config, tmp_path / "branch")
    assert not (tmp_path / "branch").exists()


def test_a_branch_that_died_before_its_first_checkpoint_is_not_started_as_another_run(
    folder: Path, tmp_path: Path
) -> None:
    branch = tmp_path / "branch"
    run(resumed(folder, "sequential", LoaderConfig(seq_len=16, batch_size=8), "loader.batch_size"), branch)
    shutil.rmtree(branch / "checkpoints")
    again = resumed(folder, "sequential", LoaderConfig(seq_len=16, batch_size=8))
    again.resume = "auto"
    before = snapshot(branch)
    with pytest.raises(UserError, match=r"holds a branch of .*sequential at step 4 that ended before"):
        run(again, branch)
    assert snapshot(branch) == before


def test_the_best_loss_is_looked_for_anew_where_losses_are_of_other_tokens(
    folder: Path, tmp_path: Path
) -> None:
    def best_after(**changes: Any) -> tuple[float, int]:
        path = Path(shutil.copytree(folder / "sequential", tmp_path / f"run{len(list(tmp_path.iterdir()))}"))
        file = checkpoint.find(path) / "trainer.json"
        trainer = json.loads(file.read_text()) | {"best_val_loss": 0.5, "best_step": 3, "val_loss": 0.5}
        _rewrite(file, json.dumps(trainer))
        (path / "metrics.jsonl").write_text("")
        config = resumed(folder, "sequential", LoaderConfig(**SIZES), **changes)
        config.resume, config.evaluation.interval = str(path), 8
        run(config, path)
        trainer = checkpoint.open_checkpoint(checkpoint.find(path)).trainer
        return trainer["best_val_loss"], trainer["best_step"]

    assert best_after() == (0.5, 3)
    loss, step = best_after(evaluation__tokens=100)
    assert (loss > 1, step) == (True, 8)


def _rewrite(file: Path, text: str) -> None:
    from harness.files import sha256_file

    file.write_text(text)
    index = json.loads((file.parent / "checkpoint.json").read_text())
    index["files"][file.name] = {"bytes": len(text), "sha256": sha256_file(file)}
    (file.parent / "checkpoint.json").write_text(json.dumps(index))


@pytest.mark.parametrize("parent", ["sequential", "windows", "blocks"])
def test_the_same_tokens_in_another_storage_can_be_accepted_by_every_loader(
    folder: Path, tmp_path: Path, parent: str
) -> None:
    path = Path(shutil.copytree(folder / parent, tmp_path / "run"))
    convert(folder / "set", tmp_path / "hdf5", Hdf5DataConfig(), report=lambda line: None)
    loader = checkpoint.open_checkpoint(checkpoint.find(path)).config["loader"]
    kinds = {"sequential": LoaderConfig, "windows": SlidingWindowConfig, "blocks": BlockShuffleConfig}
    config = resumed(folder, parent, kinds[parent](**loader))
    config.data, config.resume = Hdf5DataConfig(path=str(tmp_path / "hdf5")), str(path)
    before = snapshot(path)
    with pytest.raises(
        UserError, match=r"the same tokens in another set .*resume_accept=\[data\] goes on"
    ) as error:
        run(config, path)
    assert "storage.format: then npy, now hdf5" in str(error.value)
    assert snapshot(path) == before

    config.resume_accept = ["data"]
    run(config, path)
    npy = Path(shutil.copytree(folder / parent, tmp_path / "npy"))
    straight = resumed(folder, parent, kinds[parent](**loader))
    straight.resume = str(npy)
    run(straight, npy)
    hashes = [[row["batch_sha256"] for row in train_rows(p)] for p in (path, npy)]
    assert hashes[0] == hashes[1]
    assert weights(path, 8) == weights(npy, 8)
    assert [segment.step for segment in lineage.read(path)] == [0, 4]
    # The same words again, by a scheduler or by hand: nothing is left to accept.
    config.trainer.max_steps = 9
    run(config, path)
    assert faults(path) == []


@pytest.mark.parametrize("kind", [PaddedRowsConfig, ContrastiveRowsConfig])
def test_rows_and_pairs_go_on_in_another_storage_too(tmp_path: Path, kind: type[PaddedRowsConfig]) -> None:
    write = write_pair_set if kind is ContrastiveRowsConfig else write_row_set
    data, path = write(tmp_path / "set"), tmp_path / "run"
    short: dict[str, Any] = {"loader": kind(**SIZES), "evaluation__interval": 9}
    run(tiny_config(data, trainer__max_steps=2, **short), path)
    run(tiny_config(data, trainer__max_steps=4, **short), tmp_path / "straight")
    convert(data, tmp_path / "hdf5", Hdf5DataConfig(), report=lambda line: None)
    config = tiny_config(
        data,
        data=Hdf5DataConfig(path=str(tmp_path / "hdf5")),
        resume=str(path),
        trainer__max_steps=4,
        **short,
    )
    with pytest.raises(UserError, match=r"the same tokens in another set .*resume_accept=\[data\] goes on"):
        run(config, path)
    config.resume_accept = ["data"]
    run(config, path)
    hashes = [[row["batch_sha256"] for row in train_rows(p)] for p in (path, tmp_path / "straight")]
    assert hashes[0] == hashes[1]
    assert weights(path, 4) == weights(tmp_path / "straight", 4)


def test_other_tokens_cannot_be_accepted(folder: Path, tmp_path: Path) -> None:
    other = write_text_set(tmp_path / "set", train_tokens=3002)
    config = resumed(folder, "windows", SlidingWindowConfig(**SIZES), "data", data__path=str(other))
    with pytest.raises(UserError, match=r"other data: a new run can start from these weights, init_from="):
        run(config, folder / "windows")


def test_a_boundary_token_that_the_loss_looks_for_must_be_the_same(tmp_path: Path) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    other = write_text_set(tmp_path / "other", tokenizer={"boundary_token_id": 7})
    for mask, words in (("after", "another boundary token"), ("none", "every batch is the same")):
        shutil.rmtree(path, ignore_errors=True)
        loader = LoaderConfig(**SIZES, mask_boundary=mask)
        run(tiny_config(data, loader=loader, trainer__max_steps=1), path)
        with pytest.raises(UserError, match=f"the same tokens in another set .*{words}"):
            run(tiny_config(other, loader=loader, resume=str(path)), path)


def test_data_that_did_not_change_cannot_be_accepted(folder: Path) -> None:
    config = resumed(folder, "sequential", LoaderConfig(**SIZES), "data")
    with pytest.raises(UserError, match=r"resume_accept=\[data\] accepts a change that is none"):
        run(config, folder / "sequential")


def test_the_warm_up_is_held_against_the_steps_that_a_branch_really_has(folder: Path, tmp_path: Path) -> None:
    # 256 tokens in the parent's 4 steps, and one of 256 more: from scratch 512 tokens would be 2 steps.
    budget: dict[str, Any] = {
        "trainer__max_steps": None, "trainer__max_tokens": 512, "schedule__total_steps": None,
    }  # fmt: skip
    wide = LoaderConfig(seq_len=16, batch_size=16)
    config = resumed(folder, "sequential", wide, "loader.batch_size", schedule__warmup_steps=4, **budget)
    validate(config)
    assert run(config, tmp_path / "branch").step == 5
    config.schedule.warmup_steps = 6
    with pytest.raises(UserError, match=r"warmup_steps=6 is more than the schedule's 5 steps"):
        run(config, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
