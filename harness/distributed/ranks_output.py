"""What the ranks of a run print: rank 0 all that one process does; the others warnings, with their rank."""

from __future__ import annotations

import logging
import os
import socket
import sys

from harness.distributed.ranks import Ranks


def only_of_rank_0(ranks: Ranks) -> None:
    """From here on what another rank prints is dropped; its stderr stays."""
    if not ranks.leads:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lives


def prefix(ranks: Ranks) -> str:
    """What is put before the words of another rank than the first."""
    return "" if ranks.leads else f"[rank {ranks.rank} on {socket.gethostname()}] "


def log_of(ranks: Ranks) -> None:
    """Of another rank's log, warnings and errors alone, on stderr. To be called after Hydra set it up."""
    if ranks.leads:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{prefix(ranks)}%(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger().handlers[:] = [handler]
