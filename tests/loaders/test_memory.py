"""Batches are made in memory that is there, not in pages that the system gives anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FAULTS = """
import resource
import numpy as np
from harness.loaders.memory import keep_freed_memory

def faults():
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        batch = [np.ones(100_000) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun

print(faults(), keep_freed_memory(), faults(), faults())
"""


def test_batches_of_several_arrays_cost_no_page_faults() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    before, _, _, after = result.stdout.split()
    assert int(before) > 5000
    assert int(after) < 500
