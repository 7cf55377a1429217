"""The last step that W&B has of a run, read from the files it keeps beside the run.

A `.wandb` file holds records of W&B's protocol, framed as LevelDB frames its log: after a file header of 7
bytes, blocks of 32 KiB hold chunks: CRC-32 of kind and payload (4 bytes), length (2), kind (1), payload. A
record is one whole chunk, or a first, any middle ones and a last; no chunk crosses a block, so up to 6 bytes
at a block's end are padding. wandb has no reader of its own that is public.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_MAGIC = b":W&B\xe1\xbe\x00"
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def record_files(wandb_dir: Path, run_id: str) -> list[Path]:
    """The files of every start of a run, online and offline ones, oldest first."""
    found = (path for path in wandb_dir.glob(f"*run-*/run-{run_id}.wandb") if not path.parent.is_symlink())
    return sorted(found, key=lambda path: path.parent.name.partition("run-")[2])


def last_step(files: list[Path]) -> int | None:
    """The last step of the rows in the files of one run; None where they hold no row.

    Each start sends what W&B lacks before it goes on, so what a run's files hold has no gap before this
    step. A tail that a kill tore and damaged blocks are passed over. Raises whatever wandb or the file
    system raises where a file cannot be read.
    """
    steps = [step for path in files if (step := _last_step(path)) is not None]
    return max(steps, default=None)


def _last_step(path: Path) -> int | None:
    """Look at the last blocks only, and at more of them where they hold no row: files may be large."""
    blocks = -(-path.stat().st_size // _BLOCK)
    tail = 4
    while True:
        first = max(0, blocks - tail)
        steps = [step for payload in _payloads(path, first) if (step := _step(payload)) is not None]
        if steps or first == 0:
            return max(steps, default=None)
        tail *= 8


def _payloads(path: Path, first_block: int) -> Iterator[bytes]:
    """Every whole record that begins in or after a block."""
    with open(path, "rb") as file:
        magic = file.read(len(_MAGIC))
        if not _MAGIC.startswith(magic.rstrip(b"\0")):  # zeros: a lost machine had written nothing yet
            raise ValueError(f"{path.name} is no record of W&B that is known here, it begins with {magic!r}")
        file.seek(first_block * _BLOCK)
        data = file.read()
    position = len(_MAGIC) if first_block == 0 else 0
    parts: list[bytes] = []
    while position + _HEADER.size <= len(data):
        room = _BLOCK - position % _BLOCK
        if room < _HEADER.size:
            position += room
            continue
        checksum, length, kind = _HEADER.unpack_from(data, position)
        payload = data[position + _HEADER.size : position + _HEADER.size + length]
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(bytes([kind]))) != checksum or not kind:
            position += room  # torn or damaged: nothing more of this block can be told apart
            parts = []
            continue
        position += _HEADER.size + length
        if kind in (_WHOLE, _FIRST):
            parts = [payload]
        elif parts:  # else its beginning lies before the blocks looked at, or was damaged
            parts.append(payload)
        if kind in (_WHOLE, _LAST) and parts:
            yield b"".join(parts)
            parts = []


def _step(payload: bytes) -> int | None:
    """The step of a row; None for any other record."""
    from wandb.proto import wandb_internal_pb2

    record: Any = vars(wandb_internal_pb2)["Record"]()  # made at import; type checkers do not see it
    record.ParseFromString(payload)
    for item in record.history.item:
        if (item.key or "/".join(item.nested_key)) == "_step":
            return int(json.loads(item.value_json))
    return None
