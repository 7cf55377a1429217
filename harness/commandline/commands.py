"""The exact commands that messages tell a user to run, right for a checkout and for an installed wheel."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from pathlib import Path
from typing import Any

from harness.commandline import overrides
from harness.config import PrepareScriptConfig, TrainConfig, row_width
from harness.config_groups import LoaderConfig

_CONSOLE = {
    "train": "harness-train",
    "prepare_data": "harness-prepare",
    "sample": "harness-sample",
    "evaluate": "harness-evaluate",
    "inspect_batch": "harness-inspect",
    "find_batch": "harness-find-batch",
    "audit_data": "harness-audit",
    "sweep": "harness-sweep",
    "report": "harness-report",
}


_NOT_OF_THE_SET = ("data.mmap", "data.expect_sha256", "data.verify")


def shown(path: Path) -> Path:
    """A path as a person in the working directory would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def command(script: str, *words: str) -> str:
    """`python scripts/NAME.py ...` in a checkout, the console script where there is none.

    Where torchrun started this process, train.py is begun by it again, on as many devices.
    """
    alone = command_alone(script, *words)
    if script == "train" and "TORCHELASTIC_RUN_ID" in os.environ:
        return _by_torchrun(alone, *_torchrun_flags())
    return alone


def command_alone(script: str, *words: str) -> str:
    """The same for one process, whatever started this one."""
    root = Path(__file__).resolve().parents[2]
    path = root / "train.py" if script == "train" else root / "scripts" / f"{script}.py"
    if path.is_file():
        inside = Path.cwd() == root
        program = f"python {path.relative_to(root) if inside else shlex.quote(str(path))}"
    else:
        program = _CONSOLE[script]
    return " ".join([program, *map(shell_word, words)])


def torchrun_command(processes: str, *words: str) -> str:
    """The same for train.py on several devices of this host."""
    return _by_torchrun(command_alone("train", *words), f"--nproc-per-node={processes}")


def _by_torchrun(alone: str, *flags: str) -> str:
    program = alone.removeprefix("python ") if alone.startswith("python ") else f"--no-python {alone}"
    return " ".join(["torchrun", *flags, program])


def _torchrun_flags() -> list[str]:
    """What torchrun tells its processes of its own flags; where several hosts meet is to be filled in."""
    hosts, restarts = (os.environ.get(name, "") for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    flags = [f"--nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', '1')}"]
    if restarts not in ("", "0"):
        flags.append(f"--max-restarts={restarts}")
    if hosts not in ("", "1"):
        flags = [f"--nnodes={hosts}", *flags, "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:PORT"]
    return flags


def prepare_command(config: TrainConfig | PrepareScriptConfig, *extra: str) -> str:
    """The command that prepares the set this configuration asks for; the words `extra` win over it.

    What a preparation needs and a run over a finished set need not name is to be filled in: corpus.path=PATH.
    """
    named = {word.partition("=")[0] for word in extra}
    words = [f"{group}={getattr(config, group).name}" for group in ("data", "corpus", "tokenizer")]
    if (width := row_width(config.loader)) is not None:
        words += [f"loader={config.loader.name}", override("loader.row_width", width)]
        words += [override("loader.seq_len", width - 1)] if width <= LoaderConfig.seq_len else []
    default_root = Path("data", f"{config.corpus.name}-{config.tokenizer.name}").absolute()
    for group in ("data", "corpus", "tokenizer", "prepare"):
        values = getattr(config, group)
        for field in dataclasses.fields(values):
            key, value = f"{group}.{field.name}", getattr(values, field.name)
            if value is None and _is_needed(config, key):
                value = "PATH"
            if field.name == "name" or value == _default(field) or key in {*_NOT_OF_THE_SET, *named}:
                continue
            if key == "data.root" and Path(value) == default_root:
                continue
            words.append(override(key, value))
    return command("prepare_data", *words, *extra)


def _is_needed(config: TrainConfig | PrepareScriptConfig, key: str) -> bool:
    """Whether a preparation has to be told this file."""
    if key == "corpus.path":
        return config.corpus.name != "stdlib"
    return key == "tokenizer.path" and config.tokenizer.name == "hf"


def override(key: str, value: Any) -> str:
    """`key=value` so that Hydra reads back `value`; for a shell it still needs `shell_word`."""
    return f"{key}={_hydra_value(value)}"


def shell_word(word: str) -> str:
    """A word as a shell takes it, in double quotes where single ones inside it would need escapes."""
    if "'" in word and not re.search(r'[$`"!]|\\\\|\\$', word):
        return f'"{word}"'
    return shlex.quote(word)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _hydra_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if not isinstance(value, str) or _plain_for_hydra(value):
        return str(value)
    return overrides.quote(value)


def _plain_for_hydra(text: str) -> bool:
    is_name = re.fullmatch(r"[/.]*[A-Za-z_][\w/.-]*", text, flags=re.ASCII) is not None
    return is_name and text.lower() not in ("null", "true", "false", "nan", "inf")
