"""A sweep as a file: each job by its number, in any order and as often as one likes, is the job of `-m`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.commandline import cli
from harness.errors import UserError
from harness.sweep import plan, plan_cli
from harness.sweep.identity import find_job
from harness.sweep.lock import claimed
from tests.helpers_cli import TINY, make_root
from tests.helpers_runs import ROOT, rows, snapshot

GRID = ("loader=sliding_window", "loader.stride=8,16,99999,8")


class Project:
    """A folder with a set and a plan of three jobs, of which two can be trained; commands run in it."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.patch = path, patch
        make_root(path / "data" / "stdlib-byte")
        (path / "own" / "experiment").mkdir(parents=True)
        text = "# @package _global_\ndefaults: [override /loader: sliding_window]\nseed: 7\n"
        (path / "own" / "experiment" / "mine.yaml").write_text(text)
        assert self.sweep("plan", *TINY, *GRID) == 0

    def sweep(self, *words: str, cwd: Path | None = None) -> int:
        """The exit code of `scripts/sweep.py WORDS`, in this process."""
        return self._call("sweep.py", plan_cli.main, words, cwd or self.path)

    def train(self, *words: str) -> int:
        return self._call("train.py", cli.main, words, self.path)

    def _call(self, name: str, main: Any, words: tuple[str, ...], cwd: Path) -> int:
        self.patch.chdir(cwd)
        self.patch.setattr(sys, "argv", [name, *words])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    @property
    def jobs(self) -> list[plan.PlannedJob]:
        return plan.read_plan(self.path / "sweep.jsonl")

    def directory(self, index: int) -> Path:
        found = find_job(self.path / "multirun" / "stride", self.jobs[index].identity)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        yield Project(tmp_path_factory.mktemp("project"), patch)


def test_a_plan_lists_each_job_once_with_all_it_needs(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project.sweep("plan", "-m", *TINY, *GRID) == 0
    printed = capsys.readouterr().out
    jobs = project.jobs
    assert [job.index for job in jobs] == [0, 1, 2]
    assert [job.label for job in jobs] == ["loader.stride=8", "loader.stride=16", "loader.stride=99999"]
    assert {(job.jobs, job.name, job.folder, job.cwd) for job in jobs} == {
        (3, "stride", "multirun/stride", str(project.path))
    }
    assert "job 3 is job 0 again" in printed
    assert "sbatch --array=0-2 --wrap" in printed
    assert "completions: 3" in printed
    assert "seq 0 2 | parallel" in printed
    assert not (project.path / "multirun").exists()


def test_jobs_run_by_number_in_any_order_are_those_of_the_sweep(project: Project) -> None:
    elsewhere = project.path / "elsewhere"
    elsewhere.mkdir()
    assert project.sweep("run", "../sweep.jsonl", "--index=1", cwd=elsewhere) == 0
    assert project.sweep("run", "sweep.jsonl", "--index", "0") == 0
    assert project.sweep("run", "sweep.jsonl", "--index", "2") == 1  # a stride that is longer than the set
    assert not any(elsewhere.iterdir())
    paths = [project.directory(index) for index in (0, 1)]
    assert [rows(path)[-1]["step"] for path in paths] == [8, 8]
    before = [snapshot(path) for path in paths]
    assert project.sweep("run", "sweep.jsonl", "--index", "0") == 0
    assert project.train("-m", *TINY, *GRID) == 1
    assert [snapshot(path) for path in paths] == before
    assert len(list((project.path / "multirun" / "stride").glob("*/job.json"))) == 3


def test_status_tells_how_far_the_jobs_of_a_plan_are(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project.sweep("plan", *TINY, "seed=0,1", "--output=seeds.jsonl") == 0
    assert project.sweep("run", "seeds.jsonl", "--index=1") == 0
    capsys.readouterr()
    assert project.sweep("status", "seeds.jsonl") == 0
    assert "sweep seed: 1 of 2 done, 1 waiting" in capsys.readouterr().out
    assert project.sweep("status", "multirun/seed") == 0
    assert "seed=1  done at step 8" in capsys.readouterr().out


def test_a_job_that_another_process_trains_is_left_to_it(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed(project.path / "multirun" / "stride", project.jobs[2].identity) as owner:
        assert owner is None
        assert project.sweep("run", "sweep.jsonl", "--index", "2") == 75
    assert "is being trained by process" in capsys.readouterr().out


def test_a_stopped_job_is_75_and_goes_on_when_it_is_run_again(project: Project) -> None:
    words = ["experiment=mine", "loader.stride=8", "trainer.max_steps=400", "checkpoint.interval=200"]
    own = ["--config-dir", "own", "--output", "long.jsonl"]
    assert project.sweep("plan", *TINY, *words, "schedule.total_steps=400", *own) == 0
    (job,) = plan.read_plan(project.path / "long.jsonl")
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), "run", str(project.path / "long.jsonl")]
    process = subprocess.Popen(
        [*command, "--index", "0"], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 75, rest
    path = find_job(project.path / "multirun" / "mine", job.identity)
    assert path is not None
    stopped = json.loads((path / "status.json").read_text())
    assert (stopped["state"], stopped["exit_code"]) == ("stopped", 75)
    assert project.sweep("run", "long.jsonl", "--index", "0") == 0
    done = json.loads((path / "status.json").read_text())
    assert (done["state"], done["step"]) == ("done", 400)
    assert [row["step"] for row in rows(path) if "loss" in row] == list(range(1, 401))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "sweep.jsonl", "--index", "3"], "it has 3 jobs, 0 to 2"),
        (["run", "sweep.jsonl", "--index", "-1"], "run takes a plan and a job's number"),
        (["run", "sweep.jsonl", "--index", ""], "run takes a plan and a job's number"),
        (["run", "sweep.jsonl", "--index"], "--index needs a value"),
        (["run", "sweep.jsonl"], "run takes a plan and a job's number"),
        (["run", "none.jsonl", "--index", "0"], "none.jsonl cannot be read: No such file"),
        (["rum", "sweep.jsonl"], "did you mean run?"),
        (["status"], "status takes one folder or plan"),
        (["plan", "seed=0,x"], "job 1: seed=x"),
        (["plan", "seed=0,1", "check=true"], "check=true trains nothing"),
        (["plan", "seed=0,1", "hydra.sweeper._target_=mine.Sweeper"], "no plan can list them"),
    ],
)
def test_a_wrong_command_is_answered_in_words(
    words: list[str], expected: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(project.path)
    assert project.sweep(*words) == 2
    assert expected in capsys.readouterr().err
    assert snapshot(project.path) == before


def _damaged(lines: list[str], how: str) -> bytes:
    job = json.loads(lines[1])
    changed = {
        "cut": lines[1][:40],
        "no object": "[1]",
        "a key less": json.dumps({key: job[key] for key in list(job)[1:]}),
        "a wrong type": json.dumps(job | {"words": ["seed=0", 1]}),
        "another job": lines[0],
    }
    if how == "empty":
        return b""
    if how == "binary":
        return b"\xff\xfe"
    if how == "a line less":
        return "\n".join(lines[:-1]).encode()
    return "\n".join([lines[0], changed[how], *lines[2:]]).encode()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut", "line 2 is damaged"),
        ("no object", "line 2 must be an object"),
        ("a key less", "line 2 must be an object with the keys index, jobs"),
        ("a wrong type", "line 2: words=['seed=0', 1] has the wrong type"),
        ("another job", "line 2 is job 0 of 3, but the plan has 3 lines"),
        ("a line less", "line 2 is job 1 of 3, but the plan has 2 lines"),
        ("empty", "is empty"),
        ("binary", "is no plan"),
    ],
)
def test_a_damaged_plan_is_refused_with_its_line(how: str, expected: str, project: Project) -> None:
    lines = (project.path / "sweep.jsonl").read_text().splitlines()
    file = project.path / "damaged.jsonl"
    file.write_bytes(_damaged(lines, how))
    with pytest.raises(UserError) as error:
        plan.read_job(file, 1)
    assert expected in str(error.value)


def test_a_plan_of_another_version_is_refused_with_both_identities(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    now = project.jobs[2].identity
    text = (project.path / "sweep.jsonl").read_text()
    (project.path / "old.jsonl").write_text(text.replace(now, "0" * 64))
    before = snapshot(project.path)
    assert project.sweep("run", "old.jsonl", "--index=2") == 2
    assert f"job 2 was planned as {'0' * 64}, and its words are {now} now" in capsys.readouterr().err
    assert snapshot(project.path) == before


def test_a_plan_replaces_that_of_its_own_sweep_alone(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*words: str) -> int:
        return project.sweep("plan", *words, "--output", "mine.jsonl")

    file = project.path / "mine.jsonl"
    assert planned("seed=choice(0)") == 0
    assert planned("seed=0,1") == 0
    assert len(plan.read_plan(file)) == 2
    before = file.read_bytes()
    assert planned("loader.seq_len=choice(8)") == 2
    assert "holds the plan of the sweep seed in" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert planned("loader.seq_len=choice(8)", "--overwrite") == 0
    file.write_text("notes\n")
    assert planned("seed=choice(0)") == 2
    assert "holds no plan that can be read" in capsys.readouterr().err


def test_in_a_container_the_job_itself_gets_the_signal(tmp_path: Path) -> None:
    line = plan.launch_lines(tmp_path / "sweep.jsonl", 3)["Kubernetes"]
    assert json.loads(line.partition("command: ")[2])[2].startswith("exec ")


def test_help_is_short_and_imports_nothing_large(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['sweep.py', '--help']\n"
        "from harness.sweep.plan_cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'wandb', 'h5py', 'numpy', 'hydra'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "scripts/sweep.py run sweep.jsonl --index 0" in result.stdout
