"""A resumed run is the run that was never stopped, bit for bit, and a proof of it that can fail.

A reduced form of scripts/prove_resume.py, which goes through every combination.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import helpers_trials as trials
from tests.helpers_matrix import LOADERS, STORAGES, Sets
from tests.helpers_trials import Course, trial
from tests.helpers_wrongs import WRONGS

# Every loader with npy, and with one of the other storages in turn.
_OTHERS = [storage for storage in STORAGES if storage != "npy"]
PAIRS = [("npy", loader) for loader in LOADERS]
PAIRS += [(_OTHERS[number % len(_OTHERS)], loader) for number, loader in enumerate(LOADERS)]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return Sets(tmp_path_factory.mktemp("sets"), documents=10, shard_tokens=150).make()


@pytest.fixture(scope="module")
def course(sets: Sets, tmp_path_factory: pytest.TempPathFactory) -> Course:
    return Course(sets, "npy", "permutation", tmp_path_factory.mktemp("course"))


@pytest.fixture(scope="module")
def looked_at(sets: Sets, tmp_path_factory: pytest.TempPathFactory) -> Course:
    """Evaluated at every step."""
    folder = tmp_path_factory.mktemp("looked_at")
    return Course(sets, "npy", "padded_rows", folder, trials.LOOKED_AT)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=["-".join(pair) for pair in PAIRS])
def test_resume_is_bit_exact(number: int, sets: Sets, tmp_path: Path) -> None:
    """Each place of a stop has its turn, with npy each way to resume as well."""
    storage, loader = PAIRS[number]
    places, ways = [*trials.PLACES.values()], [*trials.WAYS.values()]
    way = ways[number % len(ways)] if storage == "npy" else trials.one_resume
    course = Course(sets, storage, loader, tmp_path)
    assert trial(course, way, places[number % len(places)](course.epoch)) is None


@pytest.mark.parametrize("name", trials.MOMENTS)
def test_a_stop_at_any_moment_loses_no_row(name: str, looked_at: Course) -> None:
    assert trial(looked_at, trials.MOMENTS[name], looked_at.epoch // 2) is None


@pytest.mark.parametrize("name", trials.FREE)
def test_what_may_change_at_a_resume_does_not_change_what_is_trained(name: str, course: Course) -> None:
    assert trial(course, trials.FREE[name], course.epoch - 1) is None


@pytest.mark.parametrize("name", trials.SETTINGS)
def test_resume_is_bit_exact_with(name: str, sets: Sets, tmp_path: Path) -> None:
    settings, way = trials.SETTINGS[name]
    with trials.own_determinism():
        course = Course(sets, "npy", "padded_rows", tmp_path, settings)
        assert trial(course, way, course.epoch - 1) is None


@pytest.mark.parametrize("name", WRONGS)
def test_a_wrong_resume_is_found_as_different(name: str, course: Course) -> None:
    assert trial(course, trials.wrong_resume(name), course.epoch // 2) is not None
