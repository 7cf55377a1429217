"""Where every command begins: signals are answered before anything large is imported."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
import time

from harness import preemption
from harness.errors import EXIT_AT_ONCE, EXIT_USER

_SAID_SECONDS = 1.0  # for rank 0 to be heard, before the launcher ends it for the end of another one


def train() -> None:
    """`train.py`, `harness-train`."""
    preemption.run(lambda: _main("harness.commandline.cli"))


def prepare() -> None:
    """`prepare_data.py`, `harness-prepare`. The same command goes on where it was stopped, so 75 here too."""
    preemption.run(lambda: _main_alone("harness.prepare.cli"))


def verify() -> None:
    """`verify_data.py`, `harness-verify`."""
    _until_ctrl_c("harness.prepare.verify_cli")


def convert() -> None:
    """`convert_data.py`, `harness-convert`."""
    _until_ctrl_c("harness.prepare.convert_cli")


def convert_checkpoint() -> None:
    """`convert_checkpoint.py`, `harness-convert-checkpoint`."""
    _until_ctrl_c("harness.checkpoints.convert_checkpoint")


def sample() -> None:
    """`sample.py`, `harness-sample`."""
    _until_ctrl_c("harness.training.sample")


def evaluate() -> None:
    """`evaluate.py`, `harness-evaluate`."""
    _until_ctrl_c("harness.training.evaluation_cli")


def inspect() -> None:
    """`inspect_batch.py`, `harness-inspect`."""
    _until_ctrl_c("harness.auditing.inspect_cli")


def find_batch() -> None:
    """`find_batch.py`, `harness-find-batch`."""
    _until_ctrl_c("harness.planning.find_batch")


def audit() -> None:
    """`audit_data.py`, `harness-audit`."""
    _until_ctrl_c("harness.auditing.audit_cli")


def sweep() -> None:
    """`sweep.py`, `harness-sweep`. A job that it runs is stopped as `train.py` is: it saves, then 75."""
    preemption.run(lambda: _main_alone("harness.sweep.plan_cli"))


def report() -> None:
    """`report.py`, `harness-report`."""
    _until_ctrl_c("harness.sweep.report_cli")


def _until_ctrl_c(module: str) -> None:
    """A command that keeps nothing to go on from: Ctrl-C is 130, other signals mean what they always do."""
    preemption.run(lambda: _main_alone(module), EXIT_AT_ONCE, (signal.SIGINT,))


def _main(module: str) -> None:
    importlib.import_module(module).main()


def _main_alone(module: str) -> None:
    """The same for all but `train.py`, which alone makes one thing of several processes."""
    count = os.environ.get("WORLD_SIZE") or "1"
    if count != "1":
        if os.environ.get("RANK", "0") == "0":
            print(
                f"error: {os.path.basename(sys.argv[0])} was started as one of several processes "
                f"(WORLD_SIZE={count}): each would do all of the work. Start it without torchrun:\n"
                f"  {shlex.join(['python', *sys.argv])}",
                file=sys.stderr,
            )
        else:
            time.sleep(_SAID_SECONDS)
        raise SystemExit(EXIT_USER)
    _main(module)
