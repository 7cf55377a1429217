"""The comparison of loaders: what it measures of a way of reading, and what it says of the figures."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers_forks import ROOT, forked

sys.path.insert(0, str(ROOT / "scripts"))

from peers import BATCH_TOKENS, TOKENS_FILE, Pair
from peers.forks import Failed, in_fork
from peers.measuring import Task, measure
from peers.own_pages import own_pages
from peers.page import page
from peers.plain import Memmap
from peers.report import comparison, described
from peers.table import IN_ORDER, OURS, PEERS, SHUFFLED, Peer


class Forgetful(Memmap):
    """A position that is one batch off after a resume."""

    def seek(self, state: bytes) -> None:
        self.batch = int(state) + 1


class Swapped(Memmap):
    """Targets where the inputs belong."""

    def next_batch(self) -> Pair:
        inputs, targets = super().next_batch()
        return targets, inputs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve batches of tokens, and the readers above as a module of the peers."""
    (tmp_path / "ours").mkdir()
    tokens = np.random.default_rng(0).integers(0, 50_257, 12 * BATCH_TOKENS + 1)
    tokens.astype(np.uint16).tofile(tmp_path / "ours" / TOKENS_FILE)
    monkeypatch.setitem(sys.modules, "peers.wrong", sys.modules[__name__])
    return tmp_path


def task(folder: Path, module: str, reader: str) -> Task:
    return Task(Peer("one", module, reader, orders=(IN_ORDER,)), IN_ORDER, folder, 0.001, folder / "log.txt")


@pytest.mark.heavy
def test_a_way_that_resumes_elsewhere_is_not_called_exact(folder: Path) -> None:
    right, wrong = measure(task(folder, "plain", "Memmap")), measure(task(folder, "wrong", "Forgetful"))
    assert (right["exact"], wrong["exact"]) == (True, False)
    assert right["state_bytes"] == len("10")
    for row in (right, wrong):
        times = row["first_batch_ms"] + row["resume_ms"] + row["seek_ms"]
        assert min(times + row["tokens_per_s"] + row["floor"]) > 0
        assert len(row["tokens_per_s"]) == len(row["floor"]) == 5
        assert (row["children"], row["children_mb"]) == (0, 0)


def test_a_way_that_delivers_something_else_has_no_figures(folder: Path) -> None:
    with pytest.raises(Failed, match="targets are not the tokens behind the inputs"):
        measure(task(folder, "wrong", "Swapped"))


def test_a_fork_that_dies_says_how(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="exit code -9"):
        in_fork(_killed, log=tmp_path / "log.txt")
    with pytest.raises(Failed, match=r"ZeroDivisionError: .* by zero"):
        in_fork(divmod, 1, 0, log=tmp_path / "log.txt")
    assert "Traceback" in (tmp_path / "log.txt").read_text()


_PAGES = np.ones((2000, 4096), np.uint8)


def test_a_fork_with_pages_of_its_own_copies_none_when_it_writes(tmp_path: Path) -> None:
    shared, own = (in_fork(_faults, alone, log=tmp_path / "log.txt") for alone in (False, True))
    assert shared >= len(_PAGES)
    assert own < len(_PAGES) / 10


def _faults(alone: bool) -> int:
    if alone:
        own_pages()
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _PAGES[:, 0] = 2
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def row(name: str, **figures: Any) -> dict[str, Any]:
    """What `measure` gives, with the same figures unless they are said."""
    usual: dict[str, Any] = {
        "order": SHUFFLED,
        "again": False,
        "own_state": True,
        "how": f"{name} as usual",
        "tokens_per_s": [1e9, 2e9, 3e9],
        "floor": [4e9, 4e9, 4e9],
        "first_batch_ms": [1.0, 5.0, 3.0],
        "resume_ms": [2.0],
        "seek_ms": [1.0],
        "anonymous_mb": 1.5,
        "imported_mb": 0.51,
        "children": 0,
        "children_mb": 0.0,
        "state_bytes": 300,
        "exact": True,
    }
    return {"name": name} | usual | figures


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    """Ours, one ahead of one or both of them, one behind, a counter of one's own, and a failure."""
    rows = [
        row(OURS[0]),
        row(OURS[1], tokens_per_s=[4e9, 4e9, 4e9]),
        row("quick", tokens_per_s=[3e9, 3e9, 3e9], state_bytes=20, exact=False),
        row(
            "slow",
            tokens_per_s=[1e6, 1e6, 1e6],
            resume_ms=[2000.0],
            seek_ms=[],
            children=2,
            children_mb=300.0,
        ),
        row("counter", state_bytes=2, own_state=False),
        {"name": "broken", "order": SHUFFLED, "again": False, "own_state": True, "error": "KeyError: 'x'"},
        row(OURS[0], again=True, tokens_per_s=[1e9, 1e9, 1e9]),
    ]
    peers = [*PEERS, Peer("absent", "nowhere", "Nothing", package="no-such-distribution")]
    return described(rows, peers, tmp_path, 1000, 1.0)


def test_losses_are_said_in_words_drawn_from_the_figures(result: dict[str, Any]) -> None:
    lines = result["comparison"]
    both = "{0} by default, {0} with prefetch=0; ahead of both {1}".format
    speed = "50 % by default, 100 % with prefetch=0; ahead of both nobody of 3"
    assert f"shuffled, speed: {speed}; of the slower or larger one quick 75 %" in lines
    assert f"shuffled, state: {both('300 B', 'quick 20 B')}" in lines
    assert f"shuffled, resume, new process: {both('2 ms', 'nobody of 3')}" in lines
    assert f"shuffled, resume, open: {both('1 ms', 'nobody of 2')}" in lines
    assert "shuffled, other batches after a resume than without: quick" in lines
    assert comparison(result["rows"], IN_ORDER) == []
    assert result["drift"] == {f"{OURS[0]}, {SHUFFLED}": 0.5}


def test_the_page_shows_what_failed_and_what_is_not_installed_without_zeros(result: dict[str, Any]) -> None:
    text = page(result)
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines() if "|" in line}
    assert cells["quick"][1:4] == ["3,000", "75 %", "3 ms"]
    assert cells["quick"][-1] == "NO |"
    assert cells["slow"][4:8] == ["2 s", "-", "1.5 MB (0.5)", "300 MB in 2"]
    assert cells["counter"][-2] == "2 B (*)"
    assert cells["broken"][1] == "failed: KeyError: 'x'"
    assert [name for name in cells if name in ("quick", OURS[0], "slow", "broken")] == [
        "quick",
        OURS[0],
        "slow",
        "broken",
    ]
    assert "pip install" in text
    assert "no-such-distribution" in text
    assert "**quick**: quick as usual" in text
    json.dumps(result)


@pytest.mark.heavy
def test_one_command_measures_and_writes_the_page(tmp_path: Path) -> None:
    words = ["--tokens=400000", "--seconds=0.001", "--only=npy|nanoGPT|h5py"]
    files = [f"--folder={tmp_path / 'files'}", f"--write={tmp_path / 'page'}"]
    process = forked("scripts/bench_peers.py", *words, *files, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    result = json.loads((tmp_path / "page" / "loader.json").read_text())
    measured = {(row["name"], row["order"]) for row in result["rows"]}
    both = (IN_ORDER, SHUFFLED)
    assert measured == {("nanoGPT's way", SHUFFLED), *product((*OURS, "h5py slices"), both)}
    assert all(row["exact"] for row in result["rows"] if "exact" in row)
    assert list(result["drift"]) == [f"{name}, {order}" for name in OURS for order in both]
    assert (tmp_path / "page" / "loader.md").read_text() == page(result)
    assert (tmp_path / "page" / "loader.md").read_text() in process.stdout
