"""Jobs in processes of their own, started by Hydra's launchers; and what a signal to the one above does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.commandline.overrides import split
from harness.errors import UserError
from harness.sweep.composing import open_sweep
from harness.sweep.grid import grid_of, trains_here
from harness.sweep.lock import working
from harness.sweep.processes import command_of
from tests.helpers_cli import TINY, make_root
from tests.helpers_runs import ROOT, snapshot, train_py

pytestmark = pytest.mark.heavy

# Six jobs for two workers: each begins, and once it is asked to stop takes a while to save.
_SWEEP = """
import sys, time
from functools import partial
from pathlib import Path
from harness import preemption
from harness.sweep import workers
from harness.sweep.forwarding import forwarding
from harness.sweep.job import Ended
from harness.sweep.lock import claimed

FOLDER, SAVE_SECONDS = Path(sys.argv[1]), float(sys.argv[2])

def job(number):
    with claimed(FOLDER, f"{number:064x}"), preemption.listening() as stop, stop.asking():
        print("begun", number, flush=True)
        while stop.name is None:
            time.sleep(0.01)
        time.sleep(SAVE_SECONDS)
        (FOLDER / f"saved-{number}").touch()
    return Ended(None, "stopped")

def turn(number):
    return workers.in_turn(partial(job, number)).state

def main():
    from joblib import Parallel, delayed

    with forwarding(FOLDER):
        print("ready", flush=True)
        Parallel(n_jobs=2)(delayed(turn)(number) for number in range(6))

preemption.run(main)
"""


@contextmanager
def sweep(folder: Path, save_seconds: float) -> Iterator[subprocess.Popen[str]]:
    """The process above the workers, in a session of its own; all of it is gone at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", _SWEEP, str(folder), str(save_seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def said(child: subprocess.Popen[str], lines: int) -> list[str]:
    assert child.stdout is not None
    return sorted(child.stdout.readline().strip() for _ in range(lines))


def session(leader: int) -> set[int]:
    """The living processes of a session; its leader may be gone."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.add(int(name))
    return found


def wait_until_none_is_left(leader: int) -> None:
    while session(leader):
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)])
def test_a_signal_saves_the_jobs_that_are_trained_and_begins_no_other(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    with sweep(tmp_path, save_seconds=0.2) as above:
        assert said(above, 3) == ["begun 0", "begun 1", "ready"]
        send(above.pid, number)
        out, err = above.communicate(timeout=60)
        wait_until_none_is_left(above.pid)
    assert (above.returncode, out) == (75, "")
    assert err.splitlines() == [
        f"{number.name}: stopping at the next safe point, which is saved; a second signal leaves at once"
    ]
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert [path.name for path in (tmp_path / ".locks").iterdir()] == ["guard"]


def test_a_second_signal_ends_every_process_at_once(tmp_path: Path) -> None:
    with sweep(tmp_path, save_seconds=1000) as above:
        said(above, 3)
        above.send_signal(signal.SIGTERM)
        while not list((tmp_path / ".locks").glob("stop-*")):
            time.sleep(0.01)
        time.sleep(0.03)  # sooner it would be the same signal once more
        above.send_signal(signal.SIGTERM)
        above.communicate(timeout=60)
        wait_until_none_is_left(above.pid)
    assert above.returncode == 130
    assert not list(tmp_path.glob("saved-*"))


def test_workers_whose_launcher_was_killed_end_with_the_jobs_that_they_train(tmp_path: Path) -> None:
    with sweep(tmp_path, save_seconds=0) as above:
        said(above, 3)
        above.kill()
        above.wait()
        time.sleep(0.1)
        assert len(list((tmp_path / ".locks").glob("[01]*.json"))) == 2
        for pid in working(tmp_path):
            os.kill(pid, signal.SIGTERM)
        wait_until_none_is_left(above.pid)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_a_signal_before_any_worker_answers_is_not_lost(tmp_path: Path) -> None:
    with sweep(tmp_path, save_seconds=0) as above:
        said(above, 1)
        while not any("loky_posix" in command_of(pid) for pid in session(above.pid)):
            time.sleep(0.001)
        os.killpg(above.pid, signal.SIGTERM)
        out, _ = above.communicate(timeout=60)
        wait_until_none_is_left(above.pid)
    assert above.returncode == 75
    assert out.count("begun") == len(list(tmp_path.glob("saved-*")))


def test_joblib_trains_each_job_once_and_submitit_finds_them_done(tmp_path: Path) -> None:
    words = ("-m", *TINY, f"data.root={make_root(tmp_path / 'data')}", "sweep.name=two")
    joblib = train_py(*words, "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", cwd=tmp_path)
    assert joblib.returncode == 0, joblib.stderr
    jobs = sorted((tmp_path / "multirun" / "two").glob("seed-*"))
    statuses = [json.loads((path / "status.json").read_text()) for path in jobs]
    assert [(status["state"], status["step"]) for status in statuses] == [("done", 8), ("done", 8)]
    assert len({status["pid"] for status in statuses}) == 2
    before = [snapshot(path) for path in jobs]
    submitit = train_py(*words, "seed=1", "hydra/launcher=submitit_local", cwd=tmp_path)
    assert submitit.returncode == 0, submitit.stderr
    assert [snapshot(path) for path in jobs] == before
    (log,) = (tmp_path / "multirun" / "two" / ".submitit").glob("*/*.out")
    assert "done already" in log.read_text()


def test_a_queue_of_a_cluster_is_chosen_by_words() -> None:
    line = split(["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "seed=0,1"])
    launcher = OmegaConf.to_container(open_sweep(line).master.hydra.launcher, resolve=True)
    assert isinstance(launcher, dict)
    assert (launcher["_target_"].rpartition(".")[2], launcher["partition"]) == ("SlurmLauncher", "gpu")
    assert launcher["submitit_folder"].endswith("/.submitit/%j")


def test_only_hydras_own_launcher_trains_in_the_process_that_was_started() -> None:
    assert trains_here(split(["-m", "seed=0,1"]))
    for launcher in ("joblib", "submitit_local"):
        assert not trains_here(split(["-m", "seed=0,1", f"hydra/launcher={launcher}"]))


def test_a_launcher_that_is_not_installed_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(UserError, match="pip install hydra-joblib-launcher hydra-submitit-launcher"):
        grid_of(split(["-m", "seed=0,1", "hydra/launcher=absent"]))
