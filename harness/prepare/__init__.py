"""Text to storage: corpora, tokenizers, and the pipeline that writes a prepared set.

Each name is imported when it is asked for: a run compares settings and needs nothing of the pipeline.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.prepare.hdf5_writer import HDF5ShardWriter
    from harness.prepare.pipeline import prepare
    from harness.prepare.records import recorded_corpus_path
    from harness.prepare.settings import preparation_settings
    from harness.prepare.sharded_pipeline import JSONLSource, ShardedTokenizationPipeline
    from harness.prepare.summary import SplitSummary, Summary
    from harness.prepare.tokenizers import (
        Tokenizer,
        expected_vocab_size,
        load_tokenizer,
        make_tokenizer,
        tokenizer_identity,
    )

__all__ = [
    "HDF5ShardWriter",
    "JSONLSource",
    "ShardedTokenizationPipeline",
    "SplitSummary",
    "Summary",
    "Tokenizer",
    "expected_vocab_size",
    "load_tokenizer",
    "make_tokenizer",
    "preparation_settings",
    "prepare",
    "recorded_corpus_path",
    "tokenizer_identity",
]

_MODULES = {
    "HDF5ShardWriter": "hdf5_writer",
    "JSONLSource": "sharded_pipeline",
    "ShardedTokenizationPipeline": "sharded_pipeline",
    "SplitSummary": "summary",
    "Summary": "summary",
    "preparation_settings": "settings",
    "prepare": "pipeline",
    "recorded_corpus_path": "records",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'tokenizers')}"), name)
