"""The command line: typos are answered with the right word, and everything works from anywhere."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from harness.commandline.helptext import help_text
from harness.config import EvaluationConfig, TrainerConfig
from harness.config_groups import GROUPS
from tests.helpers_cli import TINY, make_root, make_run
from tests.helpers_forks import forked, pasted
from tests.helpers_runs import ROOT, rows, snapshot, train_py


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("trained"), data)


@pytest.fixture
def one(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, as `runs/one` of the test's own folder."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "one"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trainer.max_step=3", "did you mean trainer.max_steps?"),
        ("+trainer.max_step=3", "did you mean trainer.max_steps?"),
        ("++trainer.max_step=3", "did you mean trainer.max_steps?"),
        ("trainr.max_steps=3", "did you mean trainer.max_steps?"),
        ("lr=3", "did you mean optimizer.lr?"),
        ("batch_size=3", "did you mean loader.batch_size?"),
        ("optimiser=adamw", "did you mean optimizer?"),
        ("loader.stride=32", "loader.stride is a key of loader=sliding_window"),
        ("loader=sequentail", "did you mean loader=sequential?"),
        ("model=gpt2_smal", "did you mean model=gpt2_small?"),
        ("+nonsense=1", "there is no key nonsense"),
        ("loader.batch_size=abc", "could not be converted to Integer"),
        ("trainer.max_steps=1e3", "could not be converted to Integer"),
        ("a=1,2", "add --multirun"),
        ("resume=nowhere", "nowhere does not exist"),
        ("resume=auto", "add a plain run.name=NAME or hydra.run.dir=FOLDER"),
        ("-m --cfg job seed=0,1", "of a grid, check=true shows"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(tmp_path: Path, word: str, expected: str) -> None:
    result = train_py(*word.split(), cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert "append to your config" not in result.stderr
    assert not any(tmp_path.iterdir())


def test_every_problem_is_reported_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    words = (
        "loader.batch_size=0", "model.n_head=3", "optimizer.lr=-1", "optimizer.betas=[0.9]", "compile=maybe",
        "trainer.micro_batch_size=7", "schedule.min_lr_ratio=2", "device=gpu", "precision=fp8",
        "evaluation.interval=0", "prepare.val_fraction=1.5", "optimizer.weight_decay=nan",
    )  # fmt: skip
    result = train_py(*words, cwd=tmp_path)
    assert result.returncode == 2
    named = [word.split("=")[0] for word in words if "micro" not in word]
    assert all(key in result.stderr for key in named), result.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "script",
    [
        "auditing.audit_cli", "auditing.inspect_cli", "planning.find_batch", "prepare.convert_cli",
        "prepare.verify_cli", "sweep.report_cli",
    ],
)  # fmt: skip
def test_help_names_the_command_that_was_started(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/harness-this", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"harness.{script}").main()
    usage = capsys.readouterr().out.partition("usage: ")[2].partition("\n\n")[0]
    assert ended.value.code == 0
    assert all(line.strip().startswith("harness-this ") for line in usage.splitlines()), usage


def test_torch_and_trackers_are_not_imported_to_answer(tmp_path: Path) -> None:
    for words in (["--help"], ["--cfg", "job"], ["trainer.max_step=3"], ["loader.batch_size=0"]):
        code = (
            "import sys; sys.argv = ['train.py', *sys.argv[1:]]\n"
            "from harness.commandline.cli import main\n"
            "try: main()\nexcept SystemExit: pass\n"
            "print(sorted({'torch', 'wandb', 'h5py', 'numpy'} & set(sys.modules)), file=sys.stderr)"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert result.stderr.splitlines()[-1] == "[]", (words, result.stderr)


def test_help_under_torchrun_shows_no_sweep_that_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert "torchrun --nproc" not in help_text(ROOT / "conf", "train")


def test_help_names_groups_and_commands(tmp_path: Path) -> None:
    text = train_py("--help", cwd=tmp_path).stdout
    assert "train.py resume=RUN_OR_CHECKPOINT" in text
    for path in (ROOT / "conf").glob("*/*.yaml"):
        assert f"  {path.parent.name}={path.stem}" in text
    known = {
        field.name
        for kinds in GROUPS.values()
        for kind in kinds.values()
        for field in dataclasses.fields(kind)
    }
    known |= {field.name for kind in (TrainerConfig, EvaluationConfig) for field in dataclasses.fields(kind)}
    for key in known - {"name"}:
        assert re.search(rf"^ +{key}: ", text, flags=re.MULTILINE), key
    prepare = forked("scripts/prepare_data.py", "--help", cwd=tmp_path).stdout
    assert "separator: null" in prepare
    assert "val_fraction: 0.05" in prepare


def test_missing_data_of_another_corpus_names_the_exact_command(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("Call me Ishmael. " * 200)
    words = ["corpus=text", "corpus.path=books", "prepare.val_fraction=0.5", "tokenizer=byte"]
    result = train_py(*words, *TINY, cwd=tmp_path)
    assert result.returncode == 2
    command = result.stderr.splitlines()[-1].strip()
    assert "prepare_data.py data=npy corpus=text tokenizer=byte" in command
    assert f"corpus.path={tmp_path / 'books'}" in command
    assert "prepare.val_fraction=0.5" in command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books"]
    # The command that is printed is the command that works.
    for number in range(40):
        (tmp_path / "books" / f"{number}.txt").write_text(f"chapter {number} " * 50)
    assert pasted(command, tmp_path).returncode == 0
    assert train_py(*words, *TINY, cwd=tmp_path).returncode == 0


def test_a_set_prepared_otherwise_is_refused_with_the_words_that_fit(data: Path, tmp_path: Path) -> None:
    result = train_py(*TINY, f"data.path={data}/npy-stream", "tokenizer=gpt2", cwd=tmp_path)
    assert result.returncode == 2
    assert "tokenizer: the set byte, the configuration gpt2" in result.stderr
    assert "tokenizer=byte" in result.stderr


def test_a_pinned_digest_refuses_another_set(data: Path, tmp_path: Path) -> None:
    result = train_py(*TINY, f"data.root={data}", f"data.expect_sha256={'0' * 64}", cwd=tmp_path)
    assert result.returncode == 2
    assert "0" * 64 in result.stderr
    assert "this is another set" in result.stderr


def test_a_run_directory_holds_every_file_of_the_contract(data: Path, trained: Path) -> None:
    path = trained
    for name in (
        "config.yaml", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "environment.json",
        "metrics.jsonl", "train.log", "status.json", "checkpoints/latest",
        "checkpoints/step-00000008/loader.json",
    ):  # fmt: skip
        assert (path / name).is_file(), name
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert config["data"]["root"] == str(data)
    assert yaml.safe_load((path / ".hydra" / "overrides.yaml").read_text())[0] == TINY[0]


def test_relative_paths_mean_the_starting_folder_whatever_hydra_does(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    words = [*TINY, "data.root=data", "hydra.job.chdir=true", "hydra.output_subdir=.hydra"]
    result = train_py(*words, "hydra.run.dir=runs/x-${seed}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x-0"]
    before = snapshot(tmp_path / "runs")
    assert train_py(*words, "hydra.run.dir=runs/x-${seed}", cwd=tmp_path).returncode == 2
    assert snapshot(tmp_path / "runs") == before


@pytest.mark.parametrize("place", ["README.md", "/dev/null/x", "x" * 300])
def test_a_place_where_no_directory_can_be_is_no_traceback(tmp_path: Path, place: str) -> None:
    (tmp_path / "README.md").write_text("a file")
    result = train_py(f"hydra.run.dir={place}", cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")


def test_scripts_answer_a_wrong_word(one: Path, tmp_path: Path) -> None:
    def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return forked(f"scripts/{name}.py", *words, cwd=tmp_path)

    text = script("sample", "runs/one", "tokens=3", "prompt=" + "word " * 100)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("word word")
    for words, expected in [
        (("runs/one", "promt=a"), "did you mean prompt?"),
        (("runs/one", "temperature=nan"), "temperature=nan"),
        (("runs/one", "tokens=many"), "tokens=many must be int"),
        (("runs/two",), "runs/two does not exist"),
        (("tokens=3",), "give the RUN first"),
        (("runs/one", "device=foo"), "device=foo is no device"),
    ]:
        result = script("sample", *words)
        assert result.returncode == 2, result.stderr
        assert expected in result.stderr
    answer = json.loads(script("evaluate", "runs/one").stdout)
    assert answer["tokens"] == 399
    last = [row for row in rows(one) if "val_loss" in row][-1]
    short = json.loads(script("evaluate", "runs/one", "tokens=200").stdout)
    assert short["loss"] == pytest.approx(last["val_loss"], rel=1e-6)


@pytest.mark.heavy
def test_the_wheel_carries_the_configuration(tmp_path: Path, data: Path) -> None:
    """Built for real and run from its unpacked files, away from the checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=ROOT, check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = "from harness.commandline.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, *TINY, f"data.root={data}", "run.name=wheel"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "harness-train resume=" in result.stdout
    config_sources = yaml.safe_load((tmp_path / "runs/wheel/.hydra/hydra.yaml").read_text())["hydra"][
        "runtime"
    ]
    assert str(tmp_path / "site") in str(config_sources["config_sources"])
