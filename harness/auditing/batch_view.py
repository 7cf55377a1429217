"""A batch for people: where each row comes from, and its text with what does not count marked in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.loaders.batch import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

    from harness.loaders import Batch, Origin
    from harness.prepare import Tokenizer
    from harness.storage import Store

_MASKED, _BOUNDARY, _TEXT = "<masked>", "<boundary>", "text"


class Words:
    """Token ids as text in quotes, escaped; ids where the set's tokenizer cannot be loaded; `why` says so."""

    def __init__(self, store: Store) -> None:
        from harness.prepare import load_tokenizer

        self.why: str | None = None
        self._tokenizer: Tokenizer | None = None
        self._boundary = store.manifest.tokenizer.boundary_token_id
        try:
            self._tokenizer = load_tokenizer(store.manifest.directory, store.manifest)
        except UserError as error:
            self.why = str(error)

    def show(self, ids: Tensor, limit: int) -> str:
        """The text of one row, int64 `(T,)`, cut to `limit` characters; a target of -100 is `<masked>`."""
        text = " ".join(self._parts(ids.tolist()))
        return text if len(text) <= limit else f"{text[:limit]}..."

    def _parts(self, ids: list[int]) -> Iterator[str]:
        for kind, group in groupby(ids, self._kind):
            part = list(group)
            if kind == _TEXT:
                yield self._text(part)
            else:
                yield kind if len(part) == 1 else f"{kind}x{len(part)}"

    def _kind(self, token: int) -> str:
        if token == IGNORE:
            return _MASKED
        return _BOUNDARY if token == self._boundary else _TEXT

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return repr(self._tokenizer.decode(ids))  # no character of it moves a terminal's cursor


def where(origin: Origin) -> str:
    """Where a row comes from: `window 7, token 896: train_00000.npy[896:1025]`."""
    start = "" if origin.start is None or origin.name == "token" else f", token {origin.start}"
    pieces = " + ".join(
        f"{piece.path.name}[{piece.first}:{piece.first + piece.length}]" for piece in origin.pieces
    )
    return f"{origin.name} {origin.sample}{start}: {pieces}"


def _order(origins: list[Origin]) -> list[int]:
    """The numbers of the rows, of pairs each beside its other side."""
    sides = len({origin.name for origin in origins})
    return sorted(range(len(origins)), key=lambda number: number % (len(origins) // sides))


def rows_in_words(batch: Batch, origins: list[Origin], words: Words, rows: int, limit: int) -> list[str]:
    """Where each of the first `rows` rows comes from, inputs and targets; of pairs both sides in turn."""
    lines = []
    for number in _order(origins)[:rows]:
        targets = batch.targets[number]
        counted = int((targets != IGNORE).sum())
        lines += [
            f"row {number:<4} {where(origins[number])}; {counted} of {len(targets)} targets count",
            f"  inputs   {words.show(batch.inputs[number], limit)}",
            f"  targets  {words.show(targets, limit)}",
        ]
    if rows < len(origins):
        lines.append(f"... {len(origins) - rows} more rows: rows={len(origins)}")
    return lines
