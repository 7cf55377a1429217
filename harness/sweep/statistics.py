"""Means over seeds, their 95 % interval, and which differences are no more than the noise of the seeds.

Groups are compared with the standard deviation pooled over all of them, by a two-sided t-test at 95 %. The
pooled one, and not Welch's, because sweeps have two to five seeds a group: Welch's test estimates each
group's noise from its own seeds and is left with one or two degrees of freedom, where almost nothing differs;
pooled, every group's seeds say how much a seed moves a result. It takes for granted that they move all groups
alike. Nothing is corrected for how many groups are compared with the best.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Noise(NamedTuple):
    """The standard deviation of one run in its group, and the degrees of freedom it was estimated with."""

    deviation: float
    degrees: int


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean of independent `values` by Student's t; None of less than two."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def pooled(groups: Iterable[Sequence[float]]) -> Noise | None:
    """The noise within groups, each around its own mean; None where no group has two values."""
    several = [values for values in groups if len(values) > 1]
    degrees = sum(len(values) - 1 for values in several)
    if not degrees:
        return None
    squares = sum((len(values) - 1) * statistics.variance(values) for values in several)
    return Noise(math.sqrt(squares / degrees), degrees)


def is_within_noise(ours: Sequence[float], theirs: Sequence[float], noise: Noise) -> bool:
    """Whether the means of two groups differ by no more than `noise` explains: |t| below its quantile."""
    difference = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    error = noise.deviation * math.sqrt(1 / len(ours) + 1 / len(theirs))
    return difference <= t_quantile(noise.degrees) * error


@functools.cache
def t_quantile(degrees: int, probability: float = 0.95) -> float:
    """The t that |T| stays below with `probability`, of Student's distribution with `degrees` of freedom."""
    assert degrees >= 1
    assert 0 < probability < 1
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """P(|T| < t) for t >= 0: the finite sums of Abramowitz & Stegun (1964), 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    odd, squared = degrees % 2, math.cos(angle) ** 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * squared
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
