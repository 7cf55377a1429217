"""A function in a forked process: what it imports, maps and starts ends with it."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Failed(Exception):
    """The function raised, was killed or took longer than its limit; the text says which."""


def in_fork(function: Callable[..., Any], *arguments: Any, log: Path, limit: float = 300) -> Any:
    """What `function` returns within `limit` seconds; what is printed meanwhile goes to the end of `log`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_call, args=(function, arguments, theirs, log)
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            raise Failed(f"no answer within {limit:.0f} s")
        result, error = ours.recv()
    except EOFError:
        process.join()
        raise Failed(f"ended with exit code {process.exitcode}") from None
    finally:
        process.join(10)  # a library's threads or workers may keep it from ending
        process.kill()
        process.join()
    if error:
        raise Failed(error)
    return result


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], result: Connection, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        result.send((function(*arguments), None))
    except Exception as error:
        os.write(file, traceback.format_exc().encode())  # whatever sys.stderr is here
        result.send((None, f"{type(error).__name__}: {error}"))
