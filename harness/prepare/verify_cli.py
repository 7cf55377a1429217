"""`scripts/verify_data.py`: hash every byte of prepared sets and say everything that is wrong with them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from omegaconf import DictConfig

from harness.commandline.commands import shown
from harness.commandline.script_words import run_script, words_or_help
from harness.errors import EXIT_FAILED, EXIT_USER, UserError

_HELP = """\
Verify prepared sets: every shard, mask and file against the hashes that were written down when it was made.

usage: verify_data.py SET_OR_RUN ...         folders of sets, or runs, whose sets are verified
       verify_data.py data=hdf5 corpus=...   the set that these words name, as in prepare_data.py

Exit code 0: all is as promised; 1: it is not, and every fault is listed; 2: there is no set to verify."""


def main() -> None:
    """Verify the sets named on the command line; exit code 1 where one has a fault."""
    words = words_or_help(_HELP)
    if all("=" in word or word.startswith("-") for word in words):
        _verify_configured(words)
    else:
        run_script(lambda: _verify_all([_set_of(Path(word)) for word in words]))


def _verify_configured(words: list[str]) -> None:
    from harness.commandline import overrides
    from harness.commandline.composition import to_dataclass
    from harness.commandline.hydra_app import run_app
    from harness.config import set_directory

    def verify(cfg: DictConfig) -> None:
        _verify_all([set_directory(to_dataclass(cfg))])

    line = overrides.split(words)
    line.overrides = overrides.quote_paths(line.overrides, multirun=line.multirun)
    run_app("prepare", verify, line)


def _set_of(path: Path) -> Path:
    """A set's folder as it is; of a run directory or checkpoint, the set it was trained on."""
    from harness.storage.manifest import FORMATS

    path = path.expanduser().absolute()
    if not path.exists() or any(os.path.lexists(path / name) for name, _ in FORMATS.values()):
        return path  # a set is itself, whatever folder it lies in
    config = next(
        (p / "config.yaml" for p in (path, *path.parents[:2]) if (p / "config.yaml").is_file()), None
    )
    if config is None:
        return path
    import yaml

    from harness.config import set_directory
    from harness.config_record import from_dict

    try:
        values = yaml.safe_load(config.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{config} cannot be read ({error}): name the set's own folder instead") from None
    return set_directory(from_dict(values, str(config)))


def _verify_all(directories: list[Path]) -> None:
    from harness.storage.verify import verify_set

    faulty, unread = 0, 0
    for directory in directories:
        started = time.perf_counter()
        try:
            result = verify_set(directory)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            unread += 1
            continue
        seconds = time.perf_counter() - started
        for fault in result.faults:
            print(f"FAULT {fault}")
        faulty += not result.ok
        if result.unhashed:
            print(f"{shown(directory)}: {result.unhashed} of {result.shards} shards have no hash to compare")
        verdict = "as promised" if result.ok else f"{len(result.faults)} faults"
        print(
            f"{shown(directory)}: {verdict}; {result.tokens:,} tokens in {result.shards} shards and "
            f"{result.files} whole files hashed in {seconds:.1f} s"
        )
    if faulty or unread:
        raise SystemExit(EXIT_FAILED if faulty else EXIT_USER)
