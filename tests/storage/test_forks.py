"""What is open belongs to one process, and a forked child knows that it is another."""

from __future__ import annotations

import os

from harness.storage import forks


def test_a_forked_child_has_its_own_pid() -> None:
    assert forks.pid == os.getpid()
    child = os.fork()
    if not child:
        os._exit(forks.pid != os.getpid())
    assert os.waitpid(child, 0)[1] == 0
