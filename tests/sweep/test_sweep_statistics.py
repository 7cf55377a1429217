"""The intervals and marks of a report are those of Student's t."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sweep.statistics import Noise, half_width, is_within_noise, pooled, t_probability, t_quantile

# Two-sided 95 % and 99 % quantiles as printed in tables, such as NIST/SEMATECH e-Handbook 1.3.6.7.2.
TABLE = {
    0.95: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 100: 1.984},
    0.99: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 9: 3.250, 10: 3.169, 30: 2.750, 100: 2.626},
}
values = st.floats(-10, 10).map(lambda number: round(number, 6))
groups = st.lists(st.lists(values, min_size=1, max_size=4), min_size=1, max_size=5)


@pytest.mark.parametrize("probability", TABLE)
def test_quantiles_are_those_of_the_tables(probability: float) -> None:
    ours = {degrees: round(t_quantile(degrees, probability), 3) for degrees in TABLE[probability]}
    assert ours == TABLE[probability]


def test_with_many_degrees_of_freedom_the_quantile_is_that_of_the_normal_distribution() -> None:
    assert t_quantile(20_000) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=2e-4)


@given(t=st.floats(0, 50), degrees=st.integers(1, 60))
def test_the_probability_is_the_integral_of_the_density(t: float, degrees: int) -> None:
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2

    def density_of_angle(angle: float) -> float:  # t = sqrt(degrees) tan(angle), which makes it a power
        return math.exp(log_scale) * math.sqrt(degrees) * math.cos(angle) ** (degrees - 1)

    end, steps = math.atan(t / math.sqrt(degrees)), 400  # Simpson's rule
    weights = [1 if k in (0, steps) else 4 if k % 2 else 2 for k in range(steps + 1)]
    area = sum(w * density_of_angle(end * k / steps) for k, w in enumerate(weights)) * end / steps / 3
    assert t_probability(t, degrees) == pytest.approx(2 * area, abs=1e-7)


def test_an_interval_worked_by_hand() -> None:
    # mean 3, squares 2 + ... = 10 / 4, standard error sqrt(2.5 / 5), quantile 2.776
    assert half_width([1, 2, 3, 4, 5]) == pytest.approx(2.7764451 * math.sqrt(0.5), rel=1e-6)
    assert half_width([2.5]) is None


def test_groups_are_told_apart_by_the_noise_of_all_of_them() -> None:
    # Variances 0.0002 and 0.0008 of two seeds each: pooled 0.0005 with 2 degrees of freedom. The smallest
    # difference that counts is 4.3027 sqrt(0.0005) sqrt(1/2 + 1/2) = 0.09621.
    ours, theirs = [2.00, 2.02], [2.08, 2.12]
    noise = pooled([ours, theirs, [9.0]])
    assert noise is not None
    assert noise == pytest.approx(Noise(math.sqrt(0.0005), 2))
    assert is_within_noise(ours, theirs, noise)
    assert not is_within_noise(ours, [value + 0.01 for value in theirs], noise)
    # One seed alone is known less well: 4.3027 sqrt(0.0005) sqrt(1/2 + 1) = 0.11783
    assert is_within_noise(ours, [2.01 + 0.117], noise)
    assert not is_within_noise(ours, [2.01 + 0.119], noise)


def test_one_seed_everywhere_says_nothing_of_noise() -> None:
    assert pooled([[1.0], [2.0], []]) is None


@given(groups=groups, shift=values, scale=st.floats(0.1, 10))
def test_noise_does_not_depend_on_where_groups_lie_and_scales_with_them(
    groups: list[list[float]], shift: float, scale: float
) -> None:
    noise = pooled(groups)
    moved = pooled(
        [[scale * (value + shift * place) for value in group] for place, group in enumerate(groups)]
    )
    if noise is None:
        assert moved is None
    else:
        assert moved == pytest.approx(Noise(noise.deviation * scale, noise.degrees), rel=1e-6, abs=1e-6)


@given(group=st.lists(values, min_size=2, max_size=6))
def test_of_one_group_the_pooled_deviation_is_its_own(group: list[float]) -> None:
    noise = pooled([group])
    assert noise is not None
    assert noise == pytest.approx(Noise(statistics.stdev(group), len(group) - 1))
    half = half_width(group)
    assert half == pytest.approx(t_quantile(noise.degrees) * noise.deviation / math.sqrt(len(group)))
    assert is_within_noise(group, group, noise)
