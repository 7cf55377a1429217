"""Whether the data of a run that goes on is the checkpoint's: decided by the set's digest.

Accepted with `resume_accept=[data]` is the same tokens in another storage, for every loader, and shards that
were added (growth.py), for a loader that reads in file order. Other data is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.commandline.commands import shown
from harness.config import TrainConfig, in_file_order, row_width, set_directory
from harness.config_record import differences, from_dict
from harness.errors import UserError
from harness.resuming import growth
from harness.resuming.resume import DATA, refusal, row_of

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint
    from harness.storage.manifest import Manifest


def check_place(checkpoint: Checkpoint, config: TrainConfig) -> None:
    """Raise `UserError` where the set is now to lie at another place and nothing is there.

    A run that goes on would prepare another set there, only to be told that it is another.
    """
    old, now = _config_of(checkpoint), set_directory(config)
    before = set_directory(old)
    if now != before and not now.exists():
        mend = "Say where the checkpoint's data lies, data.root=FOLDER or data.path=FOLDER"
        if row_width(old.loader) != row_width(config.loader):
            mend = f"Keep its rows, loader.row_width={row_width(old.loader)}"
        raise refusal(
            checkpoint,
            [f"data: checkpoint {shown(before)}, now {shown(now)}: there is no prepared set"],
            mend,
        )


def check_data(checkpoint: Checkpoint, config: TrainConfig, manifest: Manifest) -> list[str]:
    """Compare a checkpoint's data with the set it is to go on with; a line for a change that was accepted.

    Raises a `UserError` with both digests, and with what is known of the difference.
    """
    problems = []
    vocab_size = checkpoint.trainer["vocab_size"]
    if vocab_size != manifest.tokenizer.vocab_size:
        problems.append(
            f"vocabulary: checkpoint {vocab_size}, {manifest.path} {manifest.tokenizer.vocab_size}: "
            + row_of("vocabulary").meaning
        )
    data, accepted = _difference(checkpoint, manifest, config)
    if problems + data:
        raise refusal(checkpoint, problems + data, "Use the data of the checkpoint")
    if DATA in config.resume_accept and not accepted and not _was_accepted(checkpoint, config):
        raise UserError(
            f"resume_accept=[data] accepts a change that is none: {manifest.path} is the set that "
            f"{shown(checkpoint.path)} was trained on (metadata_sha256 {manifest.metadata_sha256}). Drop it, "
            "or name the other set: data.path=FOLDER"
        )
    return accepted


def _was_accepted(checkpoint: Checkpoint, config: TrainConfig) -> bool:
    """A command that is run again and again says the same words when there is nothing to accept any more."""
    return config.resume == "auto" or bool(checkpoint.trainer.get("data_changes"))


def _difference(
    checkpoint: Checkpoint, manifest: Manifest, config: TrainConfig
) -> tuple[list[str], list[str]]:
    """What is wrong with the data, and what was accepted of it; both empty where it is the checkpoint's."""
    old, new = checkpoint.trainer["metadata_sha256"], manifest.metadata_sha256
    if old == new:
        return [], []
    recorded = growth.recorded_manifest(checkpoint.run_dir, old)
    digests = f"metadata_sha256: checkpoint {old}, {manifest.path} {new}"
    added = growth.added_shards(recorded, manifest.raw)
    if added is not None:
        loaders = (_config_of(checkpoint).loader, config.loader)
        other_order = next((loader.name for loader in loaders if not in_file_order(loader)), None)
        what, accept = growth.in_words(added), growth.refusal(other_order, added)
        possible = other_order is None
    elif _same_content(checkpoint, manifest):
        what = f"the same tokens in another set (content_sha256 is {manifest.content_sha256} in both)"
        accept = f"{what}: every batch is the same, resume_accept=[data] goes on with it"
        possible = _same_boundary(recorded, manifest, config)
        if not possible:
            accept = f"{what}, but another boundary token, which loader.mask_boundary looks for"
    else:
        what, possible = "other data", False
        accept = "other data: a new run can start from these weights, init_from=" + str(
            shown(checkpoint.path)
        )
    if possible and DATA in config.resume_accept:
        return [], [f"accepted: data ({what}, {digests})"]
    known = differences(recorded, manifest.raw) if recorded else {}
    fields = "".join(f"\n      {key}: {_then_and_now(*values)}" for key, values in known.items())
    return [f"{digests}: {accept}{fields}"], []


def _same_content(checkpoint: Checkpoint, manifest: Manifest) -> bool:
    content = checkpoint.trainer["content_sha256"]
    return content is not None and content == manifest.content_sha256


def _same_boundary(recorded: dict[str, Any], manifest: Manifest, config: TrainConfig) -> bool:
    before = recorded.get("tokenizer", {}).get("boundary_token_id")
    return config.loader.mask_boundary == "none" or before == manifest.tokenizer.boundary_token_id


def _then_and_now(before: Any, after: Any) -> str:
    """Both values; of two lists of shards, which may be thousands, how many and where they part."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return f"then {before}, now {after}"
    same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
    first = min(len(before), len(after)) if same is None else same
    return f"then {len(before)}, now {len(after)}, different from number {first} on"


def _config_of(checkpoint: Checkpoint) -> TrainConfig:
    return from_dict(checkpoint.config, str(checkpoint.path / "config.yaml"))
