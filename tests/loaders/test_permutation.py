"""The seeded order: each number once, at any size, in no memory, as uniform as chance, and never another."""

from __future__ import annotations

import hashlib
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.errors import UserError
from harness.loaders.permutation import Permutation, epoch_key, uniform_draws

Array = np.ndarray[Any, Any]
TERA = 10**12


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 1000, 4095, 4096, 4097, 8192, 8193, 65537, 2**17 - 1])
def test_each_number_comes_exactly_once(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        order = Permutation(size, key).take(0, size)
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(size))


def test_no_number_comes_twice_among_millions_of_a_tera() -> None:
    """A function without that promise would repeat four or five of three million."""
    order = Permutation(TERA, 5)
    starts = np.linspace(0, TERA - 30_000, 100).astype(int).tolist()
    values = np.concatenate([order.take(start, 30_000) for start in starts])
    values.sort()
    assert 0 <= values[0] < values[-1] < TERA
    assert np.count_nonzero(np.diff(values)) == 2_999_999


@pytest.mark.parametrize("size", [1000, 4097, 65537, TERA, 2**62])
def test_any_part_is_the_same_as_in_the_whole(size: int) -> None:
    order = Permutation(size, 9)
    whole = order.take(size - 900, 900)
    for start, count in [(0, 1), (0, 900), (17, 40), (899, 1), (900, 0)]:
        assert np.array_equal(
            Permutation(size, 9).take(size - 900 + start, count), whole[start : start + count]
        )


@pytest.mark.parametrize("size", [65537, TERA, 2**62])
def test_memory_does_not_grow_with_the_size_or_the_place(size: int) -> None:
    Permutation(size, 0).take(0, 32)
    tracemalloc.start()
    try:
        order = Permutation(size, 1)
        for place in (0, size // 2, size - 32):
            order.take(place, 32)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


def test_the_order_is_frozen() -> None:
    """If this fails, checkpoints of sampled loaders no longer continue: raise their format_version."""
    assert Permutation(10, 0).take(0, 10).tolist() == [7, 9, 8, 2, 3, 5, 0, 1, 6, 4]
    assert Permutation(65537, 0).take(0, 4).tolist() == [117, 61063, 44915, 18972]
    far_on = Permutation(TERA, 1).take(TERA // 2, 3)
    assert far_on.tolist() == [388250224571, 348272699979, 417648279738]
    assert uniform_draws(TERA, 1, 5, 3).tolist() == [602864530048, 688143867045, 400068060533]
    digest = hashlib.sha256()
    for size in (1, 2, 3, 1000, 4096, 4097, 65537):
        digest.update(Permutation(size, 12345).take(0, size).astype("<i8").tobytes())
    assert digest.hexdigest() == "e1d23ffe94d2fc16edb1149be9f620b1016da1af614ecb7f1b5184ed8a92c82e"
    assert epoch_key(0, 1, "mixed", "sliding_window") == 1953767532429072627
    assert epoch_key(0, 1, "additive", "sliding_window") == 17689207934642900958


def test_mixed_epochs_never_share_an_order_and_additive_ones_do_by_rule() -> None:
    mixed = {epoch_key(seed, epoch, "mixed", "rows") for seed in range(40) for epoch in range(40)}
    additive = {epoch_key(seed, epoch, "additive", "rows") for seed in range(40) for epoch in range(40)}
    assert (len(mixed), len(additive)) == (1600, 79)
    assert epoch_key(1, 23, "mixed", "rows") != epoch_key(12, 3, "mixed", "rows")
    assert epoch_key(0, 1, "additive", "rows") == epoch_key(1, 0, "additive", "rows")
    assert epoch_key(0, 1, "mixed", "rows") != epoch_key(0, 1, "mixed", "windows")
    assert epoch_key(2**63 - 1, 0, "additive", "rows") < 2**64


@pytest.mark.parametrize("size", [1000, 65537])
def test_neighbouring_keys_share_no_more_places_than_chance(size: int) -> None:
    orders = [Permutation(size, epoch_key(0, epoch)).take(0, size) for epoch in range(20)]
    shared = [int((a == b).sum()) for a, b in itertools.pairwise(orders)]
    assert max(shared) <= 8  # one on average, Poisson


def _first(size: int, key: int) -> Array:
    return Permutation(size, key).take(0, 1)


def _adjacent(size: int, key: int) -> Array:
    """How far the number at the second place lies behind that at the first, from 0 to `size - 2`."""
    a, b = Permutation(size, key).take(0, 2)
    return np.array([(b - a) % size - 1])


def _adjacent_far_on(size: int, key: int) -> Array:
    a, b = Permutation(size, key).take(size // 3, 2)
    return np.array([(b - a) % size - 1])


def _draws(size: int, key: int) -> Array:
    return uniform_draws(size, key, 7, 1)


@pytest.mark.parametrize("size", [3, 10, 1000, 4097, 65537, TERA])
@pytest.mark.parametrize("values_of", [_first, _adjacent, _adjacent_far_on, _draws])
def test_places_are_uniform_over_keys(size: int, values_of: Callable[[int, int], Array]) -> None:
    of = size if values_of in (_first, _draws) else size - 1
    keys = [epoch_key(seed, epoch, "mixed", "test") for seed in range(150) for epoch in range(20)]
    values = np.concatenate([values_of(size, key) for key in keys])
    assert chi_square_accepts(values, of)


@pytest.mark.parametrize("size", [65537, TERA])
def test_neighbours_within_one_order_are_independent(size: int) -> None:
    """The pairs of adjacent places in one order, on a grid of eight by eight."""
    values = Permutation(size, 3).take(0, 60_000)
    eighths = values * 8 // size if size < 2**50 else values // (size // 8)
    assert chi_square_accepts(eighths[:-1:2] * 8 + eighths[1::2], 64)
    draws = uniform_draws(size, 3, 0, 60_000) * 8 // size
    assert chi_square_accepts(draws[:-1:2] * 8 + draws[1::2], 64)


def chi_square_accepts(values: Array, size: int) -> bool:
    """Whether values below `size` look uniform, p > 0.001, in cells of equal size (Wilson and Hilferty)."""
    cells = min(size, 64)
    edges = [size * cell // cells for cell in range(cells + 1)]
    expected = np.diff(edges) / size * len(values)
    counts = np.histogram(values, np.array(edges) - 0.5)[0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = cells - 1
    normal = 3.0902  # of 0.999
    if freedom == 1:
        return bool(statistic < 10.828)
    return bool(statistic < freedom * (1 - 2 / (9 * freedom) + normal * (2 / (9 * freedom)) ** 0.5) ** 3)


def test_the_chi_square_refuses_what_is_not_uniform() -> None:
    assert not chi_square_accepts(np.arange(1200) // 2, 1200)
    assert chi_square_accepts(np.arange(1200), 1200)


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 1001), (1000, 1), (5, -1)])
def test_places_outside_of_the_order_are_refused(start: int, count: int) -> None:
    with pytest.raises(UserError, match="of an order of 1000"):
        Permutation(1000, 0).take(start, count)


def test_a_size_beyond_the_arithmetic_is_refused() -> None:
    with pytest.raises(UserError, match="must be 0 to"):
        Permutation(2**62 + 1, 0)


def test_draws_reach_every_number_and_any_draw_at_once() -> None:
    whole = uniform_draws(7, 3, 0, 1000)
    assert sorted(set(whole.tolist())) == list(range(7))
    assert np.array_equal(uniform_draws(7, 3, 400, 50), whole[400:450])
    assert uniform_draws(7, 3, 2**62, 2).shape == (2,)
