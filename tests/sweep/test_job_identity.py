"""A job is what it computes: the same one under any spelling, another one where the result would differ."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.commandline.composition import config_dir, register, to_dataclass
from harness.config import TrainConfig, make_paths_absolute
from harness.config_groups import GROUPS, SlidingWindowConfig
from harness.config_record import flatten, from_dict, to_dict
from harness.run_files.run_dir import JOB_FILE
from harness.sweep.identity import (
    COUNTED,
    IGNORED,
    find_job,
    identity,
    job_name,
    place_for,
    readable,
)

# Half of what says the budget: the other half must be null.
_BUDGET: dict[str, dict[str, Any]] = {
    "trainer.max_steps": {"max_steps": 999},
    "trainer.max_tokens": {"max_steps": None, "max_tokens": 100_000},
}


# The default configuration, and one for each variant of each group; with their keys.
CONFIGS = [TrainConfig()] + [
    dataclasses.replace(TrainConfig(), **{group: kind()})
    for group, kinds in GROUPS.items()
    for kind in kinds.values()
]
KEYS = [[key for key, _ in flatten(to_dict(config))] for config in CONFIGS]


def holders(key: str) -> list[TrainConfig]:
    """Two of those that have this key; there is one at least."""
    found = [config for config, keys in zip(CONFIGS, KEYS, strict=True) if key in keys]
    assert found
    return [found[0], found[-1]]


def with_key(config: TrainConfig, key: str, change: Callable[[Any], Any]) -> TrainConfig:
    """A copy in which one value is another one."""
    changed = from_dict(to_dict(config), "a test")
    *groups, name = key.split(".")
    target = getattr(changed, groups[0]) if groups else changed
    setattr(target, name, change(getattr(target, name)))
    return changed


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, "more"]
    if isinstance(value, str):
        return value + "x"
    return 7 if value is None else value * 2 + 1


def test_every_key_of_a_run_counts_or_is_ignored() -> None:
    every = set(itertools.chain.from_iterable(KEYS))
    counts = Counter([*IGNORED, *COUNTED])
    assert set(counts) == every
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("key", IGNORED)
def test_what_does_not_change_the_result_is_no_part_of_the_identity(key: str) -> None:
    for config in holders(key):
        assert identity(with_key(config, key, other)) == identity(config)


@pytest.mark.parametrize("key", COUNTED)
def test_what_changes_the_result_makes_another_job(key: str) -> None:
    for config in holders(key):
        changed = with_key(config, key, other)
        if key in _BUDGET:
            vars(changed.trainer).update(_BUDGET[key])
        assert identity(changed) != identity(config)


def composed(*words: str) -> str:
    from hydra import compose, initialize_config_dir

    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return identity(to_dataclass(compose("train", overrides=[*words])))


BASE = ("loader=sliding_window", "loader.stride=64", "trainer.max_steps=20", "seed=1")


@pytest.fixture(scope="module")
def known() -> str:
    return composed(*BASE)


@pytest.mark.parametrize(
    "words",
    [
        # in another order, with defaults, and a model by its numbers
        (*BASE[::-1], "model.dropout=0", "optimizer.lr=0.001", "model=micro", "model.n_layer=4",
         "model.n_head=4", "model.n_embd=128"),
        # 20 steps of 16 x 128 tokens, rounded up; nulls said; what is ignored
        (*BASE[:2], "seed=1", "trainer.max_steps=null", "trainer.max_tokens=40000", "loader.seed=1",
         "schedule.total_steps=20", "schedule.warmup_steps=1", "trainer.micro_batch_size=16",
         "tracker=none", "run.name=x", "device=cpu", "evaluation.interval=3", "data.root=elsewhere",
         "data.path=elsewhere/npy-stream"),
    ],
)  # fmt: skip
def test_the_same_job_said_otherwise_is_the_same_job(known: str, words: tuple[str, ...]) -> None:
    assert composed(*words) == known


@pytest.mark.parametrize("word", ["model=micro", "data=hdf5"])
def test_another_job_is_another_one(known: str, word: str) -> None:
    assert composed(*BASE, word) != known


def test_a_null_is_what_it_means() -> None:
    null, said = SlidingWindowConfig(), SlidingWindowConfig(stride=128)
    uniform = SlidingWindowConfig(sampling="uniform")
    a, b, c = (
        identity(dataclasses.replace(TrainConfig(), loader=loader)) for loader in (null, said, uniform)
    )
    assert a == b != c


def test_a_project_that_was_moved_has_the_jobs_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for place in ("here", "there/deeper"):
        (tmp_path / place).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        config = TrainConfig()
        config.data.path, config.init_from, config.evaluation.set = "data/set", "runs/one", "/elsewhere/set"
        found.append(identity(config))
        make_paths_absolute(config)
        found.append(identity(config))
    assert len(set(found)) == 1


WORDS = st.lists(
    st.builds(
        "{}{}={}".format,
        st.sampled_from(["", "+", "++"]),
        st.sampled_from(["seed", "loader.seed", "loader", "data.path", "corpus.path", "experiment", "a.b.c"]),
        st.text(max_size=80),
    )
    | st.text(max_size=40),
    max_size=12,
)


@settings(max_examples=50)
@given(WORDS, st.randoms(use_true_random=False))
def test_any_words_make_a_name_that_nothing_would_read(words: list[str], order: random.Random) -> None:
    name = job_name("0123456789abcdef" * 4, words)
    assert len(name.encode()) <= 150
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]*-01234567", name)
    assert shlex.quote(name) == name
    unique = {re.sub(r"^[+~]+", "", word).partition("=")[0]: word for word in words}
    shuffled = [*unique.values()]
    order.shuffle(shuffled)
    assert readable(shuffled) == readable([*unique.values()])


def test_hydra_reads_a_directory_by_its_name() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    name = job_name("0" * 64, ["optimizer.lr=1e-3", "x=-1", "loader.stride=64", "corpus.path='/a b/c,d=e'"])
    (word,) = OverridesParser.create().parse_overrides([f"resume=multirun/one/{name}"])
    assert word.value() == f"multirun/one/{name}"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["loader.stride=64", "loader.seq_len=128", "seed=1"], "seq_len-128_stride-64_seed-1"),
        (["seed=1", "loader.seed=2"], "loader.seed-2_seed-1"),
        (["optimizer.betas=[0.9,0.95]", "optimizer.lr=1e-3"], "betas-0.9-0.95_lr-1e-3"),
        (["data.path='/long/way/to/npy-stream'", "experiment=lr"], "path-npy-stream_experiment-lr"),
        (["trainer.max_tokens=1000", "trainer.max_steps=null", "device=cpu"], "max_tokens-1000"),
        (["sweep.name=x", "tracker=none", "tracker.mode=y", "hydra/launcher=joblib"], "defaults"),
        (["~experiment", "model=größe"], "experiment_model-gr-e"),
        ([], "defaults"),
    ],
)  # fmt: skip
def test_a_name_says_what_tells_the_jobs_apart(words: list[str], text: str) -> None:
    assert readable(words) == text


def test_a_very_long_value_leaves_room_for_the_others() -> None:
    name = readable(["experiment=" + "e" * 500, "loader.stride=64", "seed=1"])
    assert name.startswith("experiment-eeee")
    assert name.endswith("_stride-64_seed-1")


ONE, TWIN = "0123456789abcdef" * 4, "01234567" + "f" * 56


def written(path: Path, sha256: str) -> Path:
    path.mkdir(parents=True)
    (path / JOB_FILE).write_text(json.dumps({"identity": sha256, "words": [], "name": "x"}))
    return path


def test_a_job_is_found_by_its_hash_whatever_is_before_it(tmp_path: Path) -> None:
    assert find_job(tmp_path / "absent", ONE) is None
    assert find_job(tmp_path, ONE) is None
    (tmp_path / "a-file-01234567").write_text("")
    (tmp_path / ".locks").mkdir()
    path = written(tmp_path / "seed-1-01234567", ONE)
    assert find_job(tmp_path, ONE) == place_for(tmp_path, ONE, ["other=1"]) == path


@pytest.mark.parametrize("damage", ["", "[]", '{"identity": 3}', '{"identity": "01234567"}', "\udcff"])
def test_a_job_that_was_killed_before_it_said_who_it_is_is_found_by_its_name(
    tmp_path: Path, damage: str
) -> None:
    (tmp_path / "seed-1-01234567").mkdir()
    (tmp_path / "seed-1-01234567" / JOB_FILE).write_bytes(damage.encode(errors="surrogateescape"))
    assert find_job(tmp_path, ONE) == tmp_path / "seed-1-01234567"


def test_two_jobs_whose_hashes_begin_alike_are_two_jobs(tmp_path: Path) -> None:
    words = ["seed=1", "experiment=" + 200 * "x", *(f"{c * 40}=1" for c in "abcd")]
    first = written(place_for(tmp_path, ONE, words), ONE)
    second = place_for(tmp_path, TWIN, words)
    assert second != first
    assert len(second.name) <= 150
    written(second, TWIN)
    assert (find_job(tmp_path, ONE), find_job(tmp_path, TWIN)) == (first, second)
    other_words = place_for(tmp_path / "elsewhere", TWIN, [])
    assert other_words.name == f"defaults-{TWIN[:8]}"
