"""What ranks tell each other by their launcher's store: agreed, waited for, said once, kept for a restart."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistBackendError, PrefixStore, TCPStore

from harness import entry
from harness.checkpoints import checkpoint, checkpoint_files, checkpoint_writer
from harness.checkpoints.checkpoint import step_dir
from harness.commandline.commands import command
from harness.commandline.overrides import CommandLine
from harness.config import TrainConfig
from harness.distributed import elastic, rendezvous
from harness.distributed.meeting import Meeting, RanksMeeting
from harness.distributed.peers import Peers
from harness.distributed.ranks import Ranks
from harness.errors import EXIT_STOPPED, EXIT_USER, PeerFailed, RunFailed, UserError
from harness.files import sha256_file
from harness.hardware.device import select_device
from harness.preemption import Stopped
from harness.resuming import auto_resume
from tests.helpers_checkpoints import parts

_open: list[RanksMeeting] = []


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """A launcher's. Who has met there leaves before it is gone, or its process would be ended."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    while _open:
        _open.pop().close()


@pytest.fixture
def two(store: TCPStore) -> list[RanksMeeting]:
    """Two ranks of one host, which in here are two threads."""
    return [meet(store, rank, "start") for rank in range(2)]


def meet(store: TCPStore, rank: int, start: str, job: dict[str, Any] | None = None) -> RanksMeeting:
    # A connection of its own, as a process has.
    own = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    _open.append(RanksMeeting(Ranks(rank, 2, rank), own, PrefixStore(start, own), job or {}, hosts=False))
    return _open[-1]


def side_by_side(*acts: Callable[[], Any]) -> list[Any]:
    """What each returns, or raises, in a thread of its own."""
    results: list[Any] = [None] * len(acts)

    def act(index: int) -> None:
        try:
            results[index] = acts[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=act, args=(index,)) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_all_ranks_hear_the_same(two: list[RanksMeeting]) -> None:
    first, second = two
    assert side_by_side(lambda: first.gather("x", [0]), lambda: second.gather("x", [1])) == [[[0], [1]]] * 2
    assert side_by_side(lambda: first.agree("x", "mine"), lambda: second.agree("x", "other")) == ["mine"] * 2
    assert side_by_side(lambda: first.agree("x", "later"), lambda: second.agree("x", None)) == ["later"] * 2


def test_a_host_s_other_ranks_wait_until_the_first_is_done(two: list[RanksMeeting]) -> None:
    order = []

    def enter(met: RanksMeeting) -> None:
        with met.one_by_host("data") as first:
            time.sleep(0.2 if first else 0.0)
            order.append(first)

    assert side_by_side(lambda: enter(two[1]), lambda: enter(two[0])) == [None, None]
    assert order == [True, False]


def test_each_host_has_a_first_rank_whatever_number_its_launcher_gives_it(
    two: list[RanksMeeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCAL_RANK is the rank where a launcher does not set it, so none of the second host is number 0."""
    names = iter(["host-a", "host-b"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))

    def enter(met: RanksMeeting) -> bool:
        with met.one_by_host("data") as first:
            return first

    assert side_by_side(lambda: enter(two[0]), lambda: enter(two[1])) == [True, True]


def test_whoever_waits_hears_of_a_failure(two: list[RanksMeeting]) -> None:
    first, second = two
    waits, says = side_by_side(lambda: first.gather("x"), lambda: second.is_to_say(UserError("no such set")))
    assert isinstance(waits, PeerFailed)
    assert (waits.rank, waits.fields["reason"], waits.fields["exit_code"]) == (1, "user", EXIT_USER)
    assert "failed: UserError: no such set" in str(waits)
    assert says is True
    assert first.is_to_say(waits) is False


def test_a_cause_that_was_heard_is_known_when_its_rank_is_gone_with_the_store() -> None:
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = TCPStore("127.0.0.1", held.port, is_master=False, wait_for_workers=False)
    ours, leader = Peers(own, 1, 2), Peers(held, 0, 2)
    leader.explain(RunFailed("3 saves in a row failed", "disk"))
    assert ours.first() is not None
    del leader, held
    cause = ours.explain(RuntimeError("[gloo] Connection closed by peer"))
    assert cause is not None
    assert (cause.rank, cause.fields["reason"]) == (0, "disk")


def test_a_collective_that_finds_no_memory_is_the_cause_and_not_another_rank_s_end() -> None:
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    full = DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'")
    ours = Peers(held, 1, 2)
    assert ours.explain(full) is None
    cause = ours.first()
    assert cause is not None
    assert (cause.rank, cause.fields["reason"]) == (1, "out_of_memory")


@pytest.mark.parametrize("error", [UserError("the same on both"), RunFailed("no number", "diverged")])
def test_what_all_ranks_refuse_is_said_by_rank_0(two: list[RanksMeeting], error: Exception) -> None:
    first, second = two
    assert side_by_side(lambda: second.is_to_say(error), lambda: first.is_to_say(error)) == [False, True]


def test_a_rank_that_only_hears_of_a_refusal_ends_after_it_is_said(two: list[RanksMeeting]) -> None:
    first, second = two

    def hears() -> tuple[bool, bool]:
        with pytest.raises(PeerFailed) as heard:
            first.gather("x")
        return first.is_to_say(heard.value), first.store.check(["said"])

    said = side_by_side(lambda: second.is_to_say(UserError("on rank 1 alone")), hears)
    assert said == [True, (False, True)]


@pytest.mark.parametrize("gets_on", [True, False])
def test_what_rank_0_holds_is_waited_for_as_long_as_it_gets_on(
    two: list[RanksMeeting], monkeypatch: pytest.MonkeyPatch, gets_on: bool
) -> None:
    monkeypatch.setattr("harness.distributed.meeting.STALL_S", 1.0)
    first, second = two
    over = threading.Event()

    def hold() -> None:
        with first.holding(time.monotonic if gets_on else lambda: "block 3"):
            over.wait(3)

    def fail() -> bool:
        second.leave(RunFailed("boom"))
        return over.is_set()

    def end() -> None:
        time.sleep(3)
        over.set()

    assert side_by_side(hold, end, fail)[2] == gets_on


def test_a_rank_that_is_stopped_before_the_loop_stops_all(two: list[RanksMeeting]) -> None:
    first, second = two
    waits, _ = side_by_side(lambda: first.gather("x"), lambda: second.leave(Stopped(EXIT_STOPPED)))
    assert waits.fields["exit_code"] == EXIT_STOPPED


def test_a_start_hears_nothing_of_the_one_before(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher keeps its store: the first start left a directory, and all its keys."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))

    def join(rank: int, after: float = 0.0) -> tuple[str, dict[str, Any]]:
        time.sleep(after)
        own = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        mine, job = rendezvous._met(Ranks(rank, 2, rank), own, 20.0)
        return mine.compare_set("of", "", str(time.monotonic())).decode(), job

    (one, job), (same, _) = side_by_side(lambda: join(0), lambda: join(1))
    assert (one, job) == (same, {})
    meet(store, 0, "start").keep(Path("/runs/one"))
    (other, job), (same, same_job) = side_by_side(lambda: join(0), lambda: join(1, after=0.2))
    assert other == same != one
    assert job == same_job == {"path": "/runs/one"}
    assert meet(store, 1, "again", job).earlier == Path("/runs/one")


def test_a_job_that_was_refused_or_is_to_end_is_not_tried_again(
    store: TCPStore, two: list[RanksMeeting]
) -> None:
    two[0].is_to_say(UserError("no"))
    assert json.loads(store.get("harness/job")) == {"ended": EXIT_USER}
    assert meet(store, 0, "again", {"ended": EXIT_USER}).ended == EXIT_USER


class Hosts:
    """What each rank, which is a thread here, reads of a checkpoint's files, and the host that it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.hashed = threading.local(), list[tuple[str, str]]()
        monkeypatch.setattr(socket, "gethostname", lambda: self.host.name)
        monkeypatch.setattr(checkpoint_files, "sha256_file", self._sha256_file)

    def _sha256_file(self, path: Path) -> str:
        self.hashed.append((self.host.name, path.name))
        return sha256_file(path)

    def open(self, two: list[RanksMeeting], names: str, *paths: Path, resume: str | None = None) -> list[Any]:
        """What each rank finds to go on from, or its error; `resume` None: its path."""

        def find(rank: int) -> Any:
            self.host.name, path = names[rank], paths[rank % len(paths)]
            return auto_resume.find(TrainConfig(resume=resume or str(path)), path, two[rank])

        return side_by_side(lambda: find(0), lambda: find(1))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of two steps, the later one damaged."""
    for step in (4, 8):
        checkpoint_writer.write(tmp_path, **parts(step))
    (step_dir(tmp_path, 8) / "optimizer.pt").write_bytes(b"cut")
    return tmp_path


@pytest.mark.parametrize("names", ["aa", "ab"])
def test_each_host_hashes_every_file_of_a_checkpoint_once(
    two: list[RanksMeeting], hosts: Hosts, run: Path, names: str
) -> None:
    for found in hosts.open(two, names, step_dir(run, 4)):
        assert found.saved.step == 4
    assert sorted(hosts.hashed) == sorted((name, file) for name in {*names} for file in checkpoint.FILES)


def test_what_one_rank_finds_damaged_is_damaged_for_all(
    two: list[RanksMeeting], hosts: Hosts, run: Path
) -> None:
    for error in hosts.open(two, "aa", step_dir(run, 8)):
        assert isinstance(error, UserError)
        assert "optimizer.pt has 3 bytes" in str(error)
    for found in hosts.open(two, "aa", run, resume="auto"):
        assert found.saved.step == 4
        assert [*found.damaged] == [step_dir(run, 8)]


def test_a_host_whose_own_copy_is_damaged_is_named(
    two: list[RanksMeeting], hosts: Hosts, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Path(shutil.copytree(run, tmp_path_factory.mktemp("other") / "run"))
    (step_dir(other, 4) / "rng.pt").write_bytes(b"cut")
    for error in hosts.open(two, "ab", step_dir(run, 4), step_dir(other, 4)):
        assert isinstance(error, UserError)
        assert re.search(r"rng\.pt has 3 bytes, .* \(on b\)", str(error))


def test_hosts_that_find_different_checkpoints_are_refused(
    two: list[RanksMeeting], hosts: Hosts, run: Path
) -> None:
    for paths in ((step_dir(run, 4), step_dir(run, 8)), (run, run / "none")):
        resume = "auto" if paths[1] == run / "none" else None
        for error in hosts.open(two, "ab", *paths, resume=resume):
            assert isinstance(error, UserError)
            assert re.search(
                r"rank 0 on a begins from step-\S+ \(.* rank 1 on b from (step|nothing)", str(error)
            )


WORDS = ["loader.batch_size=8", "run.name=one"]


def again(words: list[str], path: Path | None) -> list[str]:
    meeting = Meeting()
    meeting.earlier = path
    return elastic.as_meant_now(CommandLine([], words), meeting).overrides


def test_a_job_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    place = f"hydra.run.dir='{tmp_path}'"
    assert again(WORDS, None) == WORDS
    assert again(WORDS, tmp_path) == [*WORDS, "resume=auto", place]
    branch = [*WORDS, "resume='runs/other'", "resume_accept=[data,loader.batch_size]"]
    assert again(branch, tmp_path) == [*branch, place], "it has no checkpoint of its own yet"
    checkpoint_writer.write(tmp_path, **parts(4))
    assert again(branch, tmp_path) == [*WORDS, "resume_accept=[data]", "resume=auto", place]
    assert again([*WORDS, "hydra.run.dir=x"], tmp_path) == [*WORDS, "resume=auto", place]


def test_restarts_that_a_store_does_not_outlive_need_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(UserError, match=r"--max-restarts=3: .* Say it .*: resume=auto run\.name=NAME"):
        again(WORDS, None)
    assert again([*WORDS, "resume=auto"], None) == [*WORDS, "resume=auto"]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert again(WORDS, None) == WORDS


def test_a_command_to_go_on_begins_as_many_processes_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert re.fullmatch(r"torchrun --nproc-per-node=8 \S*train\.py resume=x", command("train", "resume=x"))
    assert re.fullmatch(r"python \S*sample\.py x", command("sample", "x"))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    words = "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT "
    assert command("train", "resume=x").startswith(words)


def test_a_gpu_is_not_shared() -> None:
    with pytest.raises(UserError, match=r"device=cuda:0, but this is rank 3 of 4, number 1 on its host"):
        select_device("cuda:0", Ranks(3, 4, 1))
    assert select_device("cpu", Ranks(3, 4, 1)).type == "cpu"


def test_a_script_in_several_processes_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["scripts/sample.py", "runs/one"])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            entry._main_alone("harness.training.sample")
        assert end.value.code == EXIT_USER
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert said.endswith("Start it without torchrun:\n  python scripts/sample.py runs/one\n")
