"""What a preparation tells people: progress while it runs, and the summary at its end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commandline.commands import shown
from harness.storage.manifest_schema import SPLITS

PLAIN_SECONDS = 5.0
_QUIET_SECONDS = 2.0


@dataclass(frozen=True)
class SplitSummary:
    """One split's counts; `bytes` is the UTF-8 length of the text kept, without boundaries."""

    documents: int
    tokens: int
    bytes: int
    shards: int
    rows: int = 0
    row_width: int | None = None

    @property
    def cells(self) -> int:
        """The columns behind the first, over all rows: what may hold a token to be predicted."""
        return self.rows * (self.row_width - 1) if self.row_width else 0


@dataclass(frozen=True)
class Summary:
    """What lies in a prepared set. `places` names the first few bad documents.

    Splits are named as in the manifest: of contrastive rows `train.pos`, `train.neg`, .... `padding` counts
    the cells behind the ends of rows.
    """

    directory: Path
    digest: str
    splits: dict[str, SplitSummary]
    truncated_documents: int
    truncated_pairs: int
    empty_documents: int
    skipped_windows: int
    padding: int
    bad_documents: int
    places: list[str]
    seconds: float
    already_there: bool

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        """Of pairs, those that gave at least one."""
        return sum(split.documents for name, split in self.splits.items() if not name.endswith(".neg"))

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token, boundaries not counted among the tokens."""
        text_tokens = self.tokens - self.documents
        return sum(split.bytes for split in self.splits.values()) / text_tokens if text_tokens else 0.0

    @property
    def boundary_share(self) -> float:
        """The share of all tokens that are boundaries."""
        return self.documents / self.tokens if self.tokens else 0.0

    @property
    def rows(self) -> int:
        return sum(split.rows for split in self.splits.values())

    @property
    def padding_share(self) -> float:
        """The share of the rows' cells, without the first column, that is padding."""
        cells = sum(split.cells for split in self.splits.values())
        return self.padding / cells if cells else 0.0

    def lines(self) -> list[str]:
        """The summary as lines for people."""
        head = "already prepared" if self.already_there else f"prepared in {self.seconds:.1f} s"
        lines = [f"{shown(self.directory)}: {head}, digest {self.digest}"]
        for name, split in self.splits.items():
            files = "1 shard" if split.shards == 1 else f"{split.shards:,} shards"
            kind = f"{split.rows:>15,} rows" if name not in SPLITS else f"{split.bytes:>15,} bytes"
            lines.append(
                f"  {name:5} {split.documents:>11,} documents {split.tokens:>15,} tokens {kind} in {files}"
            )
        lines += self._share_lines()
        if self.truncated_documents:
            lines.append(f"  {self.truncated_documents:,} documents cut at prepare.max_document_tokens")
        if self.truncated_pairs:
            width = next(iter(self.splits.values())).row_width
            lines.append(
                f"  {self.truncated_pairs:,} pairs cut to the {width:,} columns of a row: the prompt's start "
                "is lost first (a larger loader.seq_len keeps more)"
            )
        if self.empty_documents:
            lines.append(f"  {self.empty_documents:,} empty documents (a boundary and nothing else)")
        if self.skipped_windows:
            lines.append(f"  {self.skipped_windows:,} windows or pairs left out: no other continuation")
        if self.bad_documents:
            lines.append(f"  {self.bad_documents:,} bad documents left out:")
            lines += [f"    {place}" for place in self.places]
            if self.bad_documents > len(self.places):
                lines.append(f"    and {self.bad_documents - len(self.places):,} more")
        return lines

    def _share_lines(self) -> list[str]:
        lines = []
        if self.rows:
            width = next(iter(self.splits.values())).row_width
            lines.append(
                f"  {self.rows:,} rows of {width:,} columns, {100 * self.padding_share:.2f} % of their cells "
                "are padding"
            )
        if all(name in SPLITS for name in self.splits):  # of pairs nobody counts bytes
            lines.append(
                f"  {self.bytes_per_token:.2f} bytes a token, {100 * self.boundary_share:.2f} % of the "
                "tokens are boundaries"
            )
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


class Progress:
    """A bar on a terminal, a plain line every few seconds elsewhere; silent in the first two seconds."""

    def __init__(self, total_bytes: int, label: str, report: Callable[[str], object]) -> None:
        self.total, self.done, self.tokens = total_bytes, 0, 0
        self._report, self._label = report, label
        self._started = time.monotonic()
        self._next_line = self._started + PLAIN_SECONDS
        self._bar: Any = None
        if _has_terminal():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                delay=_QUIET_SECONDS,
                desc=label,
                leave=False,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def resume(self, source_bytes: int) -> None:
        """Count what an earlier process did, outside the rate."""
        self.done = source_bytes
        if self._bar is not None:
            self._bar.initial = self._bar.n = source_bytes

    def update(self, source_bytes: int, tokens: int) -> None:
        """So many bytes of the corpus are read by now, and so many tokens were written by this process."""
        read, self.done, self.tokens = source_bytes - self.done, source_bytes, tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.tokens / self.seconds:,.0f} tokens/s", refresh=False)
            self._bar.update(read)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            share = self.done / self.total if self.total else 1.0
            self._report(
                f"{self._label}: {100 * share:.0f} % of {self.total / 2**20:,.0f} MiB, {self.tokens:,} "
                f"tokens, {self.tokens / self.seconds:,.0f} tokens/s"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _has_terminal() -> bool:
    """Whether a bar can be drawn: some terminals are there but have no width."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        return False
