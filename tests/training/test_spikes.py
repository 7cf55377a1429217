"""Which losses stand out: far above the ones before, by their median and its absolute deviation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.training.spikes import ENOUGH, WINDOW, SpikeDetector


def noisy(count: int, level: float = 2.0, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [level + 0.05 * generator.gauss(0, 1) for _ in range(count)]


def found(losses: list[float], threshold: float | None = 8.0) -> list[int]:
    detector = SpikeDetector(threshold)
    return [index for index, loss in enumerate(losses) if detector.judge(loss) is not None]


def test_a_jump_is_found_where_it_is_and_only_upward() -> None:
    losses = noisy(300)
    losses[100], losses[200] = 4.0, 0.1
    assert found(losses) == [100]


def test_the_score_counts_robust_standard_deviations_above_the_median() -> None:
    detector = SpikeDetector(8.0, [1.0, 2.0, 3.0] * 20)  # median 2, absolute deviations 1, 0, 1
    spike = detector.judge(2.0 + 10 * 1.4826)
    assert spike is not None
    assert spike.zscore == pytest.approx(10.0)
    assert spike.median == 2.0
    assert detector.judge(2.0 + 7.9 * 1.4826) is None


def test_too_few_losses_say_nothing() -> None:
    assert found([*noisy(ENOUGH - 1), 50.0]) == []
    assert found([*noisy(ENOUGH), 50.0]) == [ENOUGH]


def test_a_falling_loss_has_no_spikes() -> None:
    falling = [5.5 * math.exp(-step / 80) + noise for step, noise in enumerate(noisy(400, level=0.5))]
    assert found(falling) == []


def test_losses_that_are_all_alike_are_no_division_by_zero() -> None:
    assert found([0.6931] * 200) == []
    assert found([*[0.6931] * 64, 0.6931 + 0.07]) == []
    assert found([*[0.6931] * 64, 0.6931 + 0.09]) == [64]
    assert found([*[0.0] * 64, 1.0]) == [64]


def test_a_set_learnt_by_heart_has_no_spikes_of_hundredths() -> None:
    tiny = [abs(value) / 100 for value in noisy(300, level=0.0)]
    assert found([*tiny, 0.05]) == []


def test_a_loss_that_stays_high_becomes_the_new_normal() -> None:
    plateau = [*noisy(200), *noisy(200, level=4.0)]
    spikes = found(plateau)
    assert spikes[0] == 200
    assert spikes == list(range(200, 200 + len(spikes)))
    assert len(spikes) <= WINDOW // 2 + 1


def test_without_a_threshold_nothing_is_a_spike() -> None:
    assert found([*noisy(100), 1e9], threshold=None) == []


@given(st.lists(st.floats(-1e30, 1e30), max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_finite_losses_can_be_judged(losses: list[float]) -> None:
    detector = SpikeDetector(8.0)
    for loss in losses:
        spike = detector.judge(loss)
        assert spike is None or spike.zscore >= 8.0
