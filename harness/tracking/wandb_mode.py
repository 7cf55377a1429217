"""Whether W&B goes online, and with which settings: decided here, so that wandb never asks a person."""

from __future__ import annotations

import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.config_groups import WandbTrackerConfig

MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


def unknown_mode() -> str | None:
    """The value of WANDB_MODE where wandb would refuse it; an empty one counts as unset, and is unset."""
    mode = os.environ.get("WANDB_MODE")
    if mode == "":
        del os.environ["WANDB_MODE"]
    return mode if mode and mode not in MODES else None


def choose_mode(wandb: Any, config: WandbTrackerConfig) -> tuple[str, str | None, str]:
    """`online`, `offline` or `disabled`; the key where one was found; why it is not online, if not asked.

    `auto` asks the environment first (`WANDB_MODE`, or the `wandb offline` switch), then looks for a key.
    """
    settings = wandb.setup().settings
    mode, asked = config.mode, ""
    if mode == "auto":
        asked = os.environ.get("WANDB_MODE") or settings.mode
        mode = {"dryrun": "offline", "offline": "offline", "disabled": "disabled"}.get(asked, "online")
    if mode == "disabled":
        return mode, None, f"WANDB_MODE={asked}"
    if mode == "offline":
        return mode, None, ""
    host = os.environ.get("WANDB_BASE_URL") or settings.base_url
    key = os.environ.get("WANDB_API_KEY") or settings.api_key or _netrc_key(host)
    if key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return mode, key, ""
    return "offline", None, f"no key for {urlsplit(host).netloc} (WANDB_API_KEY or wandb login)"


def _netrc_key(url: str) -> str | None:
    """The key in the user's netrc file for the server at `url`."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return None
    hosts = [urlsplit(url).netloc]
    if hosts[0] == "api.forge.coreweave.com":
        hosts.append("api.wandb.ai")  # the same server's older name, under which keys were kept
    for host in hosts:
        entry = entries.authenticators(host)
        if entry and entry[2]:
            return entry[2]
    return None


def run_settings(wandb: Any, config: WandbTrackerConfig, key: str | None) -> Any:
    """What every run of the harness sets; `key` as `choose_mode` found it."""
    wanted = {
        "silent": True,
        "console": "off",  # the run has train.log
        "allow_val_change": True,  # a resumed run may have another budget
        "init_timeout": config.init_timeout,
        "finish_timeout": config.finish_timeout,
        "api_key": key,  # given, so that wandb never looks for one itself and asks
        "base_url": os.environ.get("WANDB_BASE_URL"),
    }
    known = wandb.Settings.model_fields  # finish_timeout is newer than the oldest wandb we allow
    return wandb.Settings(**{k: v for k, v in wanted.items() if v is not None and k in known})


def quiet(wandb: Any) -> None:
    """Nothing of wandb's on the terminal, nor, through the root logger, in train.log."""
    wandb.setup(settings=wandb.Settings(silent=True))
    logging.getLogger("wandb").propagate = False
