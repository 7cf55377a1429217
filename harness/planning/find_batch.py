"""`scripts/find_batch.py`: how many sequences a device takes at once, and how many are fastest."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import EXIT_DONE, EXIT_FAILED, UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.commandline.overrides import CommandLine
    from harness.config import TrainConfig
    from harness.planning.batch_trial import Trial

_HELP = """\
Find how many sequences a device takes at once, trainer.micro_batch_size, and how many are fastest.

usage: find_batch.py [key=value ...]     the words of train.py, and of these:

  memory_gb=null   10^9 bytes that the process may take; null: all that the device has to give
  devices=1        how many will share loader.batch_size under torchrun, with parallel=ddp

Steps of the configured shape are tried on random tokens, each in a process of its own: twice as many
sequences each time until a step does not fit or takes the whole batch, then those in between. Sizes are the
divisors of the batch, so each gives the same step. Nothing is trained or written; of the data only the
vocabulary counts.

Exit code 0: found; 1: not even one sequence fits, or a step fails; 2: it cannot be tried."""


@dataclass
class FindOptions:
    """Options of `scripts/find_batch.py` beside the words of train.py."""

    memory_gb: float | None = None
    devices: int = 1


def main() -> None:
    """Print a line for each size that is tried, then the words of the fastest."""
    import sys

    from harness.commandline import overrides
    from harness.commandline.hydra_app import run_app
    from harness.commandline.script_words import parse, run_script, words_or_help

    words = sys.argv[1:] and words_or_help(_HELP)
    names = FindOptions.__dataclass_fields__
    ours = [word for word in words if word.partition("=")[0] in names]
    theirs = [word for word in words if word not in ours]
    options: list[FindOptions] = []
    line = overrides.split(theirs)

    def read_options() -> None:
        options.append(parse(["WORDS", *ours], FindOptions, "WORDS", _HELP)[1])
        _check(options[0], line)

    run_script(read_options)
    line.overrides = overrides.quote_paths(line.overrides, multirun=False)
    run_app("train", lambda cfg: _find(cfg, options[0], theirs), line)


def _check(options: FindOptions, line: CommandLine) -> None:
    memory = options.memory_gb
    if options.devices < 1:
        raise UserError(f"devices={options.devices} must be at least 1: as many as will share a batch")
    if memory is not None and not 0 < memory < math.inf:
        raise UserError(f"memory_gb={memory} must be a number above 0, or null for all that there is")
    if line.multirun:
        raise UserError("find_batch tries one configuration: drop -m, and give each key one value")


def _find(cfg: DictConfig, options: FindOptions, words: list[str]) -> None:
    from harness.commandline.commands import command, torchrun_command
    from harness.commandline.composition import to_dataclass
    from harness.commandline.script_words import reader_may_leave
    from harness.planning import batch_trial

    cfg.trainer.micro_batch_size = None  # what is looked for: an experiment's own need not divide this batch
    config = to_dataclass(cfg)
    batch_trial.preload()
    with reader_may_leave():
        found = find(config, options)
        if found is None:
            raise SystemExit(EXIT_FAILED)
        kept = [word for word in words if word.partition("=")[0] != "trainer.micro_batch_size"]
        kept.append(f"trainer.micro_batch_size={found.micro_batch}")
        several, count = options.devices > 1, str(options.devices)
        print(f"fastest: {torchrun_command(count, *kept) if several else command('train', *kept)}")
    raise SystemExit(EXIT_DONE)


def find(config: TrainConfig, options: FindOptions) -> Trial | None:
    """The fastest size of those that fit; None, said so, where none does. Prints a line for each it tries.

    Raises `UserError` where the configuration cannot be tried, and `RunFailed` where a step fails.
    """
    from harness.config import tokens_per_step
    from harness.planning.batch_trial import trial

    _check_config(config, options)
    vocab_size, share = vocabulary(config), config.loader.batch_size // options.devices
    memory = None if options.memory_gb is None else 1e9 * options.memory_gb
    loader = dataclasses.replace(config.loader, batch_size=share)
    tokens, fitting = tokens_per_step(config) // options.devices, list["Trial"]()
    print(f"{'micro-batch':>11}  {'tokens/s':>10}  {'peak memory':>11}", flush=True)

    def fits(size: int) -> bool:
        trainer = dataclasses.replace(config.trainer, micro_batch_size=size)
        found = trial(dataclasses.replace(config, loader=loader, trainer=trainer), vocab_size, memory)
        line = (
            "does not fit"
            if found is None
            else f"{tokens / found.seconds:>10,.0f}  {found.peak_mb:>8,.0f} MB"
        )
        print(f"{size:>11}  {line}", flush=True)
        if found is not None:
            fitting.append(found)
        return found is not None

    search([size for size in range(1, share + 1) if share % size == 0], fits)
    if not fitting:
        print("not even one sequence at a time fits: use a smaller loader.seq_len or model, or more memory")
    return min(fitting, key=lambda found: found.seconds, default=None)


def search(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of the ascending `sizes` that fits, where all up to it do; None where not one does.

    Tries at most twice as much each time until one does not fit, then what lies between.
    """
    good, place, bad = -1, 0, len(sizes)
    while place < bad:
        if not fits(sizes[place]):
            bad = place
            break
        good, place = place, max(place + 1, bisect_right(sizes, 2 * sizes[place]) - 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(sizes[middle]):
            good = middle
        else:
            bad = middle
    return sizes[good] if good >= 0 else None


def vocabulary(config: TrainConfig) -> int:
    """Of the prepared set where there is one, else as its tokenizer will have it."""
    from harness.config import set_directory
    from harness.prepare import expected_vocab_size
    from harness.storage.manifest import load_manifest

    directory = set_directory(config)
    if directory.exists():
        return load_manifest(directory).tokenizer.vocab_size
    return expected_vocab_size(config.tokenizer)


def _check_config(config: TrainConfig, options: FindOptions) -> None:
    from harness.optim import check_available

    check_available(config.optimizer)
    if config.resume is not None:
        raise UserError(f"find_batch tries a new model of the words' shape: drop resume={config.resume}")
    if config.parallel == "fsdp" and options.devices > 1:
        raise UserError(
            f"parallel=fsdp with devices={options.devices}: a sharded model's step takes all of its devices, "
            "and find_batch tries one, with the whole model. Drop parallel=fsdp, or devices="
        )
    if config.loader.batch_size % options.devices:
        raise UserError(
            f"loader.batch_size={config.loader.batch_size} must be a multiple of devices={options.devices}: "
            "each takes an equal share of it"
        )
