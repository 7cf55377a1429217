"""What to say about a word that is not a key: the strict check after composing, and did-you-mean.

Hydra accepts `+trainer.max_step=3` silently and answers a typo with the advice to add that `+`;
both end here with the closest key that exists.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from harness.commandline.overrides import CommandLine, key_of
from harness.config_groups import GROUPS
from harness.errors import did_you_mean


def known_keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Every dotted key of a composed config, groups included."""
    keys = []
    for name in cfg:
        key = prefix + str(name)
        keys.append(key)
        node = cfg._get_node(name)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            keys += known_keys(node, f"{key}.")
    return keys


def unknown_keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Dotted keys that the typed schema does not have: what `+key=value` smuggled in."""
    kind = OmegaConf.get_type(cfg)
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    unknown = []
    for name in cfg:
        if fields is not None and name not in fields:
            unknown.append(prefix + str(name))
            continue
        node = cfg._get_node(name)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            unknown += unknown_keys(node, prefix + str(name) + ".")
    return unknown


def closest(key: str, known: list[str]) -> str:
    """`; did you mean trainer.max_steps?`: by the whole key, else by its last part.

    A key of another option of its group is no typo: `; loader.stride is a key of loader=sliding_window`.
    """
    group, _, name = key.partition(".")
    owners = [
        f"{group}={option}"
        for option, kind in GROUPS.get(group, {}).items()
        if any(field.name == name for field in dataclasses.fields(kind))
    ]
    if owners:
        return f"; {key} is a key of {' and of '.join(owners)}"
    hint = did_you_mean(key, known)
    if hint:
        return hint
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(known)}
    leaf = did_you_mean(key.rpartition(".")[2], by_leaf)
    return leaf and f"; did you mean {by_leaf[leaf.removeprefix('; did you mean ').removesuffix('?')]}?"


def reword(message: str, conf: Path, config_name: str, line: CommandLine) -> str:
    """What Hydra says of words it cannot compose, without its `+` advice and with the closest name."""
    noise = (
        "HYDRA_FULL_ERROR",
        "To append to your config use",
        "reference_type=",
        "object_type=",
        "provider=",
    )
    lines = [text for text in message.strip().splitlines() if text and not any(n in text for n in noise)]
    lines = [text for text in lines if text.strip() != "Config search path:"]
    if lines and lines[0].startswith("Traceback"):
        lines = lines[-1:]  # of the file system or of Hydra's parser: the last line says what
    text = "error: " + "\n".join(lines)
    number = re.search(r"Value '(\d+)\.0' of type 'float' could not be converted to Integer", message)
    if number:
        text += f"\nwrite it as a whole number: {int(number[1]):_}"
    for hint in _hints(message, conf, config_name, line):
        text += "\n" + hint
    return text


def _hints(message: str, conf: Path, config_name: str, line: CommandLine) -> list[str]:
    if "Could not find 'hydra/launcher/" in message:
        return ["joblib and submitit are packages: pip install hydra-joblib-launcher hydra-submitit-launcher"]
    word = re.search(r"LexerNoViableAltException: ([^\s=]+)=([^\n'\"]+)$", message, re.MULTILINE)
    if word:
        quoted = f'{word[1]}="{word[2]}"'
        return [f"Hydra reads such a text in quotes only: {shlex.quote(quoted)}"]
    option = re.search(r"Could not find '([^'/]+)/([^']+)'", message)
    if option:
        group, name = option.groups()
        options = [path.stem for path in (conf / group).glob("*.yaml")]
        hint = did_you_mean(name, options)
        return [hint.removeprefix("; ").replace("mean ", f"mean {group}=")] if hint else []
    key = re.search(
        r"Could not override '([^'=]+)'|Could not delete[^']*'([^'=]+)'|Key '([^']+)' (?:is )?not in", message
    )
    if key is None:
        return []
    named = [key_of(word) for word in line.overrides]
    guess = key[1] or key[2] or next((word for word in named if word.endswith(key[3])), key[3])
    hint = closest(guess, _default_keys(conf, config_name, line))
    return [hint.removeprefix("; ")] if hint else ["see every key: --cfg job"]


def _default_keys(conf: Path, config_name: str, line: CommandLine) -> list[str]:
    """The keys of the config as the chosen groups make it, or of the defaults where those do not compose."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    groups = [word for word in line.overrides if "." not in key_of(word) and (conf / key_of(word)).is_dir()]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        for words in (groups, []):
            try:
                return known_keys(compose(config_name, overrides=words))
            except Exception:  # a hint must not hide the error it is about
                continue
    return []
