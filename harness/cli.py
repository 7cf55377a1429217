"""The entry: a command line becomes dataclasses, and an outcome becomes an exit code.

Hydra and OmegaConf stop here. torch, wandb and h5py are imported only once a configuration is known to be
good, so `--help`, `--cfg job` and a typo answer at once.

Exit codes: 0 done, 1 failed, 2 the user's mistake (no traceback), 75 stopped after saving: run it again,
130 stopped at once.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness import checkpoint, helptext, hints, overrides
from harness.config import PrepareScriptConfig, TrainConfig, make_paths_absolute
from harness.config_checks import validate
from harness.config_groups import GROUPS, ModelConfig, PrepareConfig
from harness.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER, RunFailed, UserError

_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
}

log = logging.getLogger("harness")


def config_dir() -> Path:
    """`conf/` inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if (inside / "train.yaml").is_file() else package.parent / "conf"


def register() -> None:
    """Make the typed schemas and our one resolver known to Hydra."""
    store = ConfigStore.instance()
    for group, variants in GROUPS.items():
        for name, kind in variants.items():
            store.store(group=f"schema/{group}", name=name, node=kind)
    store.store(group="schema", name="model", node=ModelConfig)
    store.store(group="schema", name="prepare", node=PrepareConfig)
    store.store(group="schema", name="train", node=TrainConfig)
    store.store(group="schema", name="prepare_data", node=PrepareScriptConfig)
    OmegaConf.register_new_resolver("run_dir", _run_dir, use_cache=True, replace=True)


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


class _HeldStderr:
    """Keeps back what is printed until a job begins: what Hydra cannot compose is ours to explain."""

    def __init__(self) -> None:
        self.real, self.held = sys.stderr, io.StringIO()
        sys.stderr = self.held

    def release(self) -> None:
        if sys.stderr is self.held:
            sys.stderr = self.real
            print(self.held.getvalue(), end="", file=sys.stderr)

    @property
    def is_holding(self) -> bool:
        return sys.stderr is self.held

    def take(self) -> str:
        sys.stderr = self.real
        return self.held.getvalue()


def run_app(config_name: str, task: Callable[[DictConfig], Any], line: overrides.CommandLine) -> None:
    """Compose `config_name` from the command line and run `task` on it, once or once a sweep's job."""
    if helptext.wants_help(line):
        print(helptext.help_text(config_dir(), config_name))
        return
    register()
    logging.raiseExceptions = False  # a closed terminal or pipe must not fill a run's stderr with tracebacks
    # Hydra would write into a finished run's .hydra before the run is refused.
    sys.argv = [sys.argv[0], *line.words(), "hydra.output_subdir=null"]
    stderr = _HeldStderr()

    def job(cfg: DictConfig) -> Any:
        stderr.release()
        return _guarded(task, cfg)

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(job)()
    except SystemExit as stop:
        if not (stderr.is_holding and stop.code == EXIT_FAILED):
            raise
        print(hints.reword(stderr.take(), config_dir(), config_name, line), file=sys.stderr)
        raise SystemExit(EXIT_USER) from None
    finally:
        stderr.release()


def _guarded(task: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    """Run a job; a user's mistake ends it with exit code 2 and no traceback, but never a whole sweep."""
    os.chdir(HydraConfig.get().runtime.cwd)  # hydra.job.chdir must not move what relative paths mean
    try:
        return task(cfg)
    except UserError as error:
        raise _ending(f"error: {error}", EXIT_USER) from None
    except RunFailed as error:
        raise _ending(f"error: {error}", EXIT_FAILED) from None
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = (
            error.filename2 or error.filename
        )  # of a rename the name that was to be, not our temporary one
        what = f"{where}: {error.strerror}" if where else str(error)
        raise _ending(f"error: {what}. What was saved before is intact.", EXIT_FAILED) from error
    finally:
        remove_if_empty(Path(HydraConfig.get().runtime.output_dir))


def _ending(message: str, code: int) -> BaseException:
    """How a job ends in words: alone by its exit code; in a sweep so that the other jobs still run."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return CompactHydraException(message)
    print(message, file=sys.stderr)
    return SystemExit(code)


def remove_if_empty(folder: Path) -> None:
    """Take back the empty folder that Hydra makes before a job starts, and empty ones above it."""
    for path in (folder, *folder.parents):
        if path == Path.cwd() or not path.is_relative_to(Path.cwd()) or not _is_empty_dir(path):
            return
        path.rmdir()


def _is_empty_dir(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def main() -> None:
    """`python train.py` and the console script `harness-train`."""
    from harness import resume_words

    try:
        line = overrides.split(sys.argv[1:])
        line.overrides = overrides.quote_paths(line.overrides, multirun=line.multirun)
        said_auto = overrides.value_of(line.overrides, "resume") == "auto"
        line = resume_words.prepare(line)
        line.overrides = overrides.one_budget(line.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USER) from None
    except OSError as error:  # a run directory that may not be looked into
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None
    run_app("train", functools.partial(_train, said_auto=said_auto), line)


def _train(cfg: DictConfig, *, said_auto: bool) -> float | None:
    """Run a composed configuration; `said_auto`: its run's own words were replayed if it has a checkpoint."""
    config = to_dataclass(cfg)
    path = Path(HydraConfig.get().runtime.output_dir)
    if config.resume == "auto" and not said_auto and checkpoint.complete_steps(path):
        raise UserError(
            f"resume=auto found checkpoints in {path}, but the run's own words were not replayed. Say both "
            "on the command line, in plain words: resume=auto run.name=NAME"
        )
    from harness.launch import launch

    outcome = launch(config, path, composed_files(cfg))
    if outcome.stopped:
        raise SystemExit(EXIT_STOPPED)
    return outcome.val_loss
