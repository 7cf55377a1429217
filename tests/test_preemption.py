"""What a signal does to a process in each phase, whatever its main thread is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.helpers_runs import ROOT

# `block` is one call into C that lasts longer than any test: Python's own handlers never run in it.
_HEAD = """
import contextlib, hashlib, os, signal, sys, threading, time
from harness import preemption

def say(*words):
    print(*words, flush=True)

def block(*words):
    threading.Timer(0.2, say, words).start()  # once inside
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
_TAIL = "\npreemption.run(main)\n"


@contextmanager
def process(body: str) -> Iterator[subprocess.Popen[str]]:
    """A command whose life is `body`, which defines `main`; killed at the end where it still lives."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HEAD + body + _TAIL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def ended(body: str, *numbers: int, gap: float = 0.05) -> tuple[int, str, str]:
    """The exit code and output of a command that is sent signals, `gap` s apart, once it has said a line."""
    with process(body) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        for number in numbers:
            child.send_signal(number)
            time.sleep(gap)
        out, err = child.communicate(timeout=60)
        return child.returncode, first + out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_the_loop_unwinds_and_exits_with_75(number: signal.Signals) -> None:
    body = """
def main():
    try:
        say("ready")
        time.sleep(60)
    finally:
        say("closed")
"""
    code, out, err = ended(body, number)
    assert (code, out) == (75, "ready\nclosed\n")
    what = "ending, the same command goes on from what is on disk; a second signal leaves at once"
    assert err == f"{number.name}: {what}\n"


def test_a_process_whose_main_thread_does_not_answer_is_ended_all_the_same() -> None:
    body = """
preemption.UNWIND_SECONDS = 0.2

def main():
    with preemption.listening() as stop:
        stop.record = lambda code: say("recorded", code)
        block("ready")
"""
    code, out, _ = ended(body, signal.SIGTERM)
    assert (code, out) == (75, "ready\nrecorded 75\n")


@pytest.mark.parametrize("where", ["contextlib.nullcontext()", "stop.asking()"])
def test_a_second_signal_leaves_at_once_from_inside_of_one_long_call(where: str) -> None:
    body = f"""
def main():
    with preemption.listening() as stop:
        stop.record = lambda code: say("recorded", code)
        with {where}:
            block("ready")
"""
    code, out, err = ended(body, signal.SIGTERM, signal.SIGTERM)
    assert (code, out) == (130, "ready\nrecorded 130\n")
    assert "left at once; what was saved before is whole" in err


def test_a_disk_that_does_not_answer_keeps_nobody_from_leaving() -> None:
    body = """
def main():
    with preemption.listening() as stop, stop.asking():
        stop.record = lambda code: time.sleep(60)
        block("ready")
"""
    assert ended(body, signal.SIGINT, signal.SIGTERM)[0] == 130


def test_a_signal_in_the_loop_only_asks() -> None:
    body = """
def main():
    with preemption.listening() as stop, stop.asking():
        say("ready")
        while stop.name is None:
            time.sleep(0.01)
        say("saved after", stop.name)
    raise SystemExit(75)
"""
    code, out, err = ended(body, signal.SIGUSR1)
    assert (code, out) == (75, "ready\nsaved after SIGUSR1\n")
    assert "SIGUSR1: stopping at the next safe point, which is saved" in err


def test_what_is_sent_to_the_process_and_to_its_group_is_one_signal() -> None:
    body = """
def main():
    with preemption.listening() as stop, stop.asking():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        say("saved after", stop.name)
"""
    assert ended(body)[:2] == (0, "saved after SIGTERM\n")


def test_a_signal_that_somebody_swallowed_is_raised_before_the_loop() -> None:
    body = """
def main():
    with preemption.listening() as stop:
        try:
            say("ready")
            time.sleep(60)
        except BaseException:
            pass
        with stop.asking():
            say("trained")
"""
    assert ended(body, signal.SIGTERM)[:2] == (75, "ready\n")


def test_an_import_that_turns_it_into_another_error_shows_no_traceback() -> None:
    body = """
def main():
    try:
        say("ready")
        time.sleep(60)
    except BaseException as error:
        raise ImportError("initialization failed") from error
"""
    code, _, err = ended(body, signal.SIGINT)
    assert code == 75
    assert "Traceback" not in err


def test_after_the_loop_a_signal_changes_nothing_but_how_long_the_end_may_take() -> None:
    body = """
preemption.UNWIND_SECONDS = 1.0

def main():
    with preemption.listening() as stop:
        stop.record = lambda code: say("recorded", code)
        with stop.asking():
            pass
        stop.ends(0)
        say("ready")
        time.sleep(0.2)
        block("still there")
"""
    assert ended(body, signal.SIGTERM)[:2] == (0, "ready\nstill there\nrecorded 0\n")


def test_the_next_job_of_a_process_that_was_told_to_stop_is_not_begun() -> None:
    body = """
def main():
    for job in (1, 2):
        with preemption.listening() as stop:
            say("job", job)
            with stop.asking():
                while stop.name is None:
                    time.sleep(0.01)
            stop.ends(0)
"""
    assert ended(body, signal.SIGTERM)[:2] == (75, "job 1\n")


def test_what_ignored_ctrl_c_at_its_start_goes_on_ignoring_it() -> None:
    body = """
def main():
    say("ready")
    time.sleep(0.3)
    say("done")
"""
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # what nohup and & in a script do
    assert ended(ignoring + body, signal.SIGINT)[:2] == (0, "ready\ndone\n")


def test_a_forked_childs_signals_are_its_own() -> None:
    body = """
def main():
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    time.sleep(0.3)
    say("parent")
"""
    assert ended(body)[:2] == (0, "-15\nparent\n")


def test_output_that_nobody_got_is_a_failure() -> None:
    body = """
def main():
    print("an answer")  # waits in the buffer
    sys.stderr.close()
"""
    code = _HEAD + body + _TAIL
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, cwd=ROOT, timeout=60)
    assert done.returncode == 1


def test_the_signals_are_answered_before_anything_large_is_imported() -> None:
    code = (
        "import harness.entry, sys; print(sorted({'hydra', 'omegaconf', 'yaml', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "[]\n"
