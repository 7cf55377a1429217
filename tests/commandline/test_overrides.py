"""Words before Hydra: quoting, one budget, and what a resume replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.commandline import overrides


def test_flags_and_overrides_are_told_apart() -> None:
    line = overrides.split(["-m", "a=1", "--config-dir", "x=y", "b=2", "--cfg", "job", "--config-name=other"])
    assert line.flags == ["-m", "--config-dir", "x=y", "--cfg", "job", "--config-name=other"]
    assert line.overrides == ["a=1", "b=2"]
    assert line.multirun
    assert line.flag_value("--config-dir", "-cd") == "x=y"
    assert line.flag_value("--config-name", "-cn") == "other"


@pytest.mark.parametrize(
    "path",
    [
        "/a/lr=0.1,seed=2/run",
        "/with space/x",
        "/it's/x",
        "/tail\\",
        "/back\\'quote",
        "/two\\\\",
        "/plain",
        "/(a)[b]{c}",
    ],
)
def test_hydra_reads_a_quoted_path_back_as_it_was(path: str) -> None:
    from hydra import compose, initialize_config_dir

    from harness.commandline.composition import config_dir, register

    (word,) = overrides.quote_paths([f"data.path={path}"], multirun=False)
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        assert compose("train", overrides=[word]).data.path == path
    assert overrides.value_of([word], "data.path") == path


def test_an_interpolation_in_a_path_stays_one_and_a_replayed_path_is_literal() -> None:
    assert overrides.quote_paths(["data.root=/x/${seed}"], multirun=False) == ["data.root='/x/${seed}'"]
    assert overrides.path_overrides({"data.root": "/x/${y}"}) == {"data.root": "'/x/\\${y}'"}


def test_home_is_expanded_and_what_is_no_path_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = ["hydra.run.dir=~/x", "data.path=null", "resume=auto", "corpus.path=[a,b]", "run.name=~"]
    assert overrides.quote_paths(words, multirun=False) == [
        "hydra.run.dir='/home/me/x'", "data.path=null", "resume=auto", "corpus.path=[a,b]", "run.name='~'",
    ]  # fmt: skip


def test_a_sweep_keeps_its_commas() -> None:
    assert overrides.quote_paths(["data.path=~/a,b"], multirun=True)[0].endswith("/a,b")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.path=größe/set=1,b/c", "data.path='größe/set=1',b/c"),
        ("sweep.name=扫描", "sweep.name='扫描'"),
        ("hydra.sweep.dir=é", "hydra.sweep.dir='é'"),
        ("data.path=choice(ä,b)", "data.path=choice(ä,b)"),
        ("data.path='ä',b", "data.path='ä',b"),
        ("data.path=a,${data.root}/ä", "data.path=a,${data.root}/ä"),
    ],
)
def test_a_sweeps_paths_and_names_are_of_any_script(word: str, expected: str) -> None:
    assert overrides.quote_paths([word], multirun=True) == [expected]


def test_naming_one_budget_unsets_the_other() -> None:
    assert overrides.one_budget(["trainer.max_tokens=5"]) == [
        "trainer.max_tokens=5",
        "trainer.max_steps=null",
    ]
    assert overrides.one_budget(["trainer.max_steps=5"]) == ["trainer.max_steps=5", "trainer.max_tokens=null"]
    both = ["trainer.max_steps=5", "trainer.max_tokens=5"]
    assert overrides.one_budget(both) == both
    assert overrides.one_budget(["seed=1"]) == ["seed=1"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (["seed=1", "optimizer.lr=1"], ["seed=2"], ["optimizer.lr=1", "seed=2"]),
        (["+a=1"], ["+a=2"], ["+a=2"]),
        (
            ["loader=sliding_window", "loader.stride=3", "seed=1"],
            ["loader=sequential"],
            ["seed=1", "loader=sequential"],
        ),
        (
            ["trainer.max_steps=4", "trainer.max_tokens=null"],
            ["trainer.max_tokens=9"],
            ["trainer.max_tokens=9"],
        ),
        (["resume='x'", "run.name=a", "seed=1"], [], ["seed=1"]),
        (["data.path=rel"], ["data.root=new"], ["data.root=new"]),
    ],
)
def test_a_resume_replays_the_runs_words_and_the_new_ones_win(
    old: list[str], new: list[str], expected: list[str]
) -> None:
    assert overrides.replay(old, new, {}) == expected


def test_a_resume_replays_absolute_places() -> None:
    places = overrides.path_overrides({"data.root": "/r", "data.path": None, "corpus.path": ["/a", "/b"]})
    words = overrides.replay(["data.root=rel", "corpus.path=[a,b]", "seed=1"], ["seed=2"], places)
    assert words == ["data.root='/r'", "corpus.path=['/a','/b']", "seed=2"]
    moved = overrides.replay(["data.root=rel"], ["data.root=new"], places)
    assert "data.root='/r'" not in moved


def test_the_run_directory_comes_from_the_words_themselves() -> None:
    assert overrides.run_directory(["run.name=a"]) == Path("runs/a").absolute()
    assert overrides.run_directory(["hydra.run.dir='/x y'", "run.name=a"]) == Path("/x y")
    assert overrides.run_directory(["seed=1", "run.name=null"]) is None
