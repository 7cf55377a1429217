"""Commands as processes of their own, forked from a server that has everything large imported.

A process that imports torch and its compiler takes seconds until it does anything. These begin at once, and
are real in all else: arguments, working directory, environment, output, signals, exit code. What a promise
about imports or the start of the interpreter needs is `subprocess`.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A worker of the test suite has one server, whatever is forked from it: so this is the one list of it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "safetensors.torch", "h5py", "wandb", "hydra", "harness.launch",
     "harness.commandline.hydra_app", "harness.distributed.fsdp", "harness.checkpoints.sharded_checkpoint",
     "harness.prepare.cli", "harness.auditing.audit", "harness.training.sample", "harness.sweep.parent"]
)  # fmt: skip
_SECONDS = 100


class Fork:
    """`python SCRIPT WORDS` in `cwd`, which runs; `script` is relative to the checkout."""

    def __init__(
        self, script: str, *words: str, cwd: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._command = [str(ROOT / script), *words]
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [os.path.join(self._folder.name, name) for name in ("stdout", "stderr")]
        environment = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"}
        arguments = (self._command, str(cwd), environment, self._streams)
        self.process = CONTEXT.Process(target=_become, args=arguments)
        self.process.start()

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; what it said."""
        self.process.join(_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise subprocess.TimeoutExpired(self._command, _SECONDS)
        out, err = (Path(stream).read_text() if os.path.exists(stream) else "" for stream in self._streams)
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._command, self.process.exitcode, out, err)


def forked(
    script: str, *words: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT WORDS` in `cwd`, to its end."""
    return Fork(script, *words, cwd=cwd, environment=environment).ended()


def pasted(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What is printed as `python SCRIPT WORDS`, as a shell reads it, in `cwd`."""
    shell = ["bash", "-c", f"printf '%s\\0' {command}"]
    read = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    python, script, *words = read.split("\0")[:-1]
    assert python == "python", command
    return forked(script, *words, cwd=cwd)


def _become(command: list[str], cwd: str, environment: dict[str, str], streams: list[str]) -> None:
    """Be that command: nothing of the server or of the test is left but what is imported."""
    atexit._clear()  # what imports have registered would run after what the command registers first
    for number, path in enumerate(streams, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
    for module in ("harness.preemption", "harness.training.time_limit"):
        importlib.import_module(module).STARTED = time.monotonic()  # type: ignore[attr-defined]
    import torch

    torch.set_num_threads(1)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        raise
    finally:
        atexit._run_exitfuncs()
