"""`scripts/convert_data.py`: a prepared set in another storage, by the same words as everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from harness.commandline import overrides
from harness.commandline.commands import shown
from harness.commandline.composition import to_dataclass
from harness.commandline.hydra_app import run_app
from harness.commandline.script_words import as_started, words_or_help
from harness.errors import EXIT_USER

_HELP = """\
Write a prepared set in another storage: the same tokens, shards and content_sha256, nothing tokenised again.

usage: convert_data.py SET data=hdf5 [data.compression=gzip] [data.chunk_tokens=65536] [data.path=TARGET]
       convert_data.py SET data=npy [data.path=TARGET]

Without data.path the set goes beside SET, under the name that train.py looks for (hdf5-stream, ...)."""


def main() -> None:
    """Convert the set that the first word names as the others say."""
    words = words_or_help(_HELP)
    source, *rest = words
    if "=" in source:
        print(
            f"error: give the set's folder first, then data=...; got {source}\n\n{as_started(_HELP)}",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_USER)
    line = overrides.split(rest)
    line.overrides = overrides.quote_paths(line.overrides, multirun=line.multirun)
    run_app("prepare", lambda cfg: _convert(Path(source).expanduser(), cfg), line)


def _convert(source: Path, cfg: DictConfig) -> None:
    config = to_dataclass(cfg)
    from harness.prepare.convert import convert, target_directory
    from harness.storage.manifest import load_manifest

    target = target_directory(load_manifest(source), config.data)
    manifest = convert(source, target, config.data)
    tokens = sum(split.total_tokens for split in manifest.splits.values())
    print(
        f"{shown(target)}: {tokens:,} tokens, digest {manifest.metadata_sha256}\n"
        f"  content_sha256 {manifest.content_sha256}, as in {shown(source.absolute())}"
    )
