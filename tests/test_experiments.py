"""Every experiment does what its comment says: it composes, its sweep is honest, and it runs reduced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from harness.commandline.composition import config_dir, register, to_dataclass
from harness.commandline.overrides import one_budget, split
from harness.config import TrainConfig, get, set_directory, tokens_per_step, total_steps
from harness.data_setup import unprepared
from harness.errors import UserError
from harness.sweep.grid import Grid, grid_of
from harness.sweep.job import run_job
from tests.helpers_runs import ROOT, rows, run, write_pair_set, write_row_set, write_text_set

FILES = sorted((ROOT / "conf" / "experiment").glob("*.yaml"))
SWEEPS = [path.stem for path in FILES if "sweeper:" in path.read_text()]
RUNS = [path.stem for path in FILES if path.stem not in SWEEPS]
TINY = (
    "tracker=none", "tokenizer=byte", "model.n_layer=1", "model.n_head=2", "model.n_embd=32",
    "schedule.warmup_steps=0", "evaluation.tokens=100", "evaluation.sample_tokens=0",
)  # fmt: skip
SMALL_STEPS = ("loader.seq_len=16", "loader.batch_size=4", "trainer.micro_batch_size=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with every set that an experiment reads."""
    root = tmp_path_factory.mktemp("data")
    write_text_set(root / "npy-stream")
    write_row_set(root / "npy-rows129", width=129)
    write_pair_set(root / "npy-contrastive65", width=65, neg_width=65)
    return root


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def commands(name: str) -> list[list[str]]:
    """The words after `python train.py` of every command in an experiment's comment."""
    comment = re.sub(r" \\\n#     (?=\S)", " ", (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text())
    return [found.split() for found in re.findall(r"^#   python train\.py (.*)$", comment, re.MULTILINE)]


def composed(*words: str) -> TrainConfig:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = to_dataclass(compose("train", one_budget(list(words))))
    assert isinstance(config, TrainConfig)
    return config


def grid(*words: str) -> Grid:
    line = split(["-m", *words])
    line.overrides = one_budget(line.overrides)
    found = grid_of(line)
    assert found is not None
    return found


def sweep_of(name: str) -> dict[str, str]:
    """What an experiment sweeps: key to values."""
    text = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    params: dict[str, str] = yaml.safe_load(text)["hydra"]["sweeper"]["params"]
    return params


def reduced(name: str, data: Path, *words: str) -> TrainConfig:
    small = SMALL_STEPS if name == "gpt2_small" else ()
    return composed(f"experiment={name}", *TINY, *small, f"data.root={data}", "trainer.max_steps=2", *words)


@pytest.mark.parametrize("name", RUNS + SWEEPS)
def test_an_experiment_composes_and_shows_its_command(name: str) -> None:
    composed(f"experiment={name}")
    words = [f"experiment={name}"] if name in RUNS else ["-m", f"experiment={name}"]
    shown = commands(name)
    assert all(command[: len(words)] == words for command in shown)
    assert len(shown) == (1 if name in RUNS else 2)  # in full, and reduced for a CPU


@pytest.mark.parametrize("name", [name for name in RUNS if name != "dpo"])
def test_an_experiment_runs_reduced(name: str, data: Path) -> None:
    outcome = run(reduced(name, data), Path("run"))
    assert outcome.step == 2
    assert outcome.val_loss is not None


def test_preferences_are_trained_from_what_the_quick_start_trained(data: Path) -> None:
    run(reduced("quickstart", data), Path("quickstart"))
    assert run(reduced("dpo", data, "init_from=quickstart"), Path("run")).step == 2


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_is_comparable_and_its_reduced_command_runs(name: str, data: Path) -> None:
    """Equal tokens in equal steps, judged as often on as much, with schedules that follow the budget.

    Its first and its last job run, with an even smaller budget on a tiny set.
    """
    _, *command = commands(name)[1]
    one_seed = "seed=0,1" if name == "seed_study" else "seed=0"
    tiny = [word for word in TINY if name != "model_ladder" or "n_layer" not in word]  # its rungs stay apart
    found = grid(*command, *tiny, f"data.root={data}", "trainer.max_tokens=2048", one_seed)
    assert found.name != name  # a try is no part of the sweep proper
    configs = [job.config for job in found.jobs]
    assert len({job.sha256 for job in found.jobs}) == len(configs) > 1
    alike = [
        (tokens_per_step(c), total_steps(c), c.schedule, c.prepare, c.evaluation, c.checkpoint)
        for c in configs
    ]
    assert all(one == alike[0] for one in alike)
    assert configs[0].schedule.total_steps is None
    assert all((get(config, "loader.stride") or 0) <= config.loader.seq_len for config in configs)
    for job in (found.jobs[0], found.jobs[-1]):
        ended = run_job(job.config, found.folder, job.words, {})
        assert ended.state == "done", job.words
        assert ended.path is not None
        last = rows(ended.path)[-1]
        assert (last["step"], last["val_loss"]) == (2, ended.objective)


def test_loaders_are_compared_on_a_stream_that_each_of_their_jobs_may_prepare(tmp_path: Path) -> None:
    for loader in sweep_of("compare_loaders")["loader"].split(","):
        config = composed("experiment=compare_loaders", f"loader={loader}", f"data.root={tmp_path}")
        assert config.evaluation.set == str(tmp_path / "npy-stream")
        assert tmp_path / "npy-stream" in map(set_directory, unprepared(config))


def test_the_stride_sweep_is_two_by_three_with_two_seeds_of_100_000_tokens_at_least() -> None:
    lengths = [len(values.split(",")) for values in sweep_of("sweep_stride_seq_len").values()]
    assert sorted(lengths) == [2, 2, 3]
    assert (composed("experiment=sweep_stride_seq_len").trainer.max_tokens or 0) >= 100_000


def test_a_step_that_cannot_be_divided_is_said_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"divide:1024,100.*use a divisor of 1024 in place of 100") as error:
        grid("experiment=sweep_stride_seq_len", "loader.seq_len=100", "loader.stride=32", "seed=0,1")
    assert "loader.batch_size" in str(error.value)
