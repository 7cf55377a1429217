"""A training-run harness for GPT pre-training on pre-tokenised data."""

__version__ = "0.1.0"
