"""What every tokenizer is: ids of text and back, and its own files."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.files import write_atomic


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


def files_sha256(files: Mapping[str, bytes]) -> str | None:
    """A tokenizer's identity, None without files: what `sha256sum * | sha256sum` prints in their folder."""
    if not files:
        return None
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def optional_package(module: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"tokenizer={extra} needs the package {module}: pip install {module}, or use tokenizer=byte"
        ) from error


def byte_characters() -> dict[str, int]:
    """The printable characters by which byte-level BPEs write bytes."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
