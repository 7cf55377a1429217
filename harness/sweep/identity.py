"""What a job is: the same job whatever its number, the time, the place and the spelling of its words.

The identity is a hash over the resolved configuration as far as it changes the result. A job's directory is
named by it and found by it, so a sweep that is started again finds what it has done.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from harness.commandline.overrides import key_of
from harness.config import PATH_KEYS, TrainConfig, get, row_width, set_directory, total_steps
from harness.config_record import flatten, to_dict
from harness.run_files.run_dir import JOB_FILE

# What does not change the result: trackers, the device, names, cadences, how a run is resumed, how a set is
# checked and made (what shapes its tokens counts), and where sets lie by default.
IGNORED: tuple[str, ...] = (
    "tracker.name", "tracker.mode", "tracker.project", "tracker.entity", "tracker.tags",
    "tracker.init_timeout", "tracker.finish_timeout",
    "device", "parallel", "profile",
    "run.name", "model.name", "model.activation_checkpointing", "sweep.name", "sweep.keys",
    "trainer.log_interval", "trainer.log_batch_hash", "trainer.data_chain", "trainer.spike_zscore",
    "trainer.max_minutes",
    "evaluation.interval", "evaluation.sample_tokens",
    "checkpoint.interval", "checkpoint.minutes", "checkpoint.keep_last", "checkpoint.keep_every",
    "checkpoint.keep_best", "checkpoint.background", "checkpoint.max_failures",
    "resume", "resume_accept", "check",
    "data.root", "data.verify", "data.expect_sha256",
    "prepare.workers", "prepare.overwrite", "prepare.append", "prepare.max_bad_fraction",
)  # fmt: skip

COUNTED: tuple[str, ...] = (
    "data.name", "data.path", "data.mmap", "data.chunk_tokens", "data.compression",
    "corpus.name", "corpus.path", "corpus.separator", "corpus.suffixes", "corpus.pair_fields", "corpus.field",
    "tokenizer.name", "tokenizer.path", "tokenizer.boundary_token", "tokenizer.vocab_size",
    "tokenizer.train_bytes",
    "prepare.shard_tokens", "prepare.sharding", "prepare.val_fraction", "prepare.max_document_tokens",
    "loader.name", "loader.seq_len", "loader.batch_size", "loader.seed", "loader.prefetch",
    "loader.mask_boundary", "loader.epoch_seed", "loader.stride", "loader.sampling", "loader.row_width",
    "loader.window_tokens",
    "model.n_layer", "model.n_head", "model.n_embd", "model.dropout", "model.gelu",
    "model.loss_chunk_tokens",
    "optimizer.name", "optimizer.lr", "optimizer.weight_decay", "optimizer.betas",
    "optimizer.momentum",
    "schedule.name", "schedule.warmup_steps", "schedule.total_steps", "schedule.min_lr_ratio",
    "schedule.decay_fraction",
    "trainer.max_steps", "trainer.max_tokens", "trainer.micro_batch_size", "trainer.grad_clip",
    "trainer.on_nonfinite", "trainer.dpo_beta",
    "evaluation.tokens", "evaluation.set",
    "seed", "precision", "compile", "deterministic", "init_from",
)  # fmt: skip

_HASH_DIGITS, _LONG_HASH_DIGITS = 8, 32
_MOST_BYTES = 150  # of a directory's name
_MOST_OF_A_WORD = 48
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_SILENT_GROUPS = ("tracker", "sweep", "hydra")


def identity(config: TrainConfig) -> str:
    """SHA-256, as hex, of what a job's result follows from.

    Paths count relative to the working directory where they lie in it, so a project that was moved, with its
    data, has the jobs it had.
    """
    text = json.dumps(telling(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def telling(config: TrainConfig) -> dict[str, Any]:
    """What a job's result follows from, by dotted key, each said in one way."""
    values = {key: value for key, value in flatten(to_dict(config)) if key not in IGNORED}
    values |= _meanings(config)
    for key in PATH_KEYS:
        if key in values:
            values[key] = _relative(values[key])
    return {key: _plain(value) for key, value in values.items()}


def _meanings(config: TrainConfig) -> dict[str, Any]:
    """What null, and a budget in tokens, stand for: each said in one way."""
    budget = total_steps(config)
    schedule_steps = config.schedule.total_steps or budget
    meanings = {
        "trainer.max_steps": budget,
        "trainer.max_tokens": None,
        "trainer.micro_batch_size": config.trainer.micro_batch_size or config.loader.batch_size,
        "schedule.total_steps": schedule_steps,
    }
    if config.data.path == str(_default_set(config)):
        meanings["data.path"] = None
    if config.schedule.warmup_steps is None:
        meanings["schedule.warmup_steps"] = schedule_steps // 20
    if hasattr(config.loader, "stride") and get(config, "loader.sampling") != "uniform":
        meanings["loader.stride"] = config.loader.stride or config.loader.seq_len
    if (width := row_width(config.loader)) is not None:
        meanings["loader.row_width"] = width
    return meanings


def _default_set(config: TrainConfig) -> Path:
    """Where the set lies that no `data.path` names."""
    data = dataclasses.replace(config.data, path=None)
    return set_directory(dataclasses.replace(config, data=data))


def _relative(value: Any) -> Any:
    if isinstance(value, list):
        return [_relative(item) for item in value]
    if not isinstance(value, str):
        return value
    path, here = Path(os.path.abspath(os.path.expanduser(value))), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _plain(value: Any) -> Any:
    """`0` and `0.0` are one value."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def readable(words: list[str]) -> str:
    """A job's overrides as a part of a directory's name: `seq_len-128_stride-64_seed-1`.

    Only letters, digits and `._+-`: nothing that a shell or Hydra would read. Keys are cut to their last part
    where that says which of the words it is; what no result follows from is left out. With the hash, which
    `job_name` adds, it has at most 150 bytes. The order of the words does not matter.
    """
    return _readable(words, _HASH_DIGITS)


def _readable(words: list[str], hash_digits: int) -> str:
    telling = {key_of(word): word for word in words if _tells(word)}
    leaves = Counter(key.rpartition(".")[2] for key in telling)
    parts = []
    for key in sorted(telling):
        leaf = key.rpartition(".")[2]
        value = telling[key].partition("=")[2]
        name = _safe(leaf if leaves[leaf] == 1 else key)
        parts.append("-".join(filter(None, [name, _shown(key, value)]))[:_MOST_OF_A_WORD])
    text = "_".join(filter(None, parts)).lstrip("._+-")
    return text[: _MOST_BYTES - 1 - hash_digits].rstrip("._+-") or "defaults"


def _tells(word: str) -> bool:
    key, value = key_of(word), word.partition("=")[2]
    group = re.split(r"[./@]", key)[0]
    is_unset_budget = key in ("trainer.max_steps", "trainer.max_tokens") and value == "null"
    return not (key in IGNORED or group in _SILENT_GROUPS or is_unset_budget)


def _shown(key: str, value: str) -> str:
    value = value.strip(" '\"[](){}")
    return _safe(re.split(r"[/\\]", value.rstrip("/\\"))[-1] if key in PATH_KEYS else value)


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text)


def job_name(sha256: str, words: list[str]) -> str:
    """The name of a job's directory: `<readable>-<hash8>`."""
    return _name(sha256, words, _HASH_DIGITS)


def _name(sha256: str, words: list[str], digits: int) -> str:
    return f"{_readable(words, digits)}-{sha256[:digits]}"


def find_job(folder: Path, sha256: str) -> Path | None:
    """The directory in `folder` of the job of this identity, whatever it is called before its hash.

    Its `job.json` says the whole identity; one that was killed before it wrote the file is taken by its name.
    """
    endings = tuple(f"-{sha256[:digits]}" for digits in (_HASH_DIGITS, _LONG_HASH_DIGITS))
    names = sorted(name for name in _names(folder) if name.endswith(endings))
    known = {folder / name: written_identity(folder / name) for name in names if (folder / name).is_dir()}
    for wanted in (sha256, None):
        for path, found in known.items():
            if found == wanted:
                return path
    return None


def place_for(folder: Path, sha256: str, words: list[str]) -> Path:
    """The job's directory: the one that is there, else the one to make.

    Where another job's whole identity begins with the same eight digits and has the same words, the new one
    is named by more digits.
    """
    if (found := find_job(folder, sha256)) is not None:
        return found
    path = folder / job_name(sha256, words)
    return folder / _name(sha256, words, _LONG_HASH_DIGITS) if path.exists() else path


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def written_identity(path: Path) -> str | None:
    """What job.json says; None where it says nothing that could be one."""
    try:
        value = json.loads((path / JOB_FILE).read_bytes())["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else None
