"""train.py in several processes: one directory, one writer, one message; started again, it goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from harness.storage.manifest import load_manifest
from tests.helpers_cli import TINY, make_root
from tests.helpers_forks import ROOT, Fork, forked
from tests.helpers_ranks import free_port
from tests.helpers_runs import train_rows, write_text_set

LAUNCHER = {
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_MAX_RESTARTS": "3",
    "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("data"))


@pytest.fixture
def launcher() -> Iterator[dict[str, str]]:
    """The environment that torchrun gives, with the store that it keeps over restarts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {**LAUNCHER, "MASTER_PORT": str(store.port)}
    del store


def start(cwd: Path, *words: str, of_rank_1: tuple[str, ...] = (), **environment: str) -> list[Fork]:
    """`train.py` as two ranks, begun."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"} | environment
    return [
        Fork(
            "train.py", *TINY, *words, *(of_rank_1 if rank else ()),
            cwd=cwd,
            environment=address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip


def trained(cwd: Path, *words: str, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    return [fork.ended() for fork in start(cwd, *words, **options)]


def only_run(cwd: Path) -> Path:
    (run,) = (cwd / "runs").glob("*/*")
    return run


def test_two_ranks_write_one_directory_and_go_on_in_it_when_they_are_started_again(
    root: Path, tmp_path: Path, launcher: dict[str, str]
) -> None:
    words = (f"data.root={root}",)
    first, second = trained(tmp_path, *words, "trainer.max_steps=4", **launcher)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert (second.stdout, second.stderr) == ("", "")
    run = only_run(tmp_path)
    start = json.loads((run / "environment.json").read_text())["starts"][0]
    assert (start["world_size"], len(start["ranks"])) == (2, 2)
    assert len({place["pid"] for place in start["ranks"]}) == 2
    assert "ranks     2 on " in (run / "train.log").read_text()
    assert "Train on: torchrun --nproc-per-node=2 --max-restarts=3 " in first.stdout

    first, second = trained(tmp_path, *words, **launcher)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert only_run(tmp_path) == run
    assert "again     started by its launcher" in first.stdout
    assert [row["step"] for row in train_rows(run)] == list(range(1, 9))


def test_what_one_rank_alone_refuses_ends_all_with_its_message_once(root: Path, tmp_path: Path) -> None:
    other = write_text_set(tmp_path / "other", train_tokens=2999)
    first, second = trained(
        tmp_path, f"data.path={root / 'npy-stream'}", "run.name=one", of_rank_1=(f"data.path={other}",)
    )
    assert (first.returncode, second.returncode) == (2, 2)
    assert second.stderr == ""
    for path in (root / "npy-stream", other):
        assert first.stderr.count(load_manifest(path).metadata_sha256) == 1
    assert first.stderr.startswith("error: the training set on ")
    assert "Traceback" not in first.stderr
    assert not (tmp_path / "runs").exists()


def test_a_refusal_is_not_tried_again(tmp_path: Path, launcher: dict[str, str]) -> None:
    first, second = trained(tmp_path, "loader.batch_size=3", **launcher)
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith("error: loader.batch_size=3 cannot be shared by 2 processes")
    assert second.stderr == ""
    first, second = trained(tmp_path, "loader.batch_size=3", **launcher)
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, "")
    assert first.stderr.startswith("not tried again: ")
    assert first.stderr.count("\n") == 1


def test_the_plan_is_printed_once_with_one_rank_s_share(root: Path, tmp_path: Path) -> None:
    first, second = trained(tmp_path, f"data.root={root}", "check=true")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "ranks      2, each with 2 of a step's 4" in first.stdout
    assert second.stdout == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.heavy
def test_the_proof_of_ranks_finds_nothing_wrong() -> None:
    """Real torchrun: one, two and four ranks, and one of two that is killed and started again."""
    done = forked("scripts/prove_ranks.py", "--parts=kills", "--steps=32", "--kills=1", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[2] for row in rows] == ["as it must be"] * 5
