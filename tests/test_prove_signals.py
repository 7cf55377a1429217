"""The proof about signals runs as a real process, with one signal during the imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers_forks import ROOT, forked
from tests.helpers_runs import write_text_set

pytestmark = pytest.mark.heavy


def test_the_proof_sends_a_signal_goes_on_and_compares(tmp_path: Path) -> None:
    write_text_set(tmp_path / "data" / "npy-stream", val_tokens=2001)
    options = ["--phases=import", "--kinds=SIGTERM", "--trials=1", f"--data={tmp_path / 'data'}"]
    done = forked("scripts/prove_signals.py", *options, f"--folder={tmp_path}", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = done.stdout.splitlines()[2:]
    assert row.startswith("| import | 75, ")
    assert row.endswith(" s | 1 of 1 |")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
