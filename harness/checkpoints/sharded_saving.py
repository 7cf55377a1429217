"""Saves of a sharded run: each rank writes its own files, and all agree on how each save ended.

A save is planned by all ranks together and then written by each for itself, in a thread where saves go on in
the background. What became of it the ranks tell one another at the next save or at the end, where the loop
is: nothing that they do together happens in a thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoints import checkpoint_writer, shard_writer
from harness.checkpoints.checkpoint import step_dir
from harness.checkpoints.checkpoint_writer import Cancelled
from harness.checkpoints.saving import Saver
from harness.config import CheckpointConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.checkpoints.sharded_checkpoint import Sharing
    from harness.distributed.ranks import Ranks

_TURN_S = 0.2  # from one look at the other ranks to the next, while all wait
_OTHERS_S = 10.0  # for their parts after ours, where a run ends in an error: one may be gone


class ShardedSaver(Saver):
    """A `Saver` of which every rank has one: `save` and `finish` are called by all together.

    The `model` and the `optimizer` of the parts that are saved are themselves. A save that fails on one rank
    has failed. A rank holds what it writes itself, and not its wait for the others.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        ranks: Ranks,
        beat: Callable[[], object] = lambda: None,
        holding: Callable[..., AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(run_dir, config, beat, holding)
        self._ranks, self._has_written = ranks, False
        self._step: int | None = None  # that is saved, or of which the end is not agreed on yet
        self._error: str | None = None  # of this rank's part
        self._abandoned = False
        self._sharing: Sharing | None = None

    def save(self, parts: dict[str, Any], before: Callable[[], object] = lambda: None) -> None:
        self._agree()
        self._raise_if_hopeless()
        step = parts["trainer"]["step"]
        if self._ranks.broadcast(self._is_saved(step)):
            self._failure, self.last_saved = "", step
            return
        self._begun, self._step, self._abandoned = time.monotonic(), step, False
        parts = self._shared(**parts)
        error = self._error = self._ranks.broadcast(self._make_room(step, parts))
        if error is None:
            self._begin(parts, before)
        # Not of `_error`: this rank's thread may have failed already, of which the others know nothing.
        if error is not None or not self._config.background:
            self._agree()

    def finish(self) -> None:
        self._agree()
        super().finish()

    def wait(self) -> None:
        """Return when this rank's save is done; not much later where others, that are gone, hold it up."""
        self._gets_done()

    def _patience(self) -> float:
        return _OTHERS_S if self._has_written else super()._patience()

    def _agree(self) -> None:
        """Return when no save is under way on any rank, and all know how the last one ended."""
        seen: list[int] = []
        while self._step is not None:
            self._idle.wait(_TURN_S)
            if self._fault is not None:
                raise self._fault  # the others see this rank end
            states = self._ranks.gather((self._idle.is_set(), self._blocks, self._error))
            errors = [error for _, _, error in states if error is not None]
            self._abandoned = bool(errors)
            if seen != (seen := [blocks for _, blocks, _ in states]):
                self._beat()
            if all(idle for idle, _, _ in states):
                self._agreed(self._step, errors)
                self._step = None

    def _shared(self, *, model: nn.Module, optimizer: torch.optim.Optimizer, **rest: Any) -> dict[str, Any]:
        """The parts with what `Share` says in place of model and optimizer."""
        from harness.checkpoints.sharded_checkpoint import Sharing

        if self._sharing is None:
            self._sharing = Sharing()
        return {**vars(self._sharing.share(model, optimizer)), **rest}

    def _agreed(self, step: int, errors: list[str]) -> None:
        if errors:
            self._failed(errors[0])
        else:
            self._failures, self._failure, self.last_saved = 0, "", step

    def _failed(self, failure: str) -> None:
        """Counted by every rank, said by rank 0."""
        if self._ranks.leads:
            super()._failed(failure)
        else:
            self._failures, self._failure = self._failures + 1, failure

    def _make_room(self, step: int, parts: dict[str, Any]) -> str | None:
        """Make the folder that every rank writes into; why it could not be made."""
        try:
            if self._ranks.leads:
                checkpoint_writer.make_room(step_dir(self._run_dir, step))
        except OSError as error:
            return self._in_words(step, parts, error)
        return None

    def _begin(self, parts: dict[str, Any], before: Callable[[], object]) -> None:
        """In a thread even where the caller waits, for it has to hear of a rank that fails meanwhile."""
        self._has_written = False
        self._begin_thread(self._memory.take(parts) if self._config.background else parts, before)

    def _write(self, parts: dict[str, Any], before: Callable[[], object]) -> None:
        trainer, ranks = parts["trainer"], self._ranks
        target = step_dir(self._run_dir, trainer["step"])
        try:
            if ranks.leads:
                with self._held():
                    before()
                    entries = shard_writer.write_own(target, **parts, between=self._between)
                self._has_written = True
                shard_writer.complete_with_others(
                    target, entries, ranks.size, trainer["step"], between=self._give_up_if_told
                )
                self._saved(target, trainer)
            else:
                with self._held():
                    shard_writer.write_part(
                        target, parts["tensors"], ranks.rank, ranks.size, trainer["step"], self._between
                    )
        except Cancelled:
            return
        except OSError as error:
            self._error = self._in_words(trainer["step"], parts, error)
            if isinstance(error, FileNotFoundError) and not ranks.leads:
                self._error += (
                    f". Rank {ranks.rank} does not see the folder that rank 0 has made: the run directory "
                    "must lie where all hosts see it"
                )

    def _between(self) -> None:
        self._give_up_if_told()
        self._blocks += 1

    def _give_up_if_told(self) -> None:
        """Before each block, and while rank 0 waits for the files of the others."""
        if self._abandoned or self._cancelled.is_set():
            raise Cancelled
