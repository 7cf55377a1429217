"""A composed configuration: where its YAML lies, its schema, and from Hydra's config to our dataclasses.

Hydra and OmegaConf stop here and in hydra_app.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.commandline import hints, overrides
from harness.config import PrepareScriptConfig, TrainConfig, make_paths_absolute
from harness.config_checks import validate
from harness.config_groups import GROUPS, ModelConfig, PrepareConfig
from harness.errors import UserError


def config_dir() -> Path:
    """`conf/` inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if (inside / "train.yaml").is_file() else package.parent / "conf"


def register() -> None:
    """Make the typed schemas and our resolvers known to Hydra; in each process that composes or resolves."""
    store = ConfigStore.instance()
    for group, variants in GROUPS.items():
        for name, kind in variants.items():
            store.store(group=f"schema/{group}", name=name, node=kind)
    store.store(group="schema", name="model", node=ModelConfig)
    store.store(group="schema", name="prepare", node=PrepareConfig)
    store.store(group="schema", name="train", node=TrainConfig)
    store.store(group="schema", name="prepare_data", node=PrepareScriptConfig)
    OmegaConf.register_new_resolver("run_dir", _run_dir, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("divide", _divide, replace=True)


def _divide(whole: int, part: int) -> int:
    """`${divide:2048,${loader.seq_len}}`: the sequences of a step of 2048 tokens."""
    whole, part = int(whole), int(part)
    if part < 1 or whole % part:
        raise ValueError(
            f"${{divide:{whole},{part}}} leaves a rest, and jobs are compared at steps of equal tokens: use "
            f"a divisor of {whole} in place of {part}"
        )
    return whole // part


def _run_dir(name: str | None, readable: str) -> str:
    from datetime import datetime

    if name is not None:
        return str(overrides.named_run(name))
    now = datetime.now()
    return f"runs/{now:%Y-%m-%d}/{now:%H-%M-%S-%f}_{readable}"


def to_dataclass(cfg: DictConfig) -> Any:
    """The composed config as our dataclasses, checked whole: unknown keys, ranges and cross-field rules."""
    unknown = hints.unknown_keys(cfg)
    if unknown:
        known = [key for key in hints.known_keys(cfg) if key not in unknown]
        raise UserError("\n".join(f"there is no key {key}{hints.closest(key, known)}" for key in unknown))
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise UserError(str(error)) from None
    assert isinstance(config, TrainConfig | PrepareScriptConfig)
    validate(config)
    make_paths_absolute(config)
    return config


def composed_files(cfg: DictConfig) -> dict[str, str]:
    """What Hydra would have written to `.hydra/`: file name to YAML."""
    settings = OmegaConf.to_container(HydraConfig.get(), resolve=False)
    assert isinstance(settings, dict)
    for key in ("help", "hydra_help"):
        settings.pop(key, None)
    return {
        "config.yaml": OmegaConf.to_yaml(cfg),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": settings})),
        "overrides.yaml": OmegaConf.to_yaml(HydraConfig.get().overrides.task),
    }
