"""How far a preparation is; with the writers' states, all that going on needs."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.errors import UserError
from harness.prepare.chunks import Chunk, RangeChunk
from harness.prepare.corpora import SourceFile
from harness.prepare.documents import Encoded
from harness.prepare.reading import MAX_PLACES

_NO_DOCUMENTS = bytes(32).hex()


@dataclass
class Counts:
    """What was found in one source file or in all of them; `places` names the first few bad documents.

    `chain` is over the documents' SHA-256s, so that it knows nothing of chunks or files; over all of a set
    that is sharded by source it is over the chains of the sources that hold documents.
    """

    documents: int = 0
    empty: int = 0
    truncated: int = 0
    bad: int = 0
    skipped_windows: int = 0
    padding: int = 0  # of pairs
    places: list[str] = field(default_factory=list)
    chain: str = _NO_DOCUMENTS

    def add(self, other: Counts) -> None:
        """Count what `other` counted; its chain is left to the caller."""
        self.documents += other.documents
        self.empty += other.empty
        self.truncated += other.truncated
        self.bad += other.bad
        self.skipped_windows += other.skipped_windows
        self.padding += other.padding
        self.places += other.places[: MAX_PLACES - len(self.places)]

    def link(self, digests: bytes) -> None:
        """Lengthen the chain by digests of 32 bytes each."""
        link = bytes.fromhex(self.chain)
        for start in range(0, len(digests), 32):
            link = hashlib.sha256(link + digests[start : start + 32]).digest()
        self.chain = link.hex()


@dataclass
class State:
    """`total` counts the whole set. Where it is sharded by source, `here` counts the file in hand, number
    `file`, and `sources` describes the files before it."""

    by_source: bool = False
    next_chunk: int = 0
    source_bytes: int = 0
    line_file: int = -1
    lines: int = 0
    piece_tokens: int = 0
    total: Counts = field(default_factory=Counts)
    here: Counts = field(default_factory=Counts)
    file: int = 0
    sources: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> State:
        """The state that `asdict` turned into `value`."""
        return cls(**value | {name: Counts(**value[name]) for name in ("total", "here")})

    def absorb(self, chunk: Chunk, encoded: Encoded, files: list[SourceFile]) -> None:
        """Count one chunk; `UserError` for a document that the tokenizer cannot encode."""
        if isinstance(chunk, RangeChunk) and chunk.file != self.line_file:
            self.line_file, self.lines = chunk.file, 0
        if encoded.refused is not None:
            raise UserError(self._place(*encoded.refused, files))
        found = Counts(
            documents=encoded.documents,
            empty=encoded.empty,
            truncated=encoded.truncated + sum(part.truncated for part in encoded.pairs.values()),
            bad=encoded.bad_documents,
            skipped_windows=sum(part.skipped for part in encoded.pairs.values()),
            padding=sum(part.padding for part in encoded.pairs.values()),
            places=[self._place(*bad, files) for bad in encoded.bad],
        )
        self.total.add(found)
        if self.by_source:
            self.here.add(found)
        (self.here if self.by_source else self.total).link(encoded.digests)
        self.next_chunk += 1
        self.source_bytes += chunk.source_bytes
        self.lines += encoded.lines

    def end_source(self, source: dict[str, Any], *, reused: bool = False) -> None:
        """Go on to the next file; `source` describes the one that ends here, and gets its counts."""
        if reused:
            self.here = Counts(**source["counts"])
            self.total.add(self.here)
        if self.here.documents:
            self.total.link(bytes.fromhex(self.here.chain))
        self.sources.append(source | {"counts": asdict(self.here)})
        self.here = Counts()
        self.file += 1

    def end_sources_unwritten(self, upto: int) -> None:
        """End every file before number `upto` where nothing is written and only the chain is wanted."""
        while self.by_source and self.file < upto:
            self.end_source({})

    def _place(self, file: int, line: int | str | None, reason: str, files: list[SourceFile]) -> str:
        where = files[file].path
        if line is not None:
            where += f":{self.lines + line}" if isinstance(line, int) else f", {line}"
        return f"{where}: {reason}"
