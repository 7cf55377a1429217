"""Which device a job of a sweep trains on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def device_for(name: str, folder: Path) -> Iterator[str]:
    """The value of `device` for a job of the sweep in `folder`, as long as the block lasts."""
    yield name
