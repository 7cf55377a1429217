"""From a chunk of the corpus to tokens: what a worker process does, and nothing that needs another chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from harness.errors import UserError
from harness.prepare.chunks import Chunk, FaultChunk, PieceChunk
from harness.prepare.pairs import PairPart, text_pairs, window_pairs
from harness.prepare.reading import PAIR_FIELDS, Document, Found, digests_of, read_documents, read_piece
from harness.prepare.tokenizers import ByteTokenizer, Tokenizer

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Rules:
    """What shapes the tokens of a document.

    `fields` are the names in a JSON object: none where the corpus is text or rows, one of the text, three
    of a prompt with its chosen and rejected continuation. With a `pair_width` documents become contrastive
    pairs of rows that wide.
    """

    fields: tuple[str, ...]
    separator: bytes | None
    val_fraction: float
    max_document_tokens: int | None
    pair_width: int | None = None


@dataclass
class Part:
    """One split's share of a chunk.

    `tokens` is `(n,)` of the tokenizer's dtype, each document followed by its boundary; `ends` is
    `(documents,)` int64, the position after each boundary; `bytes` counts the kept text as UTF-8.
    """

    tokens: np.ndarray
    ends: np.ndarray
    bytes: int


@dataclass
class Encoded(Found):
    """A chunk as tokens: `parts`, or `pairs` where they are wanted.

    `refused` is a document, in the form of `bad`, that the tokenizer cannot encode: the chunk ends there.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    pairs: dict[str, PairPart] = field(default_factory=dict)
    digests: bytes = b""
    documents: int = 0
    empty: int = 0
    truncated: int = 0
    refused: tuple[int, int | str | None, str] | None = None


def split_of(digest: bytes, val_fraction: float) -> str:
    """The split of a document, from its SHA-256 alone: identical documents never part."""
    return "val" if int.from_bytes(digest[:8], "big") < int(val_fraction * 2**64) else "train"


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer | None, rules: Rules) -> Encoded:
    """Read, check, hash, split and tokenise a chunk; without a tokenizer it stops after hashing."""
    result = Encoded()
    if isinstance(chunk, PieceChunk):
        _encode_piece(chunk, tokenizer, rules, result)
        return result
    if isinstance(chunk, FaultChunk):
        result.add_fault(chunk.file, None, chunk.reason)
        return result
    documents = read_documents(chunk, rules.fields, rules.separator, result)
    by_split = _by_split(documents, tokenizer, rules, result)
    if tokenizer is not None:
        for split, kept in by_split.items():
            if kept:
                _encode_split(split, kept, tokenizer, rules, result)
    return result


def _encode_split(
    split: str, documents: list[Document], tokenizer: Tokenizer, rules: Rules, result: Encoded
) -> None:
    if len(rules.fields) == PAIR_FIELDS:
        assert rules.pair_width is not None
        result.pairs[split] = _encode_pairs(documents, tokenizer, rules.pair_width, result)
        return
    part = _encode(documents, tokenizer, rules.max_document_tokens, result)
    if rules.pair_width is None:
        result.parts[split] = part
    else:
        boundary = tokenizer.boundary_token_id
        result.pairs[split] = window_pairs(part.tokens, part.ends, rules.pair_width, boundary)


def _by_split(
    documents: Iterator[Document], tokenizer: Tokenizer | None, rules: Rules, result: Encoded
) -> dict[str, list[Document]]:
    """Count, hash and sort documents; of each no more is kept than its encoding needs."""
    by_split: dict[str, list[Document]] = {split: [] for split in SPLITS}
    digests = []
    for document in documents:
        key, digest = digests_of(document)
        digests.append(digest)
        if tokenizer is not None:
            as_bytes = isinstance(tokenizer, ByteTokenizer) and not document.continuations
            kept = document._replace(text="") if as_bytes else document
            by_split[split_of(key, rules.val_fraction)].append(kept)
        result.empty += not document.data and not document.continuations
    result.digests = b"".join(digests)
    result.documents = len(digests)
    return by_split


def join_piece(
    chunk: PieceChunk, encoded: Encoded, before: int, tokenizer: Tokenizer, limit: int | None
) -> int:
    """Clip a piece to what the document may still hold and close the document after its last piece.

    `before` is the document's tokens so far; returns them with this piece's. Changes `encoded`.
    """
    ((split, part),) = encoded.parts.items()
    tokens, kept_bytes = part.tokens, part.bytes
    total = before + len(tokens)
    if limit is not None and total > limit:
        room = max(0, limit - before)
        kept_bytes = tokenizer.kept_bytes(read_piece(chunk), tokens, room)
        tokens = tokens[:room]
    ends = np.zeros(0, np.int64)
    if chunk.last:
        encoded.documents, encoded.digests = 1, chunk.digest
        encoded.truncated = int(limit is not None and total > limit)
        tokens = np.append(tokens, np.array([tokenizer.boundary_token_id], tokens.dtype))
        ends = np.array([len(tokens)], np.int64)
    encoded.parts[split] = Part(tokens, ends, kept_bytes)
    return 0 if chunk.last else total


def _encode_piece(chunk: PieceChunk, tokenizer: Tokenizer | None, rules: Rules, result: Encoded) -> None:
    if chunk.last and (tokenizer is None or rules.pair_width is not None):
        result.documents, result.digests = 1, chunk.digest
    if tokenizer is None:
        return
    text = read_piece(chunk)
    try:
        tokens, size = tokenizer.encode_measured(text)
    except UserError as error:
        result.refused = chunk.file, None, str(error)
        return
    split = split_of(chunk.digest, rules.val_fraction)
    if rules.pair_width is None:
        result.parts[split] = Part(tokens, np.zeros(0, np.int64), size)
    else:  # a document of its own, and the only one of its chunk: each of its windows is counted as skipped
        boundary = tokenizer.boundary_token_id
        closed = np.append(tokens, np.array([boundary], tokens.dtype))
        result.pairs[split] = window_pairs(closed, np.array([len(closed)]), rules.pair_width, boundary)


def _encode(documents: list[Document], tokenizer: Tokenizer, limit: int | None, result: Encoded) -> Part:
    if isinstance(tokenizer, ByteTokenizer):
        return _encode_bytes([document.data for document in documents], tokenizer, limit, result)
    boundary = np.array([tokenizer.boundary_token_id], tokenizer.dtype)
    arrays: list[np.ndarray] = []
    lengths, kept_bytes = np.empty(len(documents), np.int64), 0
    for index, document in enumerate(documents):
        try:
            tokens, size = tokenizer.encode_measured(document.text)
        except UserError as error:
            result.refused = document.file, document.line, str(error)
            return Part(np.zeros(0, tokenizer.dtype), np.zeros(0, np.int64), 0)
        if limit is not None and len(tokens) > limit:
            kept_bytes += tokenizer.kept_bytes(document.text, tokens, limit)
            tokens = tokens[:limit]
            result.truncated += 1
        else:
            kept_bytes += size
        arrays += (tokens, boundary)
        lengths[index] = len(tokens) + 1
    return Part(np.concatenate(arrays), np.cumsum(lengths), kept_bytes)


def _encode_pairs(documents: list[Document], tokenizer: Tokenizer, width: int, result: Encoded) -> PairPart:
    """Prompt and continuations are encoded one by one: no token lies across the seam of two of them."""
    triples = []
    for document in documents:
        texts = (document.text, *document.continuations)
        try:
            prompt, chosen, rejected = (tokenizer.encode_measured(text)[0] for text in texts)
        except UserError as error:
            result.refused = document.file, document.line, str(error)
            break
        triples.append((prompt, chosen, rejected))
    return text_pairs(triples, width, tokenizer.boundary_token_id, tokenizer.dtype)


def _encode_bytes(
    documents: list[bytes], tokenizer: ByteTokenizer, limit: int | None, result: Encoded
) -> Part:
    """All documents in one array operation: a byte stands where each boundary goes, then 0 is put there."""
    if limit is not None:
        result.truncated += sum(len(data) > limit for data in documents)
        documents = [data[:limit] for data in documents]
    tokens = tokenizer.encode_bytes(b"\n".join([*documents, b""]))
    ends = np.cumsum(np.fromiter(map(len, documents), np.int64, len(documents)) + 1)
    tokens[ends - 1] = tokenizer.boundary_token_id
    return Part(tokens, ends, len(tokens) - len(documents))
