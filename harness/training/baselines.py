"""What counting alone achieves: the bits a byte of unigrams and bigrams, to judge a model by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.storage.tokens import TokenStore

MAX_VOCAB = 8192  # a table of vocab_size^2 counts, float64: 512 MiB
_BLOCK = 1 << 22


def count_pairs(store: TokenStore) -> np.ndarray:
    """How often token b follows token a in a split: int64 `(vocab_size, vocab_size)`."""
    size = store.vocab_size
    if size > MAX_VOCAB:
        raise UserError(
            f"a bigram table for a vocabulary of {size} is too large, {MAX_VOCAB} is the limit: "
            "compare with another run instead"
        )
    counts = np.zeros(size * size, dtype=np.int64)
    for start in range(0, store.total_tokens - 1, _BLOCK):
        tokens = store.read_tokens(start, min(_BLOCK + 1, store.total_tokens - start)).astype(np.int64)
        counts += np.bincount(tokens[:-1] * size + tokens[1:], minlength=size * size)
    return counts.reshape(size, size)


def baseline_losses(train: TokenStore, validation: TokenStore, tokens: int) -> dict[str, float]:
    """Nats a token of `unigram` and `bigram` models of `train` on the first `tokens` targets of `validation`.

    The unigram counts start from one; the bigram is smoothed by one observation drawn from the unigram,
    so that neither is infinite: `(count(a, b) + p(b)) / (count(a) + 1)`.
    """
    pairs = count_pairs(train).astype(np.float64)
    frequency = pairs.sum(axis=0) + 1
    unigram = frequency / frequency.sum()
    bigram = (pairs + unigram) / (pairs.sum(axis=1, keepdims=True) + 1)
    count = min(tokens, validation.total_tokens - 1)
    ids = validation.read_tokens(0, count + 1).astype(np.int64)
    return {
        "unigram": float(-np.log(unigram[ids[1:]]).mean()),
        "bigram": float(-np.log(bigram[ids[:-1], ids[1:]]).mean()),
    }
