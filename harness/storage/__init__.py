"""What lies on disk: manifests, and one reader for every storage."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.storage.known import open_known, open_stream
from harness.storage.opening import check_split, open_manifest, wrong_layout
from harness.storage.tokens import TokenStore

if TYPE_CHECKING:
    from harness.storage.growing import open_growing
    from harness.storage.hdf5 import MmapTokenStore
    from harness.storage.npy import ShardedTokenDataset
    from harness.storage.ranges import read_ranges
    from harness.storage.row_reader import RowReader
    from harness.storage.rows import PairStore, RowStore

    # One split of a prepared set, of any layout.
    Store: TypeAlias = TokenStore | RowStore | PairStore

__all__ = [
    "MmapTokenStore",
    "PairStore",
    "RowReader",
    "RowStore",
    "ShardedTokenDataset",
    "Store",
    "TokenStore",
    "open_growing",
    "open_split",
    "open_store",
    "read_ranges",
]

# Imported when they are asked for: a stream in npy needs a third of the modules, and of their memory.
_PLACES = {
    "MmapTokenStore": "hdf5",
    "PairStore": "rows",
    "RowReader": "row_reader",
    "RowStore": "rows",
    "ShardedTokenDataset": "npy",
    "open_growing": "growing",
    "read_ranges": "ranges",
}


def __getattr__(name: str) -> Any:
    if name == "Store":
        from harness.storage.rows import PairStore, RowStore

        return TokenStore | RowStore | PairStore
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def open_store(
    directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
) -> TokenStore:
    """The split `train` or `val` of a prepared stream of tokens, whatever its storage.

    `prepare_command` is what messages say to run where it is known, as in `load_manifest`. Raises `UserError`
    where the set is damaged or holds rows.
    """
    check_split(split)
    with open_manifest(directory, prepare_command) as manifest:
        if manifest.storage.layout != "stream":
            raise wrong_layout(manifest, "a token store", "stream")
        return open_stream(manifest, split, mmap=mmap)


def open_split(
    directory: Path | str, split: str, *, mmap: bool = True, prepare_command: str | None = None
) -> Store:
    """The split `train` or `val` of a prepared set of any storage and layout; else as `open_store`.

    A stream is a `TokenStore`, padded rows are a `RowStore`, contrastive rows a `PairStore` of both sides.
    """
    check_split(split)
    with open_manifest(directory, prepare_command) as manifest:
        return open_known(manifest, split, mmap=mmap)
