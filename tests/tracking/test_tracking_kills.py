"""W&B after real SIGKILLs, of its helper process too or of ours alone: nothing twice, nothing lost."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from harness.config import TrainConfig
from harness.launch import launch
from harness.tracking.jsonl import MetricsFile
from harness.tracking.wandb_service import helpers
from harness.tracking.wandb_tracker import WandbTracker
from tests.helpers_forks import CONTEXT
from tests.helpers_runs import rows, run, tiny_config, write_text_set
from tests.tracking.test_tracking_resumes import check_mirror
from tests.tracking.test_tracking_runs import own_home, tracked  # noqa: F401

pytestmark = pytest.mark.heavy


def test_after_any_history_of_kills_wandb_holds_every_row_once(tmp_path: Path) -> None:
    data, straight, path = write_text_set(tmp_path / "set"), tmp_path / "straight", tmp_path / "run"
    settings = {"checkpoint__interval": 3, "evaluation__interval": 2, "evaluation__sample_tokens": 0}
    run(tiny_config(data, **settings), straight)
    config = tracked(data, resume="auto", **settings)
    generator = random.Random(3)
    kills = 0
    # A moment: before a row is written, before it goes to W&B, or before the rows are made durable.
    while kills < 5 and killed(config, path, generator.randrange(2, 20), with_helper=kills % 2 == 0):
        kills += 1
    assert kills > 2
    assert not killed(config, path, moment=None)
    check_mirror(path)
    assert rows(path) == rows(straight)


def killed(config: TrainConfig, path: Path, moment: int | None, with_helper: bool = False) -> bool:
    """Run in a process that ends itself with SIGKILL just before a moment; whether it came to that."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_run, args=(config, path, moment, with_helper, dict(os.environ), theirs))
    child.start()
    theirs.close()
    try:
        step = ours.recv()
    except EOFError:
        step = None
    child.join(60)
    assert child.exitcode == (-signal.SIGKILL if step is None else 0)
    return step is None


def _run(
    config: TrainConfig, path: Path, moment: int | None, with_helper: bool, environment: dict[str, str],
    result: Connection,
) -> None:  # fmt: skip
    os.environ.update(environment)
    logging.getLogger("harness").propagate = False
    moments = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*arguments: object, **named: object) -> object:
            nonlocal moments
            moments += 1
            if moments == moment:
                for helper in helpers() if with_helper else ():
                    os.kill(helper, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counting

    for owner, name in ((MetricsFile, "append"), (MetricsFile, "sync"), (WandbTracker, "log")):
        setattr(owner, name, counted(getattr(owner, name)))
    result.send(launch(config, path).step)
