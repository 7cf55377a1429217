"""From a configuration to open stores: prepared where that is free, compared, never guessed."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commandline.commands import override, prepare_command, shell_word, shown
from harness.config import PrepareScriptConfig, TrainConfig, get, layout, set_directory
from harness.config_groups import LoaderConfig, PrepareConfig
from harness.distributed import rendezvous
from harness.distributed.meeting import Meeting
from harness.errors import UserError
from harness.storage import PairStore, Store, TokenStore, open_split
from harness.storage.manifest import load_manifest
from harness.storage.verify import ensure_verified

if TYPE_CHECKING:
    from harness.storage.manifest import Manifest


_FILES = ("corpus.path", "tokenizer.path")  # null in a run: whatever the set was made from

# Settings in a manifest's preparation -> their keys, where those are not `prepare.NAME`.
_NAMES = {key: f"corpus.{key}" for key in ("field", "pair_fields", "separator", "suffixes")} | {
    "corpus": "corpus",
    "bpe_vocab_size": "tokenizer.vocab_size",
    "bpe_train_bytes": "tokenizer.train_bytes",
}

# storage.layout -> a loader that reads it
_LOADERS = {"stream": "sequential", "rows": "padded_rows", "contrastive": "contrastive_rows"}


@dataclass
class Data:
    """The open stores of a run. `validation` may belong to another set than `train`."""

    train: Store
    validation: Store

    @property
    def stores(self) -> tuple[Store, Store]:
        return self.train, self.validation

    def close(self) -> None:
        self.train.close()
        self.validation.close()


def open_data(
    config: TrainConfig,
    report: Callable[[str], None],
    *,
    writes: bool = True,
    meeting: Meeting | None = None,
) -> Data:
    """Open the configured set; prepare the embedded corpus first where it is missing.

    With `writes` False nothing is prepared, and nobody remembers that the set was verified. One rank of each
    host prepares and verifies, the others of the host wait for it. Raises `UserError` where the set is
    missing, damaged, or not what the configuration says it is; and where the hosts have different sets.
    """
    meeting = meeting or rendezvous.current()
    with meeting.one_by_host("data") as first:
        for missing in unprepared(config) if writes and first else []:
            _prepare(missing, report)
        data = _opened(config)
        try:
            # By place and not by digest: a copy of a set has files of its own.
            for manifest in {store.manifest.path: store.manifest for store in data.stores}.values():
                ensure_verified(manifest, config.data.verify if first else "headers", report, keep=writes)
        except BaseException:
            data.close()
            raise
    _check_alike(data, meeting)
    return data


def _opened(config: TrainConfig) -> Data:
    directory = set_directory(config)
    again = prepare_command(config, "prepare.overwrite=true")
    train = open_split(directory, "train", mmap=config.data.mmap, prepare_command=again)
    _check_digest(config, train)
    _check_preparation(config, train)
    if train.total_tokens == 0 and not isinstance(train, TokenStore):
        raise UserError(
            f"{train.manifest.path}: the masks of train leave 0 of its {train.total_rows} rows' tokens as "
            "targets, so there is nothing to learn from. Prepare rows that hold text: "
            + prepare_command(config, "prepare.overwrite=true")
        )
    return Data(train, _open_validation(config, train))


def _check_alike(data: Data, meeting: Meeting) -> None:
    """Raise `UserError` where another rank opened another set: each would train on rows of its own batch."""
    mine = [[store.metadata_sha256, str(store.manifest.path)] for store in data.stores]
    answers = meeting.gather("sets", [socket.gethostname(), mine])
    host, first = answers[0]
    for other_host, other in answers:
        for (ours, path), (theirs, other_path), word in zip(
            first, other, ("training", "validation"), strict=True
        ):
            if ours != theirs:
                data.close()
                raise UserError(
                    f"the {word} set on {host}, {path}, has metadata_sha256 {ours}, and that on "
                    f"{other_host}, {other_path}, has {theirs}: each host would give other tokens to a step. "
                    "Copy one of the sets to the other host; data.expect_sha256 says which is meant"
                )


def unprepared(config: TrainConfig) -> list[TrainConfig]:
    """Configurations of the sets that a start prepares first: the run's own, the stream it is validated on.

    Each is missing, and from the embedded corpus, which is free. Raises `UserError` where any other set is
    missing.
    """
    validated, missing = config.evaluation.set, []
    if validated is not None and not os.path.exists(validated):
        stream = dataclasses.replace(config, loader=LoaderConfig())
        missing = [one for one in (stream, config) if _is_at(one, validated)][:1]
    if validated is not None and not (missing and _is_free(config)):
        load_manifest(validated)  # before anything is prepared
    directory = set_directory(config)
    if not directory.exists() and not _is_free(config):
        how = prepare_command(config)
        raise UserError(f"there is no prepared set at {shown(directory)}. Prepare it first:\n  {how}")
    if not directory.exists() and not any(_is_at(one, directory) for one in missing):
        missing.insert(0, config)
    return missing


def _is_at(config: TrainConfig, place: str | Path) -> bool:
    return os.path.realpath(set_directory(config)) == os.path.realpath(place)


def _is_free(config: TrainConfig) -> bool:
    return config.corpus.name == "stdlib" and not (
        config.tokenizer.name == "hf" and not get(config, "tokenizer.path")
    )


def _prepare(config: TrainConfig, report: Callable[[str], None]) -> None:
    from harness.prepare import prepare

    report(f"no data at {set_directory(config)} yet: preparing the embedded corpus once")
    wanted = PrepareScriptConfig(
        config.data, config.corpus, config.tokenizer, config.prepare, config.loader, config.seed
    )
    report(str(prepare(wanted, report=report)))


def _check_digest(config: TrainConfig, store: Store) -> None:
    expected = config.data.expect_sha256
    if expected is not None and store.metadata_sha256 != expected:
        raise UserError(
            f"data.expect_sha256={expected}, but {store.manifest.path} has {store.metadata_sha256}: "
            "this is another set. Point data.path at the right one, or drop data.expect_sha256."
        )


def _check_preparation(config: TrainConfig, store: Store) -> None:
    """A run must not be logged as one storage, tokenizer, corpus or split and read another."""
    from harness.prepare import preparation_settings

    manifest = store.manifest
    wanted = {"tokenizer": config.tokenizer.name, **_dotted(preparation_settings(config))}
    for key in ("corpus.field", "corpus.separator"):  # the set's corpus may have what the configured has not
        wanted.setdefault(key, None)
    found = {"tokenizer": manifest.tokenizer.name, **_dotted(manifest.preparation or {})}
    differing = {
        key: (found[key], wanted[key]) for key in wanted if key in found and wanted[key] != found[key]
    }
    differing |= _differing_storage(config, manifest) | _differing_files(config, store)
    if differing:
        lines = "\n".join(
            f"  - {key}: the set {old}, the configuration {new}" for key, (old, new) in differing.items()
        )
        mend = {key: None if key in _FILES else old for key, (old, _) in differing.items()}
        words = " ".join(shell_word(override(key, value)) for key, value in mend.items())
        raise UserError(
            f"{manifest.path} was not prepared as the configuration says:\n{lines}\n"
            f"To train on this set say so: {words}\nTo make the other one beside it, and train on that:\n  "
            + prepare_command(config, "data.path=ANOTHER_FOLDER")
        )


def _dotted(preparation: dict[str, Any]) -> dict[str, Any]:
    """The manifest's preparation under the names of the command line."""
    dotted = {_NAMES.get(key, f"prepare.{key}"): value for key, value in preparation.items()}
    if "prepare.shard_tokens" in dotted:
        dotted["prepare.sharding"] = PrepareConfig.sharding  # recorded only where it is another
    return dotted


def _differing_storage(config: TrainConfig, manifest: Manifest) -> dict[str, tuple[Any, Any]]:
    """How the set lies on disk: the group words and the keys that a run names and the manifest says too."""
    storage = manifest.storage
    found = {
        "data": storage.format,
        "data.compression": storage.compression,
        "data.chunk_tokens": storage.chunk_tokens,
        "loader": config.loader.name if storage.layout == layout(config.loader) else _LOADERS[storage.layout],
        "loader.row_width": max((split.row_width or 0 for split in manifest.splits.values()), default=0),
    }
    wanted = {"data": config.data.name, "loader": config.loader.name}
    wanted |= {key: get(config, key) for key in found if "." in key}
    return {
        key: (found[key], wanted[key])
        for key in found
        if None not in (found[key], wanted[key]) and found[key] != wanted[key]
    }


def _differing_files(config: TrainConfig, store: Store) -> dict[str, tuple[Any, Any]]:
    """Text and tokenizer files that the configuration names and the set was not made from."""
    from harness import prepare

    differing: dict[str, tuple[Any, Any]] = {}
    if (named := get(config, "corpus.path")) is not None:
        recorded = prepare.recorded_corpus_path(store.manifest.directory)
        if recorded is not None and named != recorded:
            differing["corpus.path"] = (recorded, named)
    ours, theirs = prepare.tokenizer_identity(config.tokenizer), store.manifest.tokenizer.sha256
    if ours is not None and theirs is not None and ours != theirs:
        differing["tokenizer.path"] = (f"sha256 {theirs}", f"{get(config, 'tokenizer.path')}, sha256 {ours}")
    return differing


def _open_validation(config: TrainConfig, train: Store) -> Store:
    path = config.evaluation.set
    directory = train.manifest.directory if path is None else Path(path)
    store = open_split(directory, "val", mmap=config.data.mmap)
    if path is None and store.metadata_sha256 != train.metadata_sha256:
        raise UserError(
            f"{store.manifest.path} was replaced while it was opened: {train.metadata_sha256} became "
            f"{store.metadata_sha256}. Start again when no preparation writes there."
        )
    ours, theirs = train.manifest.tokenizer, store.manifest.tokenizer
    if not ours.means_the_same(theirs):
        raise UserError(
            f"evaluation.set={path} was made with tokenizer {theirs.name} ({theirs.vocab_size} ids), "
            f"the training set with {ours.name} ({ours.vocab_size}): losses would mean nothing. "
            "Name a set made with the same tokenizer."
        )
    if isinstance(store, PairStore) and not isinstance(train, PairStore):
        raise UserError(
            f"evaluation.set={path} holds pairs, but this run trains with loader={config.loader.name}: "
            "pairs are judged against the starting weights, which only a run of loader=contrastive_rows "
            "keeps. Name a set of a stream or of rows."
        )
    needed = config.loader.seq_len + 1
    if isinstance(store, TokenStore) and store.total_tokens < needed:
        raise UserError(
            f"loader.seq_len={config.loader.seq_len} needs {needed} tokens, but val has {store.total_tokens} "
            f"({store.manifest.path}). Use loader.seq_len<={max(1, store.total_tokens - 1)}, raise "
            f"prepare.val_fraction, or prepare more text: {prepare_command(config, 'prepare.overwrite=true')}"
        )
    _read_once(config, store)
    return store


def _read_once(config: TrainConfig, store: Store) -> None:
    """Read what evaluations will read: a bad id, or nothing to count, shows now and not after hours."""
    from harness.training.evaluation import batches
    from harness.training.objectives import target_counts

    parts = batches(store, config.evaluation.tokens, config.loader.batch_size, config.loader.seq_len)
    if not sum(int(target_counts(targets).sum()) for _, targets in parts):
        raise UserError(
            f"val has no target ({store.manifest.path}, {store.total_tokens} tokens), so nothing can be "
            f"evaluated. Raise prepare.val_fraction, or prepare more text: "
            f"{prepare_command(config, 'prepare.overwrite=true')}"
        )
