"""Text to storage: corpora, tokenizers, and the pipeline that writes a prepared set."""

from harness.prepare.hdf5_writer import HDF5ShardWriter
from harness.prepare.job import preparation_settings
from harness.prepare.pipeline import prepare
from harness.prepare.records import recorded_corpus_path
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
