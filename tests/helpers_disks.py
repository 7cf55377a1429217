"""Disks that refuse: by real limits of the operating system, which need no privilege."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: writing more fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """The folder gives nobody leave to write; one who may write everywhere becomes somebody who may not."""
    mode, user = folder.stat().st_mode, os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)
        folder.chmod(mode)
