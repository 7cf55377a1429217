"""A checkpoint opened by all ranks together: the same one on each, and no file of it hashed twice on a host.

Each host reads a checkpoint for itself, from a folder of its own perhaps, or by a network and a cache of its
own. So the ranks of each host hash all of it, and share that out by files: what a rank loads has been checked
where it loads it, before any rank goes on.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoints.checkpoint import open_checkpoint
from harness.checkpoints.checkpoint_files import INDEX, Entries, check_files
from harness.errors import UserError
from harness.files import sha256_file

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint
    from harness.distributed.meeting import Meeting


def opened(meeting: Meeting, folder: Path) -> Checkpoint:
    """`open_checkpoint` of the same checkpoint on every rank; every rank calls it, and raises the same."""
    check_alike(folder, meeting)
    return checked(meeting, folder)


def checked(meeting: Meeting, folder: Path) -> Checkpoint:
    """The same after `check_alike`."""
    return open_checkpoint(folder, check=partial(_check_files, meeting))


def check_alike(folder: Path | None, meeting: Meeting) -> None:
    """Raise `UserError` where the ranks did not all find the same checkpoint to begin from."""
    mine = None if folder is None else [folder.name, _digest(folder)]
    answers = meeting.gather("begins", [socket.gethostname(), mine])
    host, first = answers[0]
    for rank, (other_host, other) in enumerate(answers):
        if other != first:
            raise UserError(
                f"rank 0 on {host} begins from {_in_words(first)}, rank {rank} on {other_host} from "
                f"{_in_words(other)}: every host reads the checkpoint. Put the run where all hosts see it "
                "under one path: hydra.run.dir=FOLDER on a disk that they share"
            )


def _digest(folder: Path) -> str:
    """Of the file that names the digests of all others."""
    try:
        return sha256_file(folder / INDEX)
    except OSError as error:
        return f"none: {error.strerror}"


def _in_words(begins: list[Any] | None) -> str:
    return "nothing" if begins is None else f"{begins[0]} (sha256 {begins[1]} of {INDEX})"


def _check_files(meeting: Meeting, path: Path, entries: Entries) -> None:
    """`check_files`, shared out among the ranks of each host; what one of them finds all raise."""
    host = meeting.on_host("checkpoint")
    share = _shares(entries, len(host))[host.index(meeting.ranks.rank)]
    fault = None
    try:
        check_files(path, {name: entries[name] for name in share})
    except UserError as error:
        fault = str(error)
    answers = meeting.gather("checkpoint", [socket.gethostname(), fault])
    hosts = {name for name, _ in answers}
    for name, found in answers:
        if found is not None:
            raise UserError(found if len(hosts) == 1 else f"{found} (on {name})")


def _shares(entries: Entries, parts: int) -> list[list[str]]:
    """The files in `parts` lists of about as many bytes: the largest first, each where there is least yet."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for name in sorted(entries, key=lambda name: (-entries[name]["bytes"], name)):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += entries[name]["bytes"]
    return shares
