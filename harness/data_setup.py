"""From a configuration to open token stores: prepared where that is free, compared, never guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commands import override, prepare_command, shell_word, shown
from harness.config import PrepareScriptConfig, TrainConfig, get, set_directory
from harness.errors import UserError
from harness.storage import open_store

if TYPE_CHECKING:
    from harness.storage.tokens import TokenStore


_FILES = ("corpus.path", "tokenizer.path")  # null in a run: whatever the set was made from


@dataclass
class Data:
    """The open stores of a run. `validation` may belong to another set than `train`."""

    train: TokenStore
    validation: TokenStore

    def close(self) -> None:
        self.train.close()
        self.validation.close()


def open_data(config: TrainConfig, report: Callable[[str], None]) -> Data:
    """Open the configured set; prepare the embedded corpus first where it is missing.

    Raises `UserError` where the set is missing, damaged, or not what the configuration says it is.
    """
    directory = set_directory(config)
    if not directory.exists():
        _prepare_or_refuse(config, directory, report)
    again = prepare_command(config, "prepare.overwrite=true")
    train = open_store(directory, "train", mmap=config.data.mmap, prepare_command=again)
    _check_digest(config, train)
    _check_preparation(config, train)
    validation = _open_validation(config, train)
    return Data(train, validation)


def _prepare_or_refuse(config: TrainConfig, directory: Path, report: Callable[[str], None]) -> None:
    if config.corpus.name != "stdlib" or (
        config.tokenizer.name == "hf" and not get(config, "tokenizer.path")
    ):
        unnamed = [f"{key}=PATH" for key in _FILES if _is_needed(config, key) and get(config, key) is None]
        how = prepare_command(config, *unnamed)
        raise UserError(f"there is no prepared set at {shown(directory)}. Prepare it first:\n  {how}")
    from harness.prepare import prepare

    report(f"no data at {directory} yet: preparing the embedded corpus once")
    wanted = PrepareScriptConfig(config.data, config.corpus, config.tokenizer, config.prepare)
    report(str(prepare(wanted, report=report)))


def _is_needed(config: TrainConfig, key: str) -> bool:
    """Whether a preparation has to be told this file: a run over a finished set need not be."""
    if key == "corpus.path":
        return config.corpus.name != "stdlib"
    return config.tokenizer.name == "hf"


def _check_digest(config: TrainConfig, store: TokenStore) -> None:
    expected = config.data.expect_sha256
    if expected is not None and store.metadata_sha256 != expected:
        raise UserError(
            f"data.expect_sha256={expected}, but {store.manifest.path} has {store.metadata_sha256}: "
            "this is another set. Point data.path at the right one, or drop data.expect_sha256."
        )


def _check_preparation(config: TrainConfig, store: TokenStore) -> None:
    """A run must not be logged as one tokenizer, corpus or split and read another."""
    from harness.prepare import preparation_settings

    manifest = store.manifest
    wanted = {"tokenizer": config.tokenizer.name, **_dotted(preparation_settings(config))}
    for key in ("corpus.field", "corpus.separator"):  # the set's corpus may have what the configured has not
        wanted.setdefault(key, None)
    found = {"tokenizer": manifest.tokenizer.name, **_dotted(manifest.preparation or {})}
    differing = {
        key: (found[key], wanted[key]) for key in wanted if key in found and wanted[key] != found[key]
    }
    differing |= _differing_files(config, store)
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
    names = {key: f"corpus.{key}" for key in ("field", "pair_fields", "separator", "suffixes")} | {
        "corpus": "corpus"
    }
    return {names.get(key, f"prepare.{key}"): value for key, value in preparation.items()}


def _differing_files(config: TrainConfig, store: TokenStore) -> dict[str, tuple[Any, Any]]:
    """Text and tokenizer files that the configuration names and the set was not made from."""
    from harness.prepare import recorded_corpus_path, tokenizer_identity

    differing: dict[str, tuple[Any, Any]] = {}
    named, recorded = get(config, "corpus.path"), recorded_corpus_path(store.manifest.directory)
    if named is not None and recorded is not None and named != recorded:
        differing["corpus.path"] = (recorded, named)
    ours, theirs = tokenizer_identity(config.tokenizer), store.manifest.tokenizer.sha256
    if ours is not None and theirs is not None and ours != theirs:
        differing["tokenizer.path"] = (f"sha256 {theirs}", f"{get(config, 'tokenizer.path')}, sha256 {ours}")
    return differing


def _open_validation(config: TrainConfig, train: TokenStore) -> TokenStore:
    path = config.evaluation.set
    directory = train.manifest.directory if path is None else Path(path)
    store = open_store(directory, "val", mmap=config.data.mmap)
    if path is None and store.metadata_sha256 != train.metadata_sha256:
        raise UserError(
            f"{store.manifest.path} was replaced while it was opened: {train.metadata_sha256} became "
            f"{store.metadata_sha256}. Start again when no preparation writes there."
        )
    ours, theirs = train.manifest.tokenizer, store.manifest.tokenizer
    if (ours.name, ours.vocab_size, ours.sha256) != (theirs.name, theirs.vocab_size, theirs.sha256):
        raise UserError(
            f"evaluation.set={path} was made with tokenizer {theirs.name} ({theirs.vocab_size} ids), "
            f"the training set with {ours.name} ({ours.vocab_size}): losses would mean nothing. "
            "Name a set made with the same tokenizer."
        )
    needed = config.loader.seq_len + 1
    if store.total_tokens < needed:
        raise UserError(
            f"loader.seq_len={config.loader.seq_len} needs {needed} tokens, but val has {store.total_tokens} "
            f"({store.manifest.path}). Use loader.seq_len<={max(1, store.total_tokens - 1)}, raise "
            f"prepare.val_fraction, or prepare more text: {prepare_command(config, 'prepare.overwrite=true')}"
        )
    _check_ids(store, min(config.evaluation.tokens, store.total_tokens - 1))
    return store


def _check_ids(store: TokenStore, count: int) -> None:
    """Read what evaluations will read: an id beyond the vocabulary shows now, not after hours of training."""
    for start in range(0, count, 1 << 20):
        store.get_sequence(start, min(1 << 20, count - start))
