"""The settings that shape a set's tokens: what its manifest records, and what a run is compared with."""

from __future__ import annotations

from typing import Any

from harness.commandline.escapes import escape
from harness.config import PrepareScriptConfig, TrainConfig, layout
from harness.config_groups import (
    BpeTokenizerConfig,
    JsonlCorpusConfig,
    ParquetCorpusConfig,
    TextCorpusConfig,
)
from harness.prepare.corpora import separator_of

SHARDING = "tokens"  # what a manifest means that does not say
PrepareLike = PrepareScriptConfig | TrainConfig


def preparation_settings(config: PrepareLike) -> dict[str, Any]:
    """The manifest's `preparation` as far as it follows from the config: all but `corpus_sha256`."""
    settings: dict[str, Any] = {"corpus": config.corpus.name}
    if isinstance(config.corpus, JsonlCorpusConfig) and layout(config.loader) == "contrastive":
        settings["pair_fields"] = list(config.corpus.pair_fields)
    elif isinstance(config.corpus, JsonlCorpusConfig | ParquetCorpusConfig):
        settings["field"] = config.corpus.field
    if isinstance(config.corpus, TextCorpusConfig):
        # also null and [], so that a set without one differs from one with
        separator = separator_of(config.corpus)
        settings["separator"] = None if separator is None else escape(separator.decode())
        settings["suffixes"] = sorted(set(config.corpus.suffixes))
    if isinstance(config.tokenizer, BpeTokenizerConfig):
        settings["bpe_vocab_size"] = config.tokenizer.vocab_size
        settings["bpe_train_bytes"] = config.tokenizer.train_bytes
    settings |= {
        "max_document_tokens": config.prepare.max_document_tokens,
        "val_fraction": float(config.prepare.val_fraction),
    }
    if config.prepare.sharding == SHARDING:
        return settings | {"shard_tokens": config.prepare.shard_tokens}
    return settings | {"sharding": config.prepare.sharding}
