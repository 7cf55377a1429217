"""Where a branch begins whose settings change the order of the data.

Between two orders that are the file's, the place is a token of the stream: nothing is read twice or left out.
A seeded order has no such place, for what it has read lies all over the stream: the next epoch begins, and
how much of this one is left out is said. Weights, optimizer, random numbers and counts are the checkpoint's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoints.checkpoint import CONFIG, Checkpoint
from harness.commandline.commands import shown
from harness.config import TrainConfig, in_file_order
from harness.config_record import from_dict
from harness.errors import UserError
from harness.loaders import TokenDataLoader, build_loader

if TYPE_CHECKING:
    from harness.loaders import Loader
    from harness.storage import Store

# The order itself stays as it is, and so does the place in it.
_SAME_ORDER = {"loader.mask_boundary", "trainer.dpo_beta"}


def check_directory(saved: Checkpoint, path: Path, accepted: dict[str, Any]) -> None:
    """Raise `UserError` where order-changing keys were accepted for the directory of the run itself."""
    if accepted and saved.run_dir == path:
        raise UserError(
            f"resume_accept=[{','.join(accepted)}] starts a branch, and {shown(path)} holds the run to "
            f"branch from, which stays as it is. Say resume={shown(path)} without run.name and "
            "hydra.run.dir, for a directory named by date and time, or with run.name=NEW_NAME"
        )


def check_budget(saved: Checkpoint, path: Path, budget: int) -> None:
    """Raise `UserError` where a branch would have no step to train."""
    if saved.run_dir != path and saved.step >= budget:
        raise UserError(
            f"{shown(saved.path)} is at step {saved.step} and the budget is {budget} steps: a branch in "
            f"{shown(path)} would have nothing to train. Give it more: trainer.max_steps={2 * saved.step}"
        )


def begun(
    saved: Checkpoint, config: TrainConfig, accepted: dict[str, Any], store: Store
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with the epoch and cursor that the loader of `config` takes up; a line that says where.

    `accepted`: the order-changing keys. Where none moves the place, the checkpoint comes back as it is.
    """
    if accepted.keys() <= _SAME_ORDER:
        return saved, []
    before = from_dict(saved.config, str(saved.path / CONFIG))
    old, new = _loader(before, store), _loader(config, store)
    old.load_state_dict(saved.loader)
    epoch: int = saved.trainer["epoch"]
    if in_file_order(before.loader) and in_file_order(config.loader):
        token = old.position * _stride(old)
        place = min(-(-token // _stride(new)), _places(new))
        new.start_epoch(epoch)
        line = f"data goes on at token {place * _stride(new):,} of epoch {epoch}"
        if skipped := place * _stride(new) - token:
            line += f", where the next window begins: {skipped:,} tokens are skipped"
        cursor = new.state_dict() | {"position": place}
    else:
        epoch += old.position > 0
        new.start_epoch(epoch)
        line = f"data goes on with epoch {epoch} from its start"
        if left := _tokens_left(old):
            line += f": {left:,} tokens that epoch {epoch - 1} had left are skipped"
        cursor = new.state_dict()
    return dataclasses.replace(saved, loader=cursor, trainer=saved.trainer | {"epoch": epoch}), [line]


def _loader(config: TrainConfig, store: Store) -> Loader:
    return build_loader(config.loader, store)


def _stride(loader: Any) -> int:
    """Tokens of the stream from one place of a file order to the next."""
    stride: int = 1 if isinstance(loader, TokenDataLoader) else loader.stride
    return stride


def _places(loader: Any) -> int:
    """The last position that there can be."""
    places: int = loader.dataset.total_tokens if isinstance(loader, TokenDataLoader) else loader.samples
    return places


def _tokens_left(loader: Any) -> int:
    """Targets of the batches that the epoch has left."""
    if isinstance(loader, TokenDataLoader):
        batches = (loader.dataset.total_tokens - 1 - loader.position) // (loader.batch_size * loader.seq_len)
    else:
        batches = (loader.samples - loader.position) // loader.batch_size
    return batches * loader.batch_size * loader.seq_len
