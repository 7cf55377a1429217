"""Jobs of one sweep on one machine share its devices out."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from harness.sweep.devices import device_for
from tests.sweep.test_job_locks import line, process

HOLDS = """
from harness.sweep.devices import device_for
with device_for("auto", Path(sys.argv[1]), 2) as device:
    say(device)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(("name", "count"), [("cpu", 4), ("cuda:3", 4), ("auto", 1), ("auto", 0)])
def test_what_needs_no_sharing_is_meant_as_it_is(tmp_path: Path, name: str, count: int) -> None:
    with device_for(name, tmp_path, count) as device:
        assert device == name
    assert not list(tmp_path.iterdir())


def test_no_two_jobs_share_a_device_before_all_are_taken(tmp_path: Path) -> None:
    with contextlib.ExitStack() as jobs:
        first = [jobs.enter_context(device_for("auto", tmp_path, 3)) for _ in range(6)]
        assert first == ["cuda:0", "cuda:1", "cuda:2"] * 2
        with device_for("auto", tmp_path / "another", 3) as device:
            assert device == "cuda:0"
    with device_for("auto", tmp_path, 3) as device:
        assert device == "cuda:0"


def test_the_device_with_the_fewest_jobs_comes_first(tmp_path: Path) -> None:
    with contextlib.ExitStack() as later:
        with contextlib.ExitStack() as early:
            for _ in range(2):
                early.enter_context(device_for("auto", tmp_path, 2))
            assert later.enter_context(device_for("auto", tmp_path, 2)) == "cuda:0"
        with device_for("auto", tmp_path, 2) as device:  # cuda:0 has a job, in its second seat
            assert device == "cuda:1"


def test_a_killed_job_leaves_its_device_to_the_others(tmp_path: Path) -> None:
    with process(HOLDS, tmp_path) as one, process(HOLDS, tmp_path) as two:
        assert {line(one), line(two)} == {"cuda:0", "cuda:1"}
        with device_for("auto", tmp_path, 2) as device:
            assert device == "cuda:0"
    with device_for("auto", tmp_path, 2) as device:
        assert device == "cuda:0"


def test_another_launch_counts_the_cards_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with device_for("auto", tmp_path, 2) as first:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
        with device_for("auto", tmp_path, 2) as second:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-1234")
            with device_for("auto", tmp_path, 2) as third:
                assert (first, second, third) == ("cuda:0", "cuda:0", "cuda:1")
