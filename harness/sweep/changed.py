"""Whether a done job still is what its sweep takes it for: trained so, on that data."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from harness.commandline.commands import shown
from harness.config import PATH_KEYS, TrainConfig, set_directory
from harness.config_record import from_dict
from harness.resuming.growth import COPY
from harness.storage.manifest import load_manifest, manifest_digest
from harness.sweep.identity import telling


def since_done(config: TrainConfig, path: Path) -> tuple[str | None, str | None]:
    """What has changed since the job `config` in `path` was done, a word and an error; None: nothing."""
    if not (path / "metrics.jsonl").is_file():
        return "lost_results", (
            f"{shown(path)} is done, but its metrics.jsonl is gone: nothing says what it has reached. Put "
            "the file back, or move the job's folder away, and the job is trained again"
        )
    if (error := _other_settings(config, path)) is not None:
        return "other_settings", error
    if (error := _other_data(config, path)) is not None:
        return "other_data", error
    return None, None


def _other_settings(config: TrainConfig, path: Path) -> str | None:
    """A run may have been resumed by hand, with another budget perhaps."""
    file = path / "config.yaml"
    try:
        trained = telling(from_dict(yaml.safe_load(file.read_text()), str(file)))
    except (OSError, ValueError, yaml.YAMLError, TypeError):  # lost, or of another version
        return None
    wanted = telling(config)
    differing = [key for key in wanted if wanted[key] != trained.get(key) and key not in PATH_KEYS]
    if not differing:
        return None
    words = ", ".join(f"{key}={trained.get(key)} (the sweep: {wanted[key]})" for key in differing)
    return (
        f"{shown(path)} is done, but it was trained on with {words}: its results are not the sweep's any "
        "more. Move its folder away, and the job is trained again; next time go on from it elsewhere: "
        "resume=RUN run.name=NEW_NAME"
    )


def _other_data(config: TrainConfig, path: Path) -> str | None:
    """The set may have been prepared anew."""
    directory = set_directory(config)
    try:
        trained = manifest_digest(json.loads((path / COPY).read_text()))
        now = load_manifest(directory).metadata_sha256
    except (OSError, ValueError):  # the set is gone or damaged: nothing here says that it was another
        return None
    if now == trained:
        return None
    return (
        f"{shown(path)} is done, on data of metadata_sha256 {trained}, but {shown(directory)} has {now} now: "
        "its results would stand beside those of other data. Train on the new data in a sweep of its own, "
        "sweep.name=NEW_NAME; or put the old data back; or move the job's folder away"
    )
