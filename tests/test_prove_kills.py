"""The proof about kills runs as a real process, with one kill of each set it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers_forks import ROOT, forked

pytestmark = pytest.mark.heavy


def test_the_proof_kills_and_counts_and_finds_nothing_wrong(tmp_path: Path) -> None:
    words = [
        "--random=1",
        "--no-strace",
        "--documents=120",
        "--scenarios=gzip-rows,append",
        f"--folder={tmp_path}",
    ]
    done = forked("scripts/prove_kills.py", *words, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[:4] for row in rows] == [["gzip-rows", "1", "0", "0"], ["append", "1", "0", "0"]]
    for row in rows:
        left_nothing, old, new, _, wrong = map(int, row[4:])
        assert left_nothing + old + new >= 1
        assert wrong == 0
    assert list(tmp_path.iterdir()) == []
