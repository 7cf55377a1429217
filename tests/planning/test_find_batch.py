"""The batch-size finder: what fits is found with few tries, and a trial that does not fit ends alone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from harness.config import TrainConfig
from harness.config_groups import MuonConfig
from harness.errors import UserError
from harness.planning.batch_trial import limit, trial
from harness.planning.find_batch import FindOptions, find, main, search, vocabulary
from tests.helpers_cli import TINY, make_root
from tests.helpers_forks import CONTEXT, forked
from tests.helpers_runs import snapshot, tiny_config, write_text_set

assert CONTEXT.get_start_method() == "forkserver"  # whose server the trials are forked from


def config_of(set_directory: Path) -> TrainConfig:
    """A sequence takes some 6 MB, the batch of 12 some 75."""
    config = tiny_config(
        set_directory, loader__seq_len=512, loader__batch_size=12, model__n_embd=64, model__dropout=0.0,
        optimizer=MuonConfig(), device="cpu",
    )  # fmt: skip
    config.trainer.micro_batch_size = 1
    return config


@pytest.mark.parametrize("batch", [1, 7, 12, 64, 480])
def test_the_largest_size_that_fits_is_found_with_few_tries(batch: int) -> None:
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    for largest in range(batch + 1):
        tried: list[int] = []

        def fits(size: int, most: int = largest, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= most

        assert search(sizes, fits) == max((size for size in sizes if size <= largest), default=None)
        assert len(tried) == len(set(tried)) <= 2 * batch.bit_length()
        beyond = [size for size in sizes if size > largest]
        assert max(tried) <= max(2 * largest, *beyond[:1], 1)


def test_sizes_are_tried_until_memory_is_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path / "none")
    alone = trial(config, 257, None)
    assert alone is not None
    memory = alone.peak_mb + 45  # for 7 sequences more, not for 11
    found = find(config, FindOptions(memory_gb=memory / 1000))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[0] for line in lines] == ["1", "2", "4", "6", "12"]
    assert lines[-1][1:] == ["does", "not", "fit"]
    peaks = [float(line[2]) for line in lines[:-1]]
    assert peaks == sorted(peaks)
    assert peaks[-1] < memory + 20  # pages that were allocated before the limit and first touched behind it
    rates = {int(size): float(rate.replace(",", "")) for size, rate, *_ in lines[:-1]}
    assert found is not None
    assert rates[found.micro_batch] == max(rates.values())
    assert not any(tmp_path.iterdir())


def test_a_device_has_its_share_of_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path / "none")
    with pytest.raises(UserError, match=r"loader\.batch_size=12 must be a multiple of devices=5"):
        find(config, FindOptions(devices=5))
    with pytest.raises(UserError, match="parallel=fsdp with devices=2"):
        find(dataclasses.replace(config, parallel="fsdp"), FindOptions(devices=2))
    assert find(config, FindOptions(devices=12, memory_gb=0.05)) is None
    assert "not even one sequence at a time fits" in capsys.readouterr().out


def test_what_the_user_can_mend_is_the_users_mistake(tmp_path: Path) -> None:
    config = config_of(tmp_path / "none")
    config.device = "cuda:63"
    with pytest.raises(UserError, match="CUDA devices"):
        find(config, FindOptions())
    config.resume = "runs/one"
    with pytest.raises(UserError, match="drop resume=runs/one"):
        find(config, FindOptions())


@pytest.mark.parametrize("word", ["memory_gb=nan", "memory_gb=inf", "memory_gb=0.0", "devices=0"])
def test_what_cannot_be_tried_is_refused_before_anything_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["find_batch.py", word])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert f"error: {word} must be " in capsys.readouterr().err


def test_a_limit_below_what_the_process_has_leaves_room_for_no_step() -> None:
    with pytest.raises(MemoryError, match="taken before the first step"):
        limit(torch.device("cpu"), 1e5)


def test_the_vocabulary_is_the_sets_or_else_the_tokenizers(tmp_path: Path) -> None:
    config = tiny_config(write_text_set(tmp_path / "set", tokenizer={"vocab_size": 300}))
    assert vocabulary(config) == 300
    assert vocabulary(tiny_config(tmp_path / "none")) == 257


@pytest.mark.heavy
def test_the_command_line_finds_a_size_and_leaves_nothing(tmp_path: Path) -> None:
    root = make_root(tmp_path / "data")
    before = snapshot(tmp_path)
    words = (*TINY, f"data.root={root}", "loader.batch_size=2", "trainer.micro_batch_size=3")
    result = forked("scripts/find_batch.py", *words, "devices=2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("fastest: torchrun --nproc-per-node=2 ")
    assert last.endswith(" trainer.micro_batch_size=1")
    assert last.count("trainer.micro_batch_size") == 1
    assert snapshot(tmp_path) == before
