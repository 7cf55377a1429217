"""A Hydra sweeper that draws from choices and hears nothing but what jobs return: `hydra/sweeper=random`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class RandomSweeper(Sweeper):
    """Writes `trials.json` into the sweep's folder: the words and the objective of each trial, in order."""

    def __init__(self, trials: int, seed: int) -> None:
        self.trials, self.seed = trials, seed

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        assert self.launcher is not None
        generator, done = random.Random(self.seed), []
        for number in range(self.trials):
            words = [
                f"{one.get_key_element()}={generator.choice(list(one.sweep_string_iterator()))}"
                if one.is_sweep_override()
                else str(one.input_line)
                for one in OverridesParser.create().parse_overrides(arguments)
            ]
            (job,) = self.launcher.launch([words], initial_job_idx=number)
            done.append({"words": words, "objective": job.return_value})
        (Path(self.config.hydra.sweep.dir) / "trials.json").write_text(json.dumps(done))


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="random",
    node={"_target_": "hydra_plugins.random_search.RandomSweeper", "trials": 8, "seed": 0},
    provider="random_search",
)
