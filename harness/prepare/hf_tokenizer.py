"""Any Hugging Face `tokenizer.json`, and what it must be for its tokens to hold the whole text."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.prepare.tokenizer_base import Tokenizer, byte_characters, optional_package

_USUAL_BOUNDARIES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")
_MEND_TOKENIZER = (
    "Train the tokenizer with a token for unknown text (unk_token) or on bytes (ByteLevel, byte_fallback), "
    "and set tokenizer.path to it"
)


class HfTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library; special tokens in a document stay ordinary text.

    `boundary` is a token, its id, or None for the first of the usual end-of-text tokens there. White space
    and control characters that it leaves out are no bytes of the text; other characters that would be in no
    token are refused, because the library says nothing of them and bits a byte would look lower for it.
    """

    def __init__(self, content: bytes, source: str, boundary: str | int | None, name: str = "hf") -> None:
        library = optional_package("tokenizers", name)
        try:
            self._tokenizer = library.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"{source} is not a tokenizer.json: {error}. Set tokenizer.path to the file a tokenizer was "
                "saved to with `tokenizer.save('tokenizer.json')`"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.post_processor = None  # it adds special tokens, or trims white space off the offsets
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{source} has an empty vocabulary: train the tokenizer first")
        self._known = _known_characters(self._tokenizer, vocabulary, content)
        if not isinstance(boundary, int):
            boundary = vocabulary[_hf_boundary(self._tokenizer, vocabulary, source, boundary)]
        super().__init__(name, max(vocabulary.values()) + 1, boundary, {"tokenizer.json": content})

    def encode(self, text: str) -> np.ndarray:
        return self.encode_measured(text)[0]

    def encode_measured(self, text: str) -> tuple[np.ndarray, int]:
        ids, offsets = self._encoding(text)
        return ids, _bytes_in_tokens(text, offsets)

    def _encoding(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"the tokenizer.json cannot encode it: {error}. {_MEND_TOKENIZER}") from error
        if self._known is not None:
            self._check_known(text, self._known)
        return np.array(encoding.ids, self.dtype), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def _check_known(self, text: str, known: frozenset[str]) -> None:
        tokenizer = self._tokenizer
        normal = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
        words = (
            [(normal,)]
            if tokenizer.pre_tokenizer is None
            else tokenizer.pre_tokenizer.pre_tokenize_str(normal)
        )
        if unknown := set().union(*(word[0] for word in words)) - known:
            raise _left_out("".join(sorted(unknown)))

    def _text_of(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def kept_bytes(self, text: str, ids: np.ndarray, count: int) -> int:
        offsets = self._encoding(text)[1][:count]
        return _bytes_in_tokens(text[: offsets[:, 1].max(initial=0)], offsets)


def _bytes_in_tokens(text: str, offsets: np.ndarray) -> int:
    """The UTF-8 bytes of `text` inside `offsets`, `(n, 2)` in characters; `UserError` for text left out."""
    total = len(text.encode("utf-8"))
    starts, reached = offsets[:, 0], np.maximum.accumulate(offsets[:, 1])
    before = np.concatenate(([0], reached))  # where the text before each token ends
    after = np.append(starts, len(text))
    for place in np.flatnonzero(after > before):
        left_out = text[before[place] : after[place]]
        unknown = [c for c in left_out if not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf")]
        if unknown:
            raise _left_out(left_out)
        total -= len(left_out.encode("utf-8"))
    return total


def _known_characters(tokenizer: Any, vocabulary: dict[str, int], content: bytes) -> frozenset[str] | None:
    """The characters of a BPE that leaves out all others without a word; None for any other tokenizer.

    Its offsets do not show what is left out: they are counted as if each word were whole.
    """
    model = tokenizer.model
    if type(model).__name__ != "BPE" or model.unk_token is not None:
        return None
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None
    prefix, suffix = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
    bare = (token.removeprefix(prefix).removesuffix(suffix) for token in vocabulary)
    known = frozenset(token for token in (*vocabulary, *bare) if len(token) == 1)
    parts = json.loads(content)
    on_bytes = '"ByteLevel"' in json.dumps([parts.get("normalizer"), parts.get("pre_tokenizer")])
    return None if on_bytes and known.issuperset(byte_characters()) else known


def _left_out(characters: str) -> UserError:
    return UserError(
        f"the tokenizer.json leaves {characters[:20]!r} out without a word, so that it would be in no token "
        f"and bits a byte would look lower. {_MEND_TOKENIZER}"
    )


def _hf_boundary(tokenizer: Any, vocabulary: dict[str, int], source: str, wanted: str | None) -> str:
    specials = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    if wanted is not None and wanted in specials:
        return wanted
    if wanted is None:
        for token in _USUAL_BOUNDARIES:
            if token in specials:
                return token
    if wanted is None:
        problem = f"{source} has none of the usual end-of-text tokens ({', '.join(_USUAL_BOUNDARIES)})"
    elif wanted in vocabulary:
        problem = f"tokenizer.boundary_token={wanted} is an ordinary token of {source}, which text may hold"
    else:
        problem = f"tokenizer.boundary_token={wanted} is not in the vocabulary of {source}"
    raise UserError(
        f"{problem}. Every document is followed by a boundary token: set tokenizer.boundary_token= to one of "
        f"its special tokens: {', '.join(specials) or 'it has none'}"
    )
