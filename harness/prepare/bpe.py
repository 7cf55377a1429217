"""`tokenizer=bpe`: a byte-level BPE learnt from the training documents of the corpus itself."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterator

from harness.config_groups import BpeTokenizerConfig, CorpusConfig
from harness.prepare.chunks import Chunk, FaultChunk, PieceChunk, stream_chunks
from harness.prepare.corpora import SourceFile
from harness.prepare.documents import Rules, split_of
from harness.prepare.hf_tokenizer import HfTokenizer
from harness.prepare.reading import Found, digests_of, read_documents, read_piece
from harness.prepare.tokenizer_base import optional_package

BOUNDARY = "<|endoftext|>"
DOCUMENT_BYTES = 1 << 20  # of one text at most, so that a giant is not the whole sample
READ_BYTES = 256 << 20  # a larger corpus is sampled from so many bytes of it, spread evenly
_READ_FACTOR = 16


def learn_tokenizer(
    config: BpeTokenizerConfig,
    corpus: CorpusConfig,
    files: list[SourceFile],
    rules: Rules,
    report: Callable[[str], object],
) -> HfTokenizer:
    """Learn `config.vocab_size` ids or, where the text has no more pairs that occur twice, fewer.

    The same documents and settings give the same tokenizer with one version of the package `tokenizers`,
    whatever the number of processes and threads.
    """
    library = optional_package("tokenizers", "bpe")
    budget = max(READ_BYTES, _READ_FACTOR * config.train_bytes)
    every = max(1, sum(file.size for file in files) // budget)
    texts = training_texts(
        itertools.islice(stream_chunks(corpus, files), 0, None, every), rules, config.train_bytes
    )
    size = sum(len(text.encode()) for text in texts)
    report(f"tokenizer=bpe: learning {config.vocab_size:,} ids from {size:,} bytes of training text")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=2,
        special_tokens=[BOUNDARY],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learnt = HfTokenizer(tokenizer.to_str().encode(), "the tokenizer just learnt", BOUNDARY, name="bpe")
    if learnt.vocab_size < config.vocab_size:
        report(
            f"tokenizer=bpe: {learnt.vocab_size:,} ids, not tokenizer.vocab_size={config.vocab_size:,}: "
            "no other pair occurs twice in that text. The set and its models have this smaller vocabulary"
        )
    return learnt


def training_texts(chunks: Iterator[Chunk], rules: Rules, limit: int) -> list[str]:
    """The training documents with the smallest SHA-256 that together hold at most `limit` bytes.

    That is an even sample of all of them which does not depend on their order or on how they are cut into
    files and chunks. Equal documents count once; of each text the first `DOCUMENT_BYTES` are used.
    """
    cap = min(DOCUMENT_BYTES, limit)
    kept: list[tuple[int, list[str], int]] = []  # a heap: the largest digest first
    digests: set[int] = set()
    total, below = 0, 1 << 256
    for digest, texts in _training_documents(chunks, rules):
        key = int.from_bytes(digest, "big")
        if key >= below or key in digests:
            continue
        parts = [_cut(text, cap) for text in texts]
        size = sum(len(part.encode()) for part in parts)
        heapq.heappush(kept, (-key, parts, size))
        digests.add(key)
        total += size
        while total > limit:  # whoever is pushed out has too many smaller ones, now and later
            largest, _, size = heapq.heappop(kept)
            below = -largest
            digests.remove(below)
            total -= size
    return [part for _, parts, _ in sorted(kept, reverse=True) for part in parts]


def _training_documents(chunks: Iterator[Chunk], rules: Rules) -> Iterator[tuple[bytes, list[str]]]:
    """Each document's digest and texts; a piece of a giant document is one of its own."""
    for chunk in chunks:
        if isinstance(chunk, FaultChunk):
            continue
        if isinstance(chunk, PieceChunk):
            if split_of(chunk.digest, rules.val_fraction) == "train":
                place = chunk.start.to_bytes(8, "big")
                yield hashlib.sha256(chunk.digest + place).digest(), [read_piece(chunk)]
            continue
        for document in read_documents(chunk, rules.fields, rules.separator, Found()):
            key, digest = digests_of(document)
            if split_of(key, rules.val_fraction) == "train":
                yield digest, [document.text, *document.continuations]


def _cut(text: str, size: int) -> str:
    """The first `size` bytes of a text as UTF-8, without the part of a character that may end them."""
    return text if len(text) * 4 <= size else text.encode()[:size].decode(errors="ignore")
