"""The entry of `scripts/prepare_data.py` and the console script `harness-prepare`."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from harness.commandline import overrides
from harness.commandline.composition import to_dataclass
from harness.commandline.hydra_app import run_app


def main() -> None:
    """Prepare the set that the command line describes and print what it holds."""
    line = overrides.split(sys.argv[1:])
    line.overrides = overrides.quote_paths(line.overrides, multirun=line.multirun)
    run_app("prepare", _prepare, line)


def _prepare(cfg: DictConfig) -> None:
    config = to_dataclass(cfg)
    from harness.prepare import prepare

    print(prepare(config, report=print))
