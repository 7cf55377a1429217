"""Writing a step in shards: every rank its own files, rank 0 the rest, and the index when all are there.

Nothing here is a collective: a thread of each rank may write while training goes on. A rank whose files are
durable says so by a small file beside them, with their sizes and hashes, which rank 0 waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoints.checkpoint_files import SHARDED_VERSION, read_json
from harness.checkpoints.checkpoint_writer import (
    Writer,
    complete,
    removed_on_failure,
    small_writers,
    temporary_of,
    to_json,
    write_files,
)
from harness.checkpoints.safetensors_file import write_safetensors
from harness.checkpoints.shard_files import (
    MODEL_PART,
    OPTIMIZER_PART,
    SHARDS,
    ShardIndex,
    metadata_of,
    part_file,
)
from harness.files import write_atomic

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S = 0.02


def write_part(
    target: Path,
    tensors: dict[str, Tensor],
    rank: int,
    ranks: int,
    step: int,
    between: Callable[[], object],
) -> None:
    """Write this rank's tensors of the `step` in `target`, whose temporary folder rank 0 has made.

    `between` is called before each block; what it raises ends the writing.
    """
    temporary = temporary_of(target)
    entries = write_files(temporary, _writers(tensors, rank, ranks, step), between)
    write_atomic(temporary / _done(rank), to_json(entries))


def write_own(
    target: Path,
    *,
    tensors: dict[str, Tensor],
    index: ShardIndex,
    rng: dict[str, Any],
    loader: dict[str, Any],
    trainer: dict[str, Any],
    config: dict[str, Any],
    between: Callable[[], object],
) -> dict[str, dict[str, Any]]:
    """Write rank 0's tensors and what is not sharded: their entries in the index.

    A failure removes what all ranks have written of the step.
    """
    temporary = temporary_of(target)
    writers = {
        SHARDS: lambda file: file.write(to_json(index.to_json())),
        **_writers(tensors, 0, index.ranks, trainer["step"]),
        **small_writers(rng=rng, loader=loader, trainer=trainer, config=config),
    }
    with removed_on_failure(temporary):
        return write_files(temporary, writers, between)


def complete_with_others(
    target: Path, entries: dict[str, dict[str, Any]], ranks: int, step: int, between: Callable[[], object]
) -> None:
    """Wait for the files of the other ranks, and complete the step with them; rank 0 calls it.

    A failure removes what all ranks have written of the step. `between` is called again and again until the
    others are done; what it raises ends the wait.
    """
    temporary = temporary_of(target)
    with removed_on_failure(temporary):
        for rank in range(1, ranks):
            while not (temporary / _done(rank)).is_file():
                between()
                time.sleep(_POLL_S)
            entries |= read_json(temporary, _done(rank))
            (temporary / _done(rank)).unlink()
        complete(temporary, target, SHARDED_VERSION, step, entries, between)


def _writers(tensors: dict[str, Tensor], rank: int, ranks: int, step: int) -> dict[str, Writer]:
    """What writes a rank's files."""

    def writer(part: str) -> Writer:
        named = {name: tensor for name, tensor in tensors.items() if name.startswith(part + ".")}
        return lambda file: write_safetensors(named, file, metadata_of(rank, ranks, step))

    return {part_file(part, rank, ranks): writer(part) for part in (MODEL_PART, OPTIMIZER_PART)}


def _done(rank: int) -> str:
    return f"done-{rank:05d}.json"
