"""The proof about audits and the chain's benchmark run as real processes, in a small form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers_forks import ROOT, forked

pytestmark = pytest.mark.heavy


def _script(name: str, *words: str) -> str:
    done = forked(f"scripts/{name}", *words, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_proof_kills_audits_changes_and_finds_every_step(tmp_path: Path) -> None:
    words = ["--pairs=hdf5-block_shuffle", "--kills=1", "--steps=30", f"--folder={tmp_path}"]
    printed = _script("prove_audit.py", *words)
    row = next(line for line in printed.splitlines() if "hdf5-block_shuffle" in line)
    assert row.split("|")[2].strip() == "1"
    assert row.count("yes") == 4
    assert "1 of 1 pairs as it must be" in printed
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_of_the_chain_measures_steps_and_audits(tmp_path: Path) -> None:
    words = ["--pairs=1", "--steps=1", "--tokens=200000", "--threads=2", f"--folder={tmp_path}"]
    printed = _script("bench_chain.py", *words, f"--json={tmp_path / 'chain.json'}")
    result = json.loads((tmp_path / "chain.json").read_text())
    assert [line["name"] for line in result["steps"]] == ["nano", "tiny-32x1024"]
    assert all(line["share"] == line["hash_ms"] / line["step_ms"] for line in result["steps"])
    assert [line["loader"] for line in result["audits"]] == ["sequential", "sliding_window"]
    assert "M tokens/s; reading the same batches" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["chain.json"]
