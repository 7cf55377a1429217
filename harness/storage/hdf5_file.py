"""One HDF5 file: opened as the very file that was checked, and its datasets compared with the manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import UserError
from harness.storage.io import Descriptor, FileIdentity, identity_of, replaced

if TYPE_CHECKING:
    import h5py


def open_hdf5(path: Path, expected: FileIdentity | None = None) -> tuple[h5py.File, FileIdentity]:
    """The file at `path` opened for reading, and its identity, which is `expected` where that is given.

    Without HDF5's chunk cache: each window would copy whole chunks. Raises `UserError` where it is no regular
    file, another file than expected, or no whole HDF5 file.
    """
    identity = Descriptor(path, expected).identity
    with hdf5_errors(path):
        file = _open(path)
        opened = identity_of(os.fstat(file.id.get_vfd_handle()))
    if opened != identity:
        file.close()
        raise replaced(path, identity, opened)
    return file, identity


def _open(path: Path) -> h5py.File:
    import h5py

    try:
        return h5py.File(path, "r", rdcc_nbytes=0)
    except BlockingIOError:  # a writer has it
        raise
    except OSError as error:
        if "lock" not in str(error):
            raise
    # No locks on this mount, or the file is open without them in this process: a finished shard needs none.
    return h5py.File(path, "r", locking=False, rdcc_nbytes=0)


@contextmanager
def hdf5_errors(path: Path, what: str = "is no whole HDF5 file") -> Iterator[None]:
    """Whatever HDF5 says of a damaged file, as a `UserError` that names the file."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # h5py passes on what HDF5 found as errors of many kinds
        if isinstance(error, BlockingIOError) or "already open for" in str(error):
            raise UserError(
                f"{path} is marked as being written: its writer was killed before it was complete, or is "
                "still at work. Prepare the set again with prepare.overwrite=true; or, if you know that the "
                f"file is whole, clear the mark with the HDF5 tools (h5clear --status {path}) and check what "
                "it holds with scripts/verify_data.py"
            ) from error
        raise damaged(path, f"{what}: {error}") from error


def damaged(path: Path, what: str) -> UserError:
    """The error for a shard that is not what its manifest says."""
    return UserError(
        f"{path} {what}. A shard that is not what the manifest says would give other tokens than promised. "
        "Restore the file or prepare the set again with prepare.overwrite=true"
    )


def checked_dataset(
    path: Path, file: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> h5py.Dataset:
    """The dataset `name`, of this shape and dtype, its data in this file; else `UserError` with both values.

    `tokens` may be padded to the end of its last chunk where its attribute `token_count` says that it is.
    """
    import h5py

    link = file.get(name, getlink=True)
    if link is None:
        there = ", ".join(sorted(file)[:5]) or "nothing"
        raise damaged(path, f"has no dataset {name!r} (there is: {there})")
    if not isinstance(link, h5py.HardLink):
        raise damaged(path, f"has only a link to elsewhere as {name!r}, expected the dataset itself")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise damaged(path, f"has a {type(dataset).__name__} as {name!r}, expected a dataset")
    creation = dataset.id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count():
        raise damaged(path, f"keeps the data of {name!r} in other files, expected them in this one")
    found = dataset.dtype
    if found != dtype and found.newbyteorder("<") == dtype:
        raise damaged(path, f"holds big-endian {found.str}, expected little-endian {dtype.str}")
    if found != dtype:
        raise damaged(path, f"holds {found.str}, but the manifest says {dtype.name} ({dtype.str})")
    _check_shape(path, name, dataset, shape)
    return dataset


def check_attributes(path: Path, dataset: h5py.Dataset, expected: dict[str, int | str | None]) -> None:
    """Compare attributes with the manifest, where both say something."""
    for name, said in expected.items():
        found = _attribute(path, dataset, name)
        if found is not None and said is not None and found != said:
            raise damaged(path, f"says {name}={found!r}, but the manifest says {said!r}")


def _check_shape(path: Path, name: str, dataset: h5py.Dataset, shape: tuple[int, ...]) -> None:
    found = dataset.shape
    if found is None or len(found) != len(shape):
        wanted = f"one dimension of {shape[0]} tokens" if len(shape) == 1 else f"{shape}"
        raise damaged(path, f"has {name!r} of shape {found}, expected {wanted}")
    longest = shape[0]
    if found[0] > longest and dataset.chunks and _attribute(path, dataset, "token_count") == longest:
        longest += -longest % dataset.chunks[0]
    if found[1:] != shape[1:] or not shape[0] <= found[0] <= longest:
        shown = [f"{s[0]} {name}" if len(s) == 1 else f"{name} of shape {s}" for s in (found, shape)]
        raise damaged(path, f"holds {shown[0]}, but the manifest says {shown[1]}")


def _attribute(path: Path, dataset: h5py.Dataset, name: str) -> Any:
    """An attribute as a plain value, None where there is none.

    Text of variable length is not read: it is in HDF5's heap, and in a damaged heap HDF5 may search for ever.
    """
    import h5py

    with hdf5_errors(path, f"has an attribute {name!r} that cannot be read"):
        if not h5py.h5a.exists(dataset.id, name.encode()):
            return None
        attribute = h5py.h5a.open(dataset.id, name.encode())
        kind = attribute.get_type()
        text = kind.get_class() == h5py.h5t.STRING
        if kind.detect_class(h5py.h5t.VLEN) or (text and kind.is_variable_str()):
            return None
        scalar = attribute.get_space().get_simple_extent_type() == h5py.h5s.SCALAR
        if scalar and (text or kind.get_class() == h5py.h5t.INTEGER):
            value = np.empty((), attribute.dtype)  # what is usual, in two thirds of the time of `attrs`
            attribute.read(value)
            value = value[()]
        else:
            value = dataset.attrs[name]
    if isinstance(value, bytes):
        return value.decode("ascii", errors="replace")
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
