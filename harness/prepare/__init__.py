"""Text to storage: corpora, tokenizers, and the pipeline that writes a prepared set."""

from harness.prepare.job import preparation_settings
from harness.prepare.pipeline import prepare
from harness.prepare.summary import SplitSummary, Summary
from harness.prepare.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

__all__ = [
    "SplitSummary",
    "Summary",
    "Tokenizer",
    "load_tokenizer",
    "make_tokenizer",
    "preparation_settings",
    "prepare",
]
