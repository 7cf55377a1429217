"""What Hydra composes for the jobs of a sweep's command line: in this process, nothing run or written."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime, setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from harness.commandline.composition import config_dir, register, to_dataclass
from harness.commandline.overrides import CommandLine, key_of
from harness.config import TrainConfig
from harness.errors import UserError

_BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
_BASIC_LAUNCHER = f"{BasicLauncher.__module__}.{BasicLauncher.__qualname__}"


class NotComposed(Exception):
    """Words or files that Hydra cannot compose; the text is what Hydra would print."""


@contextlib.contextmanager
def _composing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a word or a file makes Hydra, OmegaConf or YAML raise is of any kind
        cause = error.__cause__
        text = f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error)
        raise NotComposed(text) from error


@dataclass(frozen=True)
class SweepConfig:
    """`master` is the configuration without the swept words, as Hydra hands it to a sweeper."""

    loader: ConfigLoaderImpl
    master: DictConfig

    @property
    def is_basic(self) -> bool:
        """Whether Hydra's own sweeper makes the jobs, all known before the first."""
        return bool(self.master.hydra.sweeper._target_ == _BASIC)

    @property
    def is_launched_here(self) -> bool:
        """Whether Hydra's own launcher trains the jobs, one after another in this process."""
        return bool(self.master.hydra.launcher._target_ == _BASIC_LAUNCHER)

    @property
    def lacks_slurm(self) -> bool:
        """Whether the jobs would go to SLURM, from a machine that has none."""
        launcher = str(self.master.hydra.launcher._target_).rpartition(".")[2]
        return launcher == "SlurmLauncher" and shutil.which("srun") is None

    @property
    def params(self) -> dict[str, Any]:
        """`hydra.sweeper.params` of an experiment's file: keys, and the values they are swept over."""
        params = OmegaConf.to_container(self.master.hydra.sweeper.get("params") or OmegaConf.create({}))
        assert isinstance(params, dict)
        return {str(key): value for key, value in params.items()}

    @property
    def name(self) -> str | None:
        """`sweep.name` of the command line or an experiment's file."""
        name = self.master.sweep.name
        return None if name is None else str(name)

    @property
    def experiment(self) -> str | None:
        """The experiment that all jobs have."""
        choice = self.master.hydra.runtime.choices.get("experiment")
        return None if choice in (None, "null") else str(choice)

    @property
    def folder(self) -> Path:
        """`hydra.sweep.dir`, which follows from the sweep's name."""
        return Path(self.master.hydra.sweep.dir).absolute()

    @property
    def subdir(self) -> str:
        """`hydra.sweep.subdir` as it is written: it may follow from what only a job has."""
        node = OmegaConf.to_container(self.master.hydra.sweep, resolve=False)
        assert isinstance(node, dict)
        return str(node["subdir"])

    def say(self, name: str, words: list[str]) -> None:
        """As if the command line ended with `words`, of which one names the sweep."""
        self.master.sweep.name = name
        self.master.hydra.overrides.task += words

    def overrides(self) -> list[Override]:
        """The file's words, then the command line's, parsed."""
        words = [f"{key}={value}" for key, value in self.params.items()]
        task = OmegaConf.to_container(self.master.hydra.overrides.task, resolve=False)
        assert isinstance(task, list)
        words += map(str, task)  # what refers to a swept key is another value in each job
        with _composing():
            return OverridesParser.create(config_loader=self.loader).parse_overrides(words)

    def job(self, index: int, words: list[str]) -> TrainConfig:
        """Job `index`, composed as Hydra's launcher composes it, and checked whole."""
        with _composing():
            cfg = self.loader.load_sweep_config(self.master, words)
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = index
        HydraConfig.instance().set_config(cfg)
        if (folder := Path(cfg.hydra.sweep.dir).absolute()) != self.folder:
            raise UserError(
                f"hydra.sweep.dir is {folder} for a job and {self.folder} for the sweep: its jobs would lie "
                "apart, and be neither found again nor compared. Give it one value for all of them"
            )
        self._refuse_inner_sweep(cfg, words)
        with read_write(cfg), open_dict(cfg):
            del cfg["hydra"]
        config = to_dataclass(cfg)
        assert isinstance(config, TrainConfig)
        return config

    def _refuse_inner_sweep(self, cfg: DictConfig, words: list[str]) -> None:
        """Raise `UserError` where the job's own experiment is a grid, which Hydra would pass over."""
        given = {*map(key_of, self.params), *map(key_of, words)}
        keys = [key for key in cfg.hydra.sweeper.get("params") or {} if key_of(key) not in given]
        if keys:
            choice = cfg.hydra.runtime.choices.get("experiment")
            raise UserError(
                f"experiment={choice} describes a sweep over {', '.join(keys)}, and as one of several "
                f"experiments it would be a single job. Start it alone, -m experiment={choice}, or give each "
                f"key its values: {' '.join(f'{key}=VALUES' for key in keys)}"
            )


def open_sweep(line: CommandLine) -> SweepConfig:
    """Raises `NotComposed` where the words that all jobs share do not compose."""
    register()
    setup_globals()
    arguments = get_args_parser().parse_args(line.words())
    path = arguments.config_path or str(config_dir())
    search = create_automatic_config_search_path(None, "harness.commandline.hydra_app", path)
    if arguments.config_dir is not None:
        folder = os.path.abspath(arguments.config_dir)
        if not os.path.isdir(folder):
            raise UserError(f"--config-dir: there is no folder {folder}")
        search.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    JobRuntime().set("name", "hydra_app")
    loader = ConfigLoaderImpl(config_search_path=search)
    words = [*arguments.overrides, "hydra.output_subdir=null", "hydra.mode=MULTIRUN"]
    name = arguments.config_name or "train"
    with _composing():
        return SweepConfig(loader, loader.load_configuration(name, words, RunMode.MULTIRUN))
