"""The benchmarks run as real processes with tiny settings; what they measure is not judged here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers_forks import ROOT, forked
from tests.helpers_runs import write_text_set


def bench(script: str, *words: str) -> str:
    process = forked(f"scripts/{script}", *words, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return process.stdout


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.heavy
def test_the_loop_benchmark_trains_both_sides_and_reports_every_pair(tmp_path: Path) -> None:
    words = ["--pairs=3", "--steps=5", "--batch-size=2", "--seq-len=16"]
    printed = bench("bench_loop.py", *words, f"--json={tmp_path / 'loop.json'}", f"--folder={tmp_path}")
    result = read(tmp_path / "loop.json")
    assert "equal bit for bit after 4 blocks" in printed
    assert "1 threads" in printed
    assert len(result["overheads"]) == result["pairs"] == 3
    assert result["interval"] == [min(result["overheads"]), max(result["overheads"])]
    assert result["overhead"] == sorted(result["overheads"])[1]
    assert (result["batch_size"], result["seq_len"], result["log_interval"]) == (2, 16, 10)
    wait = result["wait_ms"]
    assert 0 < wait["median"] <= wait["p99"] <= wait["max"]
    assert result["wait_p99_share"] == pytest.approx(wait["p99"] / result["harness_ms_a_step"])
    assert [file.name for file in tmp_path.iterdir()] == ["loop.json"]


@pytest.mark.heavy
def test_the_training_benchmark_climbs_its_ladder_and_compares_the_loops(tmp_path: Path) -> None:
    words = ["--models", "nano", "--seq-len=16", "--batch-size=4", "--steps=10", "--blocks=2", "--device=cpu"]
    printed = bench("bench_train.py", *words, "--trace", f"--write={tmp_path}")
    result = read(tmp_path / "train.json")
    # TF32 and compiling are for GPUs.
    assert [row["rung"] for row in result["ladder"]] == [
        "eager, float32", "bf16 autocast", "fused attention (SDPA)", "vocabulary padded to a multiple of 128",
        "4 sequences in place of 1",
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and row["mfu"] is None for row in result["ladder"])
    (comparison,) = result["comparisons"]
    assert set(comparison["tokens_per_s"]) == {"harness", "bare"}
    assert all(len(seconds) == 2 for seconds in comparison["pairs"]["bare"].values())
    assert f"{comparison['shares']['bare']['median']:+.2%}" in printed
    assert (tmp_path / "train.md").read_text().splitlines()[-1] in printed
    assert {"torch's choice", "FlashAttention"} == result["attention_ms"].keys()  # cuDNN is for GPUs
    assert len([*(tmp_path / "trace-nano").iterdir()]) == 1


@pytest.mark.heavy
def test_a_part_of_the_training_benchmark_that_fails_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("class GPTConfig: pass\n")  # of a nanoGPT that is none
    words = ["--models", "nano", "--seq-len=8", "--batch-size=4", "--steps=1", "--blocks=1", "--device=cpu"]
    process = forked(
        "scripts/bench_train.py", *words, f"--write={tmp_path}", f"--nanogpt={tmp_path}", cwd=ROOT
    )
    assert process.returncode == 1, process.stderr
    result = read(tmp_path / "train.json")
    assert all(row["tokens_per_s"] > 0 for row in result["ladder"])
    assert set(result["comparisons"][0]["tokens_per_s"]) == {"harness", "bare"}
    assert list(result["failed"]) == ["nano, nanogpt"]
    assert f"nano, nanogpt: {result['failed']['nano, nanogpt']}" in process.stdout
    assert "no attribute 'GPT'" in (tmp_path / "train.md").read_text()


@pytest.mark.heavy
def test_the_hdf5_benchmark_measures_every_chunk_and_filter(tmp_path: Path) -> None:
    words = ["--tokens=70000", "--seconds=0.001", f"--folder={tmp_path}", f"--json={tmp_path / 'hdf5.json'}"]
    printed = bench("bench_hdf5.py", *words)
    result = read(tmp_path / "hdf5.json")
    measured = [(line["compression"], line["chunk_tokens"]) for line in result["lines"]]
    assert measured == [
        *(("none", chunk) for chunk in (512, 1024, 2048, 8192, 65_536, 1 << 20)),
        *((compression, chunk) for compression in ("lzf", "gzip") for chunk in (1024, 8192, 65_536)),
    ]
    kinds = ["warm windows", "warm batch", "cold windows", "cold batch"]
    for line in result["lines"]:
        assert list(line["reading"]) == kinds
        assert all(row[way] > 0 for row in line["reading"].values() for way in ("ours", "h5py"))
        assert f"|{line['chunk_tokens']:,}|{line['compression']}|" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["hdf5.json"]


@pytest.mark.heavy
def test_the_loader_benchmark_measures_every_pair_and_every_peer(tmp_path: Path) -> None:
    printed = bench(
        "bench_loader.py", "--tokens=140000", "--seconds=0.1", f"--json={tmp_path / 'loader.json'}"
    )
    result = read(tmp_path / "loader.json")
    loaders = [
        "sequential",
        "permutation",
        "ordered",
        "uniform",
        "padded_rows",
        "block_shuffle",
        "contrastive_rows",
    ]
    pairs = {f"{storage} {name}" for storage in ("npy", "hdf5", "hdf5 gzip") for name in loaders}
    peers = {"nanoGPT's way", "h5py slices, permutation", "torch DataLoader permutation, 2 workers"}
    assert pairs | peers < set(result["ways"])
    for name, row in result["ways"].items():
        assert name in printed
        assert len(row["tokens_per_s"]) == len(row["ratio"]) >= 3
        assert min(row["tokens_per_s"]) > 0
        assert name not in pairs or min(row["first_batch_ms"] + row["resume_ms"]) > 0
    for goal in result["goals"]:
        assert goal["what"] in printed
        assert goal["measured"]


@pytest.mark.heavy
def test_the_rows_benchmark_measures_every_way_warm_and_cold(tmp_path: Path) -> None:
    words = ["--rows=500", "--batches=20", "--reads=5", f"--folder={tmp_path}"]
    printed = bench("bench_rows.py", *words, f"--json={tmp_path / 'rows.json'}")
    result = read(tmp_path / "rows.json")
    measured = {(row["batch"], row["cold"], row["way"]) for row in result["results"]}
    ways = ("np.memmap", "direct", "parallel", "adaptive")
    assert measured == {(20, cold, way) for cold in (False, True) for way in ways}
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in result["results"])
    assert all(way in printed for way in ways)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.heavy
def test_the_saves_benchmark_measures_every_way_and_what_is_copied(tmp_path: Path) -> None:
    words = ["--rounds=2", "--steps=3", "--n-layer=1", "--n-embd=16", "--batch-size=2", "--seq-len=8"]
    printed = bench("bench_saves.py", *words, f"--json={tmp_path / 'saves.json'}", f"--folder={tmp_path}")
    result = read(tmp_path / "saves.json")
    assert list(result["ways"]) == ["without", "background", "synchronous"]
    for way, row in result["ways"].items():
        assert f"| {way} " in printed
        assert len(row["ratios"]) == 2
        assert row["saves"] == (0 if way == "without" else 2 * 3)
    copied = result["ways"]["background"]["copied_bytes"]
    assert 0.8 * result["checkpoint_bytes"] < copied < result["checkpoint_bytes"]
    assert result["ways"]["synchronous"]["copied_bytes"] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["saves.json"]


@pytest.mark.heavy
def test_the_start_benchmark_times_every_way_to_its_first_step_and_lists_imports(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set")
    words = [f"data.path={data}", "loader.seq_len=16", "loader.batch_size=4", "model.n_embd=32"]
    options = ["--rounds=1", f"--folder={tmp_path}", f"--json={tmp_path / 'start.json'}"]
    printed = bench("bench_start.py", *options, *words, "evaluation.tokens=200")
    result = read(tmp_path / "start.json")
    assert list(result["ways"])[-2:] == ["train.py tracker=none", "train.py, W&B offline"]
    for name, row in result["ways"].items():
        assert name in printed
        assert row["seconds"] > 0
    assert result["ways"]["torch"]["seconds"] > result["ways"]["python"]["seconds"]
    assert result["imports"]["modules"]["harness.training.trainer"] > 0
    assert result["imports"]["compiler"] == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["set", "start.json"]


def script(name: str) -> ModuleType:
    """A script as a module, where a process of its own would add nothing but the import of torch."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")  # its neighbours, as where it is run
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench_loop() -> ModuleType:
    return script("bench_loop")


def test_a_part_of_the_training_benchmark_that_takes_too_long_is_ended_and_keeps_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, pairs = tmp_path / "nano.json", {"bare": {"harness": [1.0, 2.0, 3.0], "bare": [1.0, 2.0]}}
    file.write_text(json.dumps({"tokens": 6, "flops": 2, "peak": 12, "pairs": pairs}))  # as from a part
    monkeypatch.setattr(sys, "argv", ["bench_train.py", "--device=cpu"])
    bench_train = script("bench_train")
    found = bench_train.run_part("nano", [], file, tmp_path, 0.1)
    assert found["failed"] == {"all of it": "it was ended after 0.1 s, its share of --minutes"}
    one = bench_train.figures(found)
    assert one["tokens_per_s"] == {"harness": 3.0, "bare": 4.0}
    assert one["mfu"] == {"harness": 0.5, "bare": 8 / 12}
    assert one["shares"]["bare"]["median"] == 0.0  # of the pairs there are


@pytest.mark.parametrize(
    ("count", "expected"),
    [(10, (2, 9, 1 - 22 / 1024)), (6, (1, 6, 1 - 2 / 64)), (3, (1, 3, 0.75)), (1, (1, 1, 0.0))],
)
def test_the_interval_of_a_median_is_the_binomial_one(
    bench_loop: ModuleType, count: int, expected: tuple[float, float, float]
) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert bench_loop.median_interval(values) == pytest.approx(expected)


def test_the_loop_benchmark_does_not_accept_weights_that_differ(bench_loop: ModuleType) -> None:
    ours = {"w": torch.tensor([1.0]), "b": torch.tensor([0.0])}
    bench_loop.check_equal(ours, {name: value.clone() for name, value in ours.items()})
    with pytest.raises(AssertionError, match="other weights: w"):
        bench_loop.check_equal(ours, ours | {"w": torch.tensor([1.0]).nextafter(torch.tensor([2.0]))})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--pairs=0"], "--pairs=0"),
        (["--model=nanoo"], "nanoo"),
        (["--seq-len=0"], "loader.seq_len=0 must be"),
        (["--batch-size=-1"], "loader.batch_size=-1 must be"),
    ],
)
def test_the_loop_benchmark_refuses_impossible_options_in_words(
    bench_loop: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_loop.py", *words])
    with pytest.raises(SystemExit) as stop:
        bench_loop.main()
    assert stop.value.code == 2
    assert named in capsys.readouterr().err
