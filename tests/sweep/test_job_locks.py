"""One process works on a job: however many want to, and however their owners died."""

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
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.sweep import lock
from harness.sweep.lock import Owner, claimed
from tests.helpers_runs import ROOT

JOB = "0123456789abcdef" * 4
_HEAD = """
import os, socket, sys, time
from pathlib import Path
from harness.sweep import lock
from harness.sweep.lock import claimed

def say(*words):
    print(*words, flush=True)
"""
HOLDS = """
with claimed(Path(sys.argv[1]), sys.argv[2]) as owner:
    say("ours" if owner is None else f"theirs {owner.pid}")
    sys.stdin.readline()
"""


@contextmanager
def process(body: str, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process of `body`; killed at the end where it still lives."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HEAD + body, *map(str, words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def lock_file(folder: Path) -> Path:
    return folder / ".locks" / f"{JOB}.json"


def write_lock(folder: Path, values: Any, age: float = 0.0) -> Path:
    """A lock's file as somebody may have left it, `age` seconds ago."""
    path = lock_file(folder)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(values if isinstance(values, bytes) else json.dumps(values).encode())
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def held_by_us(folder: Path) -> dict[str, Any]:
    """What is in the file of a lock that this process holds."""
    with claimed(folder, JOB) as owner:
        assert owner is None
        values: dict[str, Any] = json.loads(lock_file(folder).read_text())
        return values


def owner_of(folder: Path) -> Owner | None:
    with claimed(folder, JOB) as owner:
        return owner


def wait_until(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.01)


def test_two_processes_that_race_for_a_hundred_jobs_do_each_once(tmp_path: Path) -> None:
    body = """
folder, jobs, turns = Path(sys.argv[1]), range(100), 0
say("ready")
sys.stdin.readline()
for job in jobs:
    with claimed(folder, f"{job:064x}") as owner:
        if owner is None and not (folder / f"done-{job}").exists():
            os.close(os.open(folder / f"inside-{job}", os.O_CREAT | os.O_EXCL))
            time.sleep(0.0005)
            os.unlink(folder / f"inside-{job}")
            os.close(os.open(folder / f"done-{job}", os.O_CREAT | os.O_EXCL))
            turns += 1
say(turns)
"""
    with process(body, tmp_path) as one, process(body, tmp_path) as two:
        assert [line(one), line(two)] == ["ready", "ready"]
        for child in (one, two):
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        turns = [int(line(one)), int(line(two))]
        assert [child.wait() for child in (one, two)] == [0, 0]
    assert sum(turns) == 100
    assert len(list(tmp_path.glob("done-*"))) == 100
    assert [path.name for path in (tmp_path / ".locks").iterdir()] == ["guard"]


def test_a_killed_owners_lock_is_taken_over_at_once_and_by_one_process_alone(tmp_path: Path) -> None:
    with process(HOLDS, tmp_path, JOB) as first:
        assert line(first) == "ours"
        owner = owner_of(tmp_path)
        assert owner is not None
        assert owner.pid == first.pid
        first.kill()
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
        heirs = [process(HOLDS, tmp_path, JOB) for _ in range(4)]
        children = [heir.__enter__() for heir in heirs]
        try:
            said = [line(child) for child in children]
            winner = children[said.index("ours")]
            assert sorted(said) == ["ours", *[f"theirs {winner.pid}"] * 3]
        finally:
            for heir in heirs:
                heir.__exit__(None, None, None)
    assert owner_of(tmp_path) is None


def test_an_owner_is_told_by_more_than_its_pid(tmp_path: Path) -> None:
    values = held_by_us(tmp_path)
    write_lock(tmp_path, values, age=1000)
    assert owner_of(tmp_path) == Owner(
        os.getpid(), values["process"]["host"], values["started"], lock._iso(time.time() - 1000)
    )
    values["process"]["start"] -= 1  # the pid was given out again
    write_lock(tmp_path, values)
    assert owner_of(tmp_path) is None


@pytest.mark.parametrize("key", ["host", "boot_id", "pid_namespace"])
def test_an_owner_elsewhere_is_dead_after_a_minute_of_silence(tmp_path: Path, key: str) -> None:
    values = held_by_us(tmp_path)
    values["process"] |= {key: "elsewhere", "pid": 2**22 + 1}
    write_lock(tmp_path, values, age=50)
    assert owner_of(tmp_path) is not None
    write_lock(tmp_path, values, age=70)
    assert owner_of(tmp_path) is None


def test_silence_is_measured_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = held_by_us(tmp_path)
    values["process"]["host"] = "elsewhere"
    write_lock(tmp_path, values)
    monkeypatch.setattr(lock.time, "time", lambda now=time.time: now() + 1e6)
    assert owner_of(tmp_path) is not None


def damages(path: Path, kind: str) -> None:
    path.unlink()
    match kind:
        case "folder":
            (path / "with").mkdir(parents=True)
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("nowhere")
        case "future":
            path.write_text("")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "future"])
def test_what_is_no_lock_at_all_blocks_for_a_minute_at_most(tmp_path: Path, kind: str) -> None:
    path = write_lock(tmp_path, {})
    damages(path, kind)
    if kind != "future":
        assert owner_of(tmp_path) == Owner(None, None, None, lock._iso(path.lstat().st_mtime))
    when = time.time() + (1e9 if kind == "future" else -70)
    os.utime(path, (when, when), follow_symlinks=False)
    assert owner_of(tmp_path) is None
    assert not path.exists()


_NUMBERS = st.integers() | st.floats() | st.none() | st.text(max_size=3) | st.booleans()
_PROCESSES = st.fixed_dictionaries(
    dict.fromkeys(("pid", "host", "start", "boot_id", "pid_namespace"), _NUMBERS)
)
_RECORDS = st.fixed_dictionaries({"process": _PROCESSES}, optional={"started": _NUMBERS, "token": _NUMBERS})


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=50) | _RECORDS | st.recursive(_NUMBERS, st.lists))
def test_a_damaged_lock_never_blocks_for_ever(tmp_path: Path, content: Any) -> None:
    write_lock(tmp_path, content, age=1)
    owner_of(tmp_path)
    write_lock(tmp_path, content, age=70)
    assert owner_of(tmp_path) is None


def test_the_lock_is_given_back_whatever_ends_the_block(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), claimed(tmp_path, JOB) as owner:
        assert owner is None
        assert lock_file(tmp_path).exists()
        1 / 0  # noqa: B018
    assert not lock_file(tmp_path).exists()


def test_an_owner_keeps_its_lock_alive_and_puts_back_what_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)
    path = lock_file(tmp_path)
    with claimed(tmp_path, JOB) as owner:
        assert owner is None
        os.utime(path, (0, 0))
        wait_until(lambda: path.stat().st_mtime > 1e9)
        path.unlink()
        wait_until(path.exists)
        assert owner_of(tmp_path) is not None
    assert not path.exists()


@pytest.mark.parametrize("has_ended", [False, True], ids=["works", "has ended"])
def test_an_owner_that_was_frozen_and_lost_its_lock_ends_without_another_word(
    has_ended: bool, tmp_path: Path
) -> None:
    body = """
socket.gethostname = lambda: "elsewhere"
lock.HEARTBEAT_SECONDS = lock.SILENT_SECONDS = 0.05
with claimed(Path(sys.argv[1]), sys.argv[2]) as owner:
    say(owner)
    time.sleep(60)
    say("on")
"""
    with process(body, tmp_path, JOB) as child, contextlib.ExitStack() as other:
        assert line(child) == "None"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        time.sleep(0.1)
        os.utime(lock_file(tmp_path), (time.time() - 70, time.time() - 70))
        assert other.enter_context(claimed(tmp_path, JOB)) is None
        if has_ended:
            other.close()
        before = lock_file(tmp_path).read_bytes() if lock_file(tmp_path).exists() else None
        os.kill(child.pid, signal.SIGCONT)
        out, err = child.communicate(timeout=60)
        assert before == (lock_file(tmp_path).read_bytes() if lock_file(tmp_path).exists() else None)
    assert (child.returncode, out) == (75, "")
    assert err.count("\n") == 1
    assert ("another process may have" if has_ended else f"pid {os.getpid()} on") in err
    assert "ends without writing anything more" in err
