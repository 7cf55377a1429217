"""trainer.max_minutes: the run stops while there is time left to save it, and always gets on."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import preemption
from harness.training.time_limit import BYTES_PER_S, END_S, TimeLimit
from tests.helpers_runs import rows, run, tiny_config, weights, write_text_set

MINUTES = 2.0


def limit_after(seconds: float, *, save_bytes: int = 0, steps: tuple[float, ...] = (4.0, 1.0)) -> TimeLimit:
    """A limit of two minutes in a process that is `seconds` old and has made `steps`."""
    limit = TimeLimit(MINUTES, save_bytes, clock=lambda: preemption.STARTED + seconds)
    for step in steps:
        limit.stepped(step)
    return limit


@pytest.mark.parametrize("saving", [False, True])
def test_the_slowest_step_the_save_and_the_end_still_fit(saving: bool) -> None:
    kept = 4.0 + 10.0 * (1 + saving) + END_S
    assert not limit_after(119.9 - kept).is_near(10.0, saving=saving)
    near = limit_after(120.0 - kept)
    assert near.is_near(10.0, saving=saving)
    assert near.reason.startswith(f"trainer.max_minutes=2 ({(120 - kept) / 60:.2f} minutes of this process")


def test_a_save_that_was_never_measured_is_taken_from_its_size() -> None:
    size = int(20 * BYTES_PER_S)
    kept = 4.0 + 20.0 + END_S
    assert not limit_after(119.9 - kept, save_bytes=size).is_near(None, saving=False)
    assert limit_after(120.0 - kept, save_bytes=size).is_near(None, saving=False)
    assert not limit_after(120.0 - kept, save_bytes=size).is_near(1.0, saving=False)


def test_a_process_makes_one_step_whatever_the_time() -> None:
    assert not limit_after(3600.0, steps=()).is_near(10.0, saving=False)


def test_ranks_that_agree_a_step_later_stop_a_step_earlier() -> None:
    kept = 2 * 4.0 + 10.0 + END_S
    limits = [
        TimeLimit(MINUTES, 0, clock=lambda: preemption.STARTED + 120.0 - kept, late=late) for late in (0, 1)
    ]
    for limit in limits:
        limit.stepped(4.0)
    assert [limit.is_near(10.0, saving=False) for limit in limits] == [False, True]


def test_without_a_limit_no_time_is_too_late() -> None:
    limit = TimeLimit(None, 0)
    limit.stepped(1e9)
    assert not limit.is_near(1e9, saving=True)


def test_a_run_whose_time_is_over_saves_and_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    settings = {"trainer__max_steps": 4, "evaluation__interval": 2}
    run(tiny_config(data, **settings), tmp_path / "straight")
    monkeypatch.setattr("harness.training.time_limit.STARTED", preemption.STARTED - 3600)
    caplog.set_level("INFO", "harness")
    for step in range(1, 5):  # the evaluation of the last one is left for the next process as well
        limited = tiny_config(data, trainer__max_minutes=60.0, resume="auto", **settings)
        outcome = run(limited, path)
        assert (outcome.step, outcome.stopped) == (step, True)
    assert "stopped by trainer.max_minutes=60 (6" in caplog.text
    assert not run(limited, path).stopped
    assert rows(path) == rows(tmp_path / "straight")
    assert weights(path, 4) == weights(tmp_path / "straight", 4)
