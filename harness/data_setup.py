"""From a configuration to open token stores: prepared where that is free, compared, never guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commands import override, prepare_command, shell_word
from harness.config import PrepareScriptConfig, TrainConfig, set_directory
from harness.errors import UserError
from harness.storage import open_store

if TYPE_CHECKING:
    from harness.storage.tokens import TokenStore


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
    train = open_store(directory, "train", mmap=config.data.mmap)
    _check_digest(config, train)
    _check_preparation(config, train)
    validation = _open_validation(config, train)
    return Data(train, validation)


def _prepare_or_refuse(config: TrainConfig, directory: Path, report: Callable[[str], None]) -> None:
    if config.corpus.name != "stdlib":
        raise UserError(
            f"there is no prepared set at {directory}. Prepare it first:\n  {prepare_command(config)}"
        )
    from harness.prepare import prepare

    report(f"no data at {directory} yet: preparing the embedded corpus once")
    wanted = PrepareScriptConfig(config.data, config.corpus, config.tokenizer, config.prepare)
    report(str(prepare(wanted, report=report)))


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
    wanted: dict[str, Any] = {"tokenizer": config.tokenizer.name, **preparation_settings(config)}
    for key in ("field", "separator"):  # the set's corpus may have what the configured one has not
        wanted.setdefault(key, None)
    found: dict[str, Any] = {"tokenizer": manifest.tokenizer.name, **(manifest.preparation or {})}
    differing = [key for key in wanted if key in found and wanted[key] != found[key]]
    if differing:
        lines = "\n".join(
            f"  - {key}: the set {found[key]}, the configuration {wanted[key]}" for key in differing
        )
        words = " ".join(_override(key, found[key]) for key in differing)
        raise UserError(
            f"{manifest.path} was not prepared as the configuration says:\n{lines}\n"
            f"To train on this set say so: {words}\nTo make the other one:\n  "
            + prepare_command(config, "prepare.overwrite=true")
        )


def _override(key: str, value: Any) -> str:
    names = {"corpus": "corpus", "tokenizer": "tokenizer"}
    names |= {"field": "corpus.field", "separator": "corpus.separator"}
    return shell_word(override(names.get(key, f"prepare.{key}"), value))


def _open_validation(config: TrainConfig, train: TokenStore) -> TokenStore:
    path = config.evaluation.set
    directory = train.manifest.directory if path is None else Path(path)
    store = open_store(directory, "val", mmap=config.data.mmap)
    ours, theirs = train.manifest.tokenizer, store.manifest.tokenizer
    if (ours.name, ours.vocab_size, ours.sha256) != (theirs.name, theirs.vocab_size, theirs.sha256):
        raise UserError(
            f"evaluation.set={path} was made with tokenizer {theirs.name} ({theirs.vocab_size} ids), "
            f"the training set with {ours.name} ({ours.vocab_size}): losses would mean nothing. "
            "Name a set made with the same tokenizer."
        )
    if store.total_tokens < 2:
        raise UserError(
            f"val has {store.total_tokens} tokens ({store.manifest.path}); 2 are needed for one target. "
            "Prepare more text or raise prepare.val_fraction."
        )
    return store
