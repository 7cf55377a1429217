"""A trace of a few steps: it is there, it can be opened, and the run is the one it would have been."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers_runs import run, tiny_config, train_rows, weights, write_text_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


def test_a_profiled_run_is_traced_and_otherwise_the_same_also_where_it_goes_on(
    data: Path, tmp_path: Path
) -> None:
    settings = {"schedule__total_steps": 22, "evaluation__interval": 100, "checkpoint__interval": 100}
    run(tiny_config(data, profile=True, trainer__max_steps=11, **settings), tmp_path / "traced")
    again = tiny_config(
        data, profile=True, trainer__max_steps=22, resume=str(tmp_path / "traced"), **settings
    )
    run(again, tmp_path / "traced")
    run(tiny_config(data, trainer__max_steps=22, **settings), tmp_path / "plain")
    assert train_rows(tmp_path / "traced") == train_rows(tmp_path / "plain")
    assert weights(tmp_path / "traced", 22) == weights(tmp_path / "plain", 22)
    traces = sorted((tmp_path / "traced" / "profile").iterdir())
    assert [trace.name for trace in traces] == [
        "steps-00000008-00000010.json.gz",
        "steps-00000019-00000021.json.gz",
    ]
    events = json.loads(gzip.decompress(traces[1].read_bytes()))["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert {f"ProfilerStep#{step}" for step in range(19, 22)} == {n for n in names if "ProfilerStep" in n}
    assert "aten::addmm" in names
    said = (tmp_path / "traced" / "train.log").read_text()
    assert traces[0].name in said
    assert "aten::addmm" in said
    assert not (tmp_path / "plain" / "profile").exists()


def test_a_run_that_ends_before_its_trace_says_so_and_leaves_the_profiler_to_the_next(
    data: Path, tmp_path: Path
) -> None:
    run(tiny_config(data, profile=True, trainer__max_steps=9), tmp_path / "short")
    assert not (tmp_path / "short" / "profile").exists()
    assert "before steps 8 to 10 were made" in (tmp_path / "short" / "train.log").read_text()
    run(tiny_config(data, profile=True, trainer__max_steps=10), tmp_path / "next")
    assert len(list((tmp_path / "next" / "profile").iterdir())) == 1


def test_a_trace_that_cannot_be_written_ends_no_run(data: Path, tmp_path: Path) -> None:
    settings = {"schedule__total_steps": 15, "evaluation__interval": 100, "checkpoint__interval": 100}
    run(tiny_config(data, trainer__max_steps=2, **settings), tmp_path / "run")
    (tmp_path / "run" / "profile").write_text("a file where the folder would be")
    run(
        tiny_config(data, profile=True, trainer__max_steps=15, resume=str(tmp_path / "run"), **settings),
        tmp_path / "run",
    )
    assert len(train_rows(tmp_path / "run")) == 15
    said = (tmp_path / "run" / "train.log").read_text()
    assert "steps-00000010-00000012.json.gz could not be written" in said
