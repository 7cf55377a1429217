"""Which ways of reading there are, and what each needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from peers import Reader

IN_ORDER, SHUFFLED = "in order", "shuffled"
OURS = ("this project, npy", "this project, npy, prefetch=0")  # what is compared with the others


class Peer(NamedTuple):
    """A row. `own_state` is False where what `Reader.state` gives is a number that one's own code keeps."""

    name: str
    module: str
    reader: str
    options: Mapping[str, Any] = {}
    package: str = ""  # "" for what the project needs itself
    files: str = "ours"  # the module that writes what is read
    orders: tuple[str, ...] = (IN_ORDER, SHUFFLED)
    own_state: bool = True

    @property
    def version(self) -> str | None:
        """Of its package; None where that is not installed."""
        try:
            return version(self.package or "torch")
        except PackageNotFoundError:
            return None

    def make(self, folder: Path, order: str) -> Reader:
        """A reader at the start of the first epoch; `folder` is the one with all modules' files."""
        make: Any = getattr(self.imported(), self.reader)
        reader: Reader = make(folder / self.files, shuffle=order == SHUFFLED, **self.options)
        return reader

    def imported(self) -> Any:
        """Its module, and with it its library."""
        return import_module(f"peers.{self.module}")


def _with_workers(name: str, module: str, reader: str, **others: Any) -> list[Peer]:
    """Rows of a loader without worker processes and with two."""
    return [
        Peer(f"{name}, {count} workers", module, reader, {"workers": count}, **others) for count in (0, 2)
    ]


PEERS = (
    Peer(OURS[0], "ours", "Loader", {"storage": "npy", "prefetch": 2}),
    Peer(OURS[1], "ours", "Loader", {"storage": "npy", "prefetch": 0}),
    Peer("this project, hdf5", "ours", "Loader", {"storage": "hdf5", "prefetch": 2}),
    Peer("this project, hdf5, prefetch=0", "ours", "Loader", {"storage": "hdf5", "prefetch": 0}),
    Peer("bare np.memmap", "plain", "Memmap", orders=(IN_ORDER,), own_state=False),
    Peer("np.memmap with a digest", "plain", "NamedMemmap", orders=(IN_ORDER,)),
    Peer("nanoGPT's way", "plain", "NanoGPT", orders=(SHUFFLED,), own_state=False),
    Peer("h5py slices", "h5py_slices", "Slices", package="h5py", own_state=False),
    *_with_workers("torch DataLoader", "plain", "TorchLoader", own_state=False),
    *_with_workers("torchdata StatefulDataLoader", "torchdata_loader", "Stateful", package="torchdata"),
    *_with_workers(
        "litdata TokensLoader", "litdata_tokens", "Tokens", package="litdata", files="litdata_tokens"
    ),
    *_with_workers(
        "mosaicml-streaming MDS", "mosaic", "Mds", package="mosaicml-streaming", files="mosaic"
    ),
    Peer("grain, ArrayRecord", "grain_records", "ArrayRecord", package="grain", files="grain_records"),
    Peer("grain, np.memmap", "grain_records", "Memmap", package="grain"),
    Peer(
        "megatron-core IndexedDataset", "megatron", "Indexed", package="megatron-core", files="megatron",
        orders=(IN_ORDER,), own_state=False,
    ),
    *_with_workers(
        "megatron-core GPTDataset", "megatron", "Gpt", package="megatron-core", files="megatron",
        orders=(SHUFFLED,),
    ),
)  # fmt: skip
