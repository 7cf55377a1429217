"""The grid of a sweep is Hydra's own, and what cannot run in it is refused before anything does."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode

from harness.commandline import cli, overrides
from harness.commandline.composition import config_dir, register
from harness.commandline.overrides import CommandLine, split
from harness.errors import UserError
from harness.sweep.grid import Grid, grid_of, named, trains_here
from harness.sweep.impossible import Failure, report
from harness.sweep.sweep_words import check_name, check_words

EXPERIMENT = """\
# @package _global_
defaults:
  - override /loader: sliding_window
hydra:
  sweeper:
    params:
      loader.stride: 16,32
      seed: range(2)
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's own configuration, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "experiment/strides.yaml": EXPERIMENT,
        "experiment/named.yaml": EXPERIMENT + "sweep:\n  name: mine\n",
        "experiment/deep/one.yaml": "# @package _global_\nseed: 7\n",
        "loader/slow.yaml": "defaults:\n  - sequential\nprefetch: 0\n",
        "tiny.yaml": "defaults:\n  - train\n  - _self_\nmodel:\n  n_layer: 1\n",
    }.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "own"


def line_of(*words: str) -> CommandLine:
    line = overrides.split(["-m", *words])
    line.overrides = overrides.one_budget(overrides.quote_paths(line.overrides, multirun=True))
    return line


def grid(*words: str) -> Grid:
    found = grid_of(line_of(*words))
    assert found is not None
    return found


class _Recording(Launcher):
    """Keeps what a sweeper gives it to launch."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, list[str]]] = []

    def setup(self, **_: Any) -> None: ...

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.jobs += [(initial_job_idx + i, list(words)) for i, words in enumerate(job_overrides)]
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=None) for _ in job_overrides]


def launched_by_hydra(line: CommandLine, tmp_path: Path) -> list[tuple[int, list[str]]]:
    """The jobs that Hydra's sweeper itself launches for a command line without flags."""
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3", job_name="train"):
        loaded = GlobalHydra.instance().hydra
        assert loaded is not None
        words = [*line.overrides, f"hydra.sweep.dir={tmp_path / 'hydra'}"]
        config = loaded.config_loader.load_configuration("train", words, RunMode.MULTIRUN)
        sweeper: Any = Plugins.instance()._instantiate(config.hydra.sweeper)
        assert type(sweeper).__name__ == "BasicSweeper"  # Hydra loads its plugins as modules of their own
        sweeper.config, sweeper.launcher = config, _Recording()
        sweeper.hydra_context = HydraContext(config_loader=loaded.config_loader, callbacks=Callbacks())
        sweeper.sweep(list(config.hydra.overrides.task))
        return list(sweeper.launcher.jobs)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["seed=0,1", "loader.seq_len=16,32", "tracker=none"], 4),
        (["loader.seq_len=range(16,33,16)", "hydra.sweeper.max_batch_size=1"], 2),
        (["seed=choice(3,1)", "optimizer.lr=1e-3"], 2),
        (["optimizer.betas=[0.9,0.95],[0.8,0.9]", "data.path='a,b'"], 2),
        (["loader=glob(s*)"], 2),
        (["schedule=wsd", "seed=5", "seed=sort(2,1)", "seed=7"], 1),
        (["experiment=strides", "seed=7", "hydra.searchpath=[file://own]"], 2),
        (["++seed=1", "corpus=text", r"corpus.path=a\,b,c"], 2),
        (["trainer.max_tokens=1_000,2000"], 2),
        (["seed=tag(x,choice(1,2))", "model.dropout=0.0"], 2),
        (["optimizer.lr=range(0.1,0.25,0.1)"], 2),
        (["seed=4"], 1),
    ],
)
def test_the_jobs_are_those_of_hydras_sweeper_in_its_order(words: list[str], count: int, conf: Path) -> None:
    ours = grid(*words)
    assert [(job.index, job.words) for job in ours.jobs] == launched_by_hydra(ours.line, conf.parent)
    assert len(ours.jobs) == count


def test_each_job_has_the_values_of_its_words(conf: Path) -> None:
    jobs = grid("--config-dir=own", "experiment=strides", "seed=7", "optimizer.lr=0.1", "tracker=none").jobs
    assert [(j.config.loader.stride, j.config.seed) for j in jobs] == [(16, 7), (32, 7)]  # type: ignore[attr-defined]
    assert {j.config.optimizer.lr for j in jobs} == {0.1}
    assert len({j.sha256 for j in jobs}) == 2
    other = grid("--config-dir", "own", "--config-name", "tiny", "loader=slow,sliding_window").jobs
    assert [(j.config.model.n_layer, j.config.loader.prefetch) for j in other] == [(1, 0), (1, 2)]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["seed=0", "loader.seq_len=16,32", "seed=0,1"], "seed-seq_len"),
        (["experiment=strides"], "strides"),
        (["experiment=strides", "loader.seq_len=16,32", "seed=3"], "strides"),
        (["experiment=deep/one", "seed=1,2"], "deep-one"),
        (["experiment=named"], "mine"),
        (["experiment=named", "sweep.name=yours"], "yours"),
        (["experiment=strides,named", "model=nano,micro"], "experiment-model"),
        (["seed=1"], "sweep"),
    ],
)
def test_a_sweep_is_named_by_what_stays_when_it_grows(words: list[str], name: str, conf: Path) -> None:
    _, folder = named(line_of("--config-dir=own", *words))
    assert folder == conf.parent / "multirun" / name


def test_jobs_that_are_one_are_trained_once_and_said(conf: Path) -> None:
    found = grid("trainer.max_steps=10,20", "seed=0,00", "loader.batch_size=8")
    assert [job.index for job in found.jobs] == [0, 1, 2, 3]
    assert [job.index for job in found.unique] == [0, 2]
    assert found.notes == [
        "job 1 is job 0 again and is not trained twice: trainer.max_steps=10 seed=00",
        "job 3 is job 2 again and is not trained twice: trainer.max_steps=20 seed=00",
    ]
    assert grid("seed=0", "seed=1").notes == [
        "seed is given twice, 0 and 1: the last counts. To sweep over both: seed=0,1"
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["seed=0,x", "loader.seq_len=0,16"],
            """\
3 of the sweep's 4 jobs cannot be composed, so none is started:
  loader.seq_len=0 must be between 1 and 16,777,216 (tokens a sequence)
    job 0: seed=0 loader.seq_len=0
  Error merging override seed=x
  Value 'x' of type 'str' could not be converted to Integer
      full_key: seed
    job 2: seed=x loader.seq_len=0
    job 3: seed=x loader.seq_len=16""",
        ),
        (["loader.seq_lne=16,32"], "did you mean loader.seq_len?\n    job 0: loader.seq_lne=16\n    job 1"),
        (
            ["loader=sequentail,sliding_window"],
            "did you mean loader=sequential?\n    job 0: loader=sequentail",
        ),
        (["loader=sequential,sliding_window", "loader.stride=16"], "write 'loader.stride=choice(16)'"),
        (
            ["loader=sequential,sliding_window", "loader.stride=choice(16)"],
            "a key of loader=sliding_window alone",
        ),
        (["trainer.max_stps=1", "seed=1,2"], "did you mean trainer.max_steps?"),
        (["seed=1,2", "experiment=quickstrt"], "did you mean experiment=quickstart?"),
        (["optimizer.lr=interval(0,1)"], "has no list of values"),
        (["seed=range(3,3)"], "no value at all"),
        (["seed=range(0,3,0)"], "must not be zero"),
        (["seed=range(0,1000000000000)"], "more than 10,000 jobs"),
        (["seed=choice(1,2"], "choice(1,2"),
        (["hydra.job.num=1,2"], "Sweeping over Hydra's configuration is not supported"),
        (["+hydra.sweeper.params={seed:1}"], "hydra.sweeper.params"),
        (["trainer.log_interval=1,2"], "nothing that is trained follows from trainer.log_interval"),
        (["tracker=none,wandb"], "nothing that is trained follows from tracker"),
        (["data.root=a,b"], "sweep over data.path"),
        (["sweep.name=a,b"], "nothing that is trained follows from sweep.name"),
        (["resume=a,b"], "cannot be part of a sweep"),
        (["seed=1,2", "resume=auto"], "cannot be part of a sweep"),
        (["sweep.name=a/b", "seed=1,2"], "must be the name of one folder"),
        (["seed=1,2", "hydra.sweep.subdir=x"], "hydra.sweep.subdir=x cannot be chosen"),
        (["seed=1,2", "hydra.sweep.subdir=${hydra.job.num}"], "hydra.sweep.subdir=${hydra.job.num} cannot"),
        (["seed=0,1", "hydra.sweep.dir=out/${seed}"], "would lie apart"),
        (
            ["--config-dir", "own", "experiment=strides,quickstart"],
            "a sweep over loader.stride, seed, and as",
        ),
        (["--config-dir", "nowhere", "seed=1,2"], "there is no folder"),
    ],
)
def test_what_cannot_run_is_named_before_the_first_job(words: list[str], expected: str, conf: Path) -> None:
    with pytest.raises(UserError) as error:
        grid_of(line_of(*words))
    assert expected in str(error.value)
    assert not (conf.parent / "multirun").exists()


def test_a_long_list_of_jobs_that_cannot_be_is_cut() -> None:
    failures = [Failure(index, [f"seed={index}"], UserError(f"cause {index % 2}")) for index in range(12)]
    lines = report(failures, 40, ["seed"], [], line_of()).splitlines()
    assert lines[0] == "12 of the sweep's 40 jobs cannot be composed, so none is started:"
    assert lines[1:3] == ["  cause 0", "    job 0: seed=0"]
    assert lines[-2:] == ["    job 9: seed=9", "  and 2 more jobs"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["loader.seq_len=64,", "128"], "without: loader.seq_len=64,128"),
        (["corpus.suffixes=[a,", "b]"], "without: 'corpus.suffixes=[a,b]'"),
        (["seed=1,", "tracker=none"], "without: seed=1"),
        (["seed=1", ",2"], "',2' after 'seed=1' is no KEY=VALUE"),
        (["seed", "=1,2"], "'seed' is no KEY=VALUE"),
        (["seed=", "1,2"], "'1,2' after 'seed=' is no KEY=VALUE"),
        (["seed =1,2"], "has a blank beside the key seed"),
        ([" seed=1,2"], "has a blank beside the key seed"),
    ],
)
def test_a_word_that_the_shell_split_is_said_to_be_split(words: list[str], expected: str) -> None:
    with pytest.raises(UserError) as error:
        check_words(words)
    assert expected in str(error.value)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a..b", ".a", "-m", "a;b", "a b", "$a", "x" * 101])
def test_a_name_that_is_no_plain_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="must be the name of one folder"):
        check_name(name)
    check_name("größe_2.b+c-1")


def test_torchrun_is_answered_with_the_right_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(UserError) as error:
        grid_of(line_of("seed=1,2", "loader.seq_len=8"))
    lines = str(error.value).splitlines()
    assert re.fullmatch(r"  python \S*train.py -m seed=1,2 loader.seq_len=8", lines[1])
    assert re.fullmatch(r"  torchrun --nproc-per-node=2 \S*train.py seed=VALUE loader.seq_len=8", lines[3])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["experiment=strides"], "experiment=strides describes a sweep over loader.stride, seed: add -m"),
        (["experiment=strides", "seed=1"], "describes a sweep over loader.stride: add -m"),
        (["experiment=strides", "seed=1", "loader.stride=8", "corpus=text", "data.path=none"], "none"),
        (["seed=1,2", "hydra.mode=MULTIRUN"], "hydra.mode=MULTIRUN is no sweep yet: add -m"),
    ],
)
def test_one_run_of_what_describes_many_is_refused(
    words: list[str],
    expected: str,
    conf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", "own", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert expected in said
    assert ("describes a sweep" in said) == ("describes a sweep" in expected)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loader.seq_len=32,64", "trainer.max_steps=8"], "4,096 to 8,192 tokens"),
        (["loader.seq_len=32,48", "trainer.max_tokens=10_000"], None),  # each rounded up to whole steps
        (["loader.seq_len=32,64", "loader.batch_size='${divide:1024,${loader.seq_len}}'"], None),
        (["trainer.max_steps=8,16"], None),
    ],
)
def test_jobs_of_unequal_budgets_are_named_before_the_first_one(
    words: list[str], said: str | None, conf: Path
) -> None:
    notes = grid(*words).notes
    assert len(notes) == (said is not None)
    assert said is None or (said in notes[0] and "trainer.max_tokens=8192" in notes[0])


def test_a_word_that_refers_to_a_swept_key_has_each_jobs_value(conf: Path) -> None:
    jobs = grid("loader.seq_len=32,64", "loader.batch_size='${divide:1024,${loader.seq_len}}'").jobs
    assert [job.config.loader.batch_size for job in jobs] == [32, 16]


def test_another_sweeper_decides_for_itself(conf: Path) -> None:
    words = ["hydra.sweeper._target_=harness.sweep.NoSuchSweeper", "seed=interval(0,9)"]
    assert grid_of(line_of(*words)) is None
    line, folder = named(line_of(*words))
    assert folder.name == "seed"
    assert named(line) == (line, folder)


def test_a_queue_that_this_machine_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"no srun on this machine.*hydra/launcher=submitit_local"):
        trains_here(split(["-m", "hydra/launcher=submitit_slurm", "seed=0,1"]))
