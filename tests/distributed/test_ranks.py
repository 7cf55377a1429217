"""Processes side by side: what one says all hear, and a failure of one is that of all, with its cause."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from harness.distributed import meeting, rendezvous
from harness.distributed.ranks import ALONE, Ranks, current, declared, joined
from harness.errors import UserError
from tests.helpers_ranks import Answers, side_by_side

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_without_a_launcher_a_process_is_alone() -> None:
    assert declared({}) == declared({"WORLD_SIZE": "1"}) == declared({"WORLD_SIZE": ""}) == ALONE
    assert ALONE.leads
    assert not ALONE.several


def test_the_launcher_says_who_a_process_is() -> None:
    assert declared(ENVIRONMENT | {"LOCAL_RANK": "0"}) == Ranks(1, 2, 0)
    assert declared(ENVIRONMENT) == Ranks(1, 2, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must be from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be from 1 to 65535"),
        ({"MASTER_PORT": "any"}, "MASTER_PORT=any must be a whole number"),
        ({"RANK": "2"}, r"RANK=2 must be from 0 to 1 \(WORLD_SIZE=2\)"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two must be a whole number"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        declared(ENVIRONMENT | change)


def test_alone_every_collective_is_the_identity() -> None:
    with joined(ALONE, "cpu") as ranks:
        assert (ranks.broadcast("x"), ranks.gather("x"), ranks.any(True), ranks.total([3])) == (
            "x",
            ["x"],
            True,
            [3],
        )
        assert ranks.sum_(torch.ones(2)).tolist() == [1, 1]
        assert ranks.largest_later([4])() == [4]
        assert current() is ALONE


def collectives(ranks: Ranks) -> list[Any]:
    me = ranks.rank
    later = ranks.largest_later([me, -me])
    answers = [
        ranks.broadcast({"of": me}),
        ranks.gather([me, None]),
        ranks.any(me == 1),
        ranks.any(False),
        ranks.total([me, 10]),
        ranks.sum_(torch.tensor([me + 0.5])).tolist(),
        later(),
        current() == ranks,
    ]
    ranks.any(False)
    return answers


def test_what_ranks_do_together_has_the_same_result_on_each() -> None:
    expected = [{"of": 0}, [[0, None], [1, None], [2, None]], True, False, [3, 30], [4.5], [2, 0], True]
    assert side_by_side(3, collectives) == Answers([expected] * 3)


def fails_before_it_joins(patience_s: float) -> None:
    meeting.GRACE_S = 0.5
    with rendezvous.meeting(patience_s) as met:
        met.gather("here")
        if met.ranks.rank == 1:
            raise ValueError("no such device")
        with joined(met.ranks, "cpu", timeout_s=patience_s):
            pass


def test_who_waits_for_a_rank_to_join_ends_soon_after_that_has_failed() -> None:
    """And not when torch's own wait is over."""
    began, patience_s = time.monotonic(), 25.0
    answers = side_by_side(2, fails_before_it_joins, patience_s, joins=False)
    assert time.monotonic() - began < patience_s
    assert answers.errors[1].text == "no such device"
    assert answers.values[0] is answers.errors[0] is None  # ended from beside its main thread


def fails_on_one(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("the disk of rank 1 is on fire")
    ranks.any(False)


def test_a_failure_of_one_is_told_to_all_with_its_cause() -> None:
    mine, other = side_by_side(2, fails_on_one).errors
    assert other.kind == "ValueError"
    assert (mine.kind, mine.rank) == ("PeerFailed", 1)
    assert "rank 1 (pid " in mine.text
    assert "failed: ValueError: the disk of rank 1 is on fire" in mine.text
    assert "fails_on_one" in mine.fields["traceback"]


def dies_on_one(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.sum_(torch.ones(1))


def test_a_rank_that_was_killed_is_named() -> None:
    error, _ = side_by_side(2, dies_on_one).errors
    assert (error.kind, error.rank) == ("PeerFailed", 1)
    assert "left no word: killed" in error.text


def hangs_on_one(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(30)
    ranks.gather("x")


def test_a_rank_that_hangs_does_not_hold_the_others_for_ever() -> None:
    error = side_by_side(2, hangs_on_one, timeout_s=1.0, ends=[0]).errors[0]
    assert (error.kind, error.rank) == ("PeerFailed", 1)
    assert "hanging" in error.text


def test_ranks_that_never_come_are_waited_for_in_vain_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(
            UserError, match=r"rank 1 of 2 did not meet the others at localhost:1 .* within 0\.3 s"
        ),
        joined(declared(), "cpu", timeout_s=0.3),
    ):
        pass
