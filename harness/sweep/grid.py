"""The jobs of a sweep before any of them begins: all composed, all checked, all named."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.composition import config_dir, register, to_dataclass
from harness.config import TrainConfig
from harness.errors import UserError
from harness.overrides import CommandLine, value_of
from harness.sweep.identity import identity

_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class Job:
    """`words` are all of its overrides, `sha256` its identity."""

    index: int
    words: list[str]
    config: TrainConfig
    sha256: str


@dataclass(frozen=True)
class Grid:
    """The jobs of the sweep `name` in `folder`; `swept`: the keys of more than one value. `line` names it."""

    name: str
    folder: Path
    jobs: list[Job]
    swept: list[str]
    line: CommandLine


def named(line: CommandLine) -> tuple[CommandLine, Path]:
    """The command line with `sweep.name` and `sweep.keys` in it, and the sweep's folder."""
    cfg = _compose(line, _fixed(line.overrides))
    name = OmegaConf.select(cfg, "sweep.name")
    if name is None:
        name = (
            value_of(line.overrides, "experiment")
            or "-".join(sorted(key.rpartition(".")[2] for key in _swept(line.overrides)))
            or "sweep"
        )
        line = CommandLine(line.flags, [*line.overrides, f"sweep.name={name}"])
        cfg = _compose(line, _fixed(line.overrides))
    params = list(OmegaConf.select(cfg, "hydra.sweeper.params") or {})
    keys = list(dict.fromkeys([*params, *_swept(line.overrides)]))
    line = CommandLine(line.flags, [*line.overrides, f"sweep.keys=[{','.join(keys)}]"])
    return line, Path(cfg.hydra.sweep.dir).absolute()


def grid_of(line: CommandLine) -> Grid | None:
    """All jobs of a `-m` command line; None where another sweeper than Hydra's basic one decides on them."""
    line, folder = named(line)
    base = _compose(line, _fixed(line.overrides))
    if OmegaConf.select(base, "hydra.sweeper._target_") != _BASIC:
        return None
    params = OmegaConf.select(base, "hydra.sweeper.params") or {}
    parsed = _parse([*(f"{key}={value}" for key, value in params.items()), *line.overrides])
    choices: dict[str, list[str]] = {}
    for override in parsed:
        key = override.get_key_element()
        values = (
            list(override.sweep_string_iterator())
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        choices[key] = [f"{key}={value}" for value in values]
    jobs = []
    for index, words in enumerate(itertools.product(*choices.values())):
        config = to_dataclass(_compose(line, list(words), hydra=False))
        jobs.append(Job(index, list(words), config, identity(config)))
    swept = [key for key, values in choices.items() if len(values) > 1]
    name = value_of(line.overrides, "sweep.name") or jobs[0].config.sweep.name
    assert name is not None
    return Grid(name, folder, jobs, swept, line)


def _parse(words: list[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return list(OverridesParser.create().parse_overrides(words))
    except HydraException as error:
        raise UserError(str(error)) from None


def _fixed(words: list[str]) -> list[str]:
    """The words that mean the same for each job."""
    return [word for word, parsed in zip(words, _parse(words), strict=True) if not parsed.is_sweep_override()]


def _swept(words: list[str]) -> list[str]:
    """The keys that have several values."""
    return [override.get_key_element() for override in _parse(words) if override.is_sweep_override()]


def _compose(line: CommandLine, words: list[str], *, hydra: bool = True) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose(line.flag_value("--config-name", "-cn") or "train", words, return_hydra_config=hydra)
