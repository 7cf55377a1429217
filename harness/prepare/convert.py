"""A prepared set in another storage: the same tokens in the same shards, without tokenising again."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.config_groups import DataConfig, Hdf5DataConfig
from harness.errors import UserError
from harness.files import fsync_dir, sha256_file, write_json
from harness.prepare import workplace
from harness.prepare.seal import storage_section, write_row_shard, write_stream_shard
from harness.storage import open_split
from harness.storage.manifest import SPLITS, Manifest, load_manifest, write_manifest
from harness.storage.manifest_schema import StorageInfo
from harness.storage.one_shard import Place, open_shard, places
from harness.storage.rows import RowStore
from harness.storage.verify import remember

_BLOCK = 1 << 21  # tokens copied at a time


def convert(
    source: Path | str, target: Path | str, data: DataConfig, report: Callable[[str], object] = print
) -> Manifest:
    """Write the set in `source` to `target` in the storage that `data` describes; returns its manifest.

    Every hash is compared with the source's manifest on the way, so `content_sha256` is the same. A set that
    is there already and is the wanted one is left alone. Raises `UserError` where the source is damaged, or
    anything else is in the target's place; the source is only read.
    """
    manifest, target = load_manifest(source), Path(os.path.realpath(target))
    storage = _storage(manifest, data)
    if target == Path(os.path.realpath(manifest.directory)):
        raise UserError(f"{target} is the set that is to be converted: set data.path to another folder")
    with workplace.locked(target, report):
        workplace.heal(target)
        if workplace.settled(target):
            return _existing(target, manifest, storage)
        workplace.check_replaceable(target)
        building = workplace.beside(target, "preparing")
        workplace.start_building(building)
        try:
            _write(manifest, storage, building)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        workplace.publish(target)
    return load_manifest(target)


def target_directory(source: Manifest, data: DataConfig) -> Path:
    """`data.path`, or the folder beside the source that is named after the storage."""
    if data.path is not None:
        return Path(data.path)
    storage = _storage(source, data)
    name = storage.format if storage.compression == "none" else f"{storage.format}-{storage.compression}"
    width = max(split.row_width or 0 for split in source.splits.values())
    return source.directory.absolute().with_name(f"{name}-{storage.layout}{width or ''}")


def _storage(source: Manifest, data: DataConfig) -> StorageInfo:
    plain = replace(source.storage, format=data.name, chunk_tokens=None, compression="none")
    if not isinstance(data, Hdf5DataConfig):
        return plain
    chunk_tokens = data.chunk_tokens if source.storage.layout == "stream" else None
    return replace(plain, chunk_tokens=chunk_tokens, compression=data.compression)


def _raw(source: Manifest, storage: StorageInfo) -> dict[str, Any]:
    """The target's manifest: the source's with another storage section; the shards are filled in later."""
    raw = copy.deepcopy(source.raw)
    widths = raw["storage"].get("row_width")
    raw["storage"] = storage_section(storage, None)
    if widths is not None:
        raw["storage"]["row_width"] = widths
    return raw


def _existing(target: Path, source: Manifest, storage: StorageInfo) -> Manifest:
    there, raw = load_manifest(target), _raw(source, storage)
    sections = ("format_version", "storage", "tokenizer", "preparation")
    wanted = {"content_sha256": source.content_sha256} | {key: raw.get(key, "none") for key in sections}
    found = {"content_sha256": there.content_sha256} | {key: there.raw.get(key, "none") for key in sections}
    differing = [key for key in wanted if wanted[key] is None or wanted[key] != found[key]]
    if differing:
        lines = "\n".join(f"  {key}: there {found[key]}, wanted {wanted[key]}" for key in differing)
        raise UserError(
            f"{target} already holds another set:\n{lines}\nIt is never replaced unasked: checkpoints "
            "name its digest. Set data.path to another folder, or remove that one yourself"
        )
    try:
        for split in SPLITS:
            open_split(target, split)
    except UserError as error:
        raise UserError(
            f"{target} is the set that was asked for, but it is not whole: {error}. To convert again, remove "
            "that folder yourself first"
        ) from error
    return there


def _write(source: Manifest, storage: StorageInfo, building: Path) -> None:
    raw = _raw(source, storage)
    for place in places(source):
        entry = _entry(raw, place)
        written = _convert_shard(source, place, storage, building)
        _compare(source, place, written)
        entry.pop("mask_file", None)
        entry.update(written)
    tokenizer = source.directory / workplace.TOKENIZER_FOLDER
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, building / workplace.TOKENIZER_FOLDER)
    files = sorted(path for path in building.rglob("*") if path.is_file())
    provenance = workplace.provenance(source.directory)
    provenance.pop("identity", None)  # an interrupted preparation of this set does not go on here
    provenance |= {
        "converted_from": {"metadata_sha256": source.metadata_sha256, "storage": source.raw["storage"]},
        "files_sha256": {path.relative_to(building).as_posix(): sha256_file(path) for path in files},
    }
    write_json(building / workplace.PROVENANCE, provenance)
    remember(write_manifest(building, raw))
    fsync_dir(building)


def _entry(raw: dict[str, Any], place: Place) -> dict[str, Any]:
    """The manifest's entry of a shard, to be changed."""
    splits: Any = raw["splits"]
    for name in place.key.split("."):
        splits = splits[name]
    entries: list[dict[str, Any]] = splits["shards"]
    return next(entry for entry in entries if entry["file"] == place.shard.file)


def _convert_shard(source: Manifest, place: Place, storage: StorageInfo, building: Path) -> dict[str, str]:
    store = open_shard(source, place)
    try:
        if isinstance(store, RowStore):
            return _convert_rows(store, place, storage, building)
        with _spool(building, (store.total_tokens,), store.dtype) as tokens:
            for start in range(0, len(tokens), _BLOCK):
                store.read_into(start, tokens[start : start + _BLOCK])
            return write_stream_shard(building, place.stem, tokens, storage, place.shard.documents)
    finally:
        store.close()


def _convert_rows(store: RowStore, place: Place, storage: StorageInfo, building: Path) -> dict[str, str]:
    shape, step = (store.total_rows, store.row_width), max(1, _BLOCK // store.row_width)
    mask_dtype = np.dtype(np.bool_)
    with _spool(building, shape, store.dtype) as rows, _spool(building, shape, mask_dtype) as mask:
        for start in range(0, len(rows), step):
            part = slice(start, min(start + step, len(rows)))
            rows[part], mask[part] = store.read_rows(np.arange(part.start, part.stop))
        return write_row_shard(building, place.stem, rows, mask, storage)


@contextmanager
def _spool(folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[np.ndarray]:
    """An array on disk, so that a shard may be larger than memory; gone afterwards."""
    if 0 in shape:
        yield np.empty(shape, dtype)
        return
    path = folder / f".spool-{dtype.name}.tmp"
    try:
        yield np.memmap(path, dtype, "w+", shape=shape)
    finally:
        path.unlink()


def _compare(source: Manifest, place: Place, written: dict[str, str]) -> None:
    shard = place.shard
    for key, promised in (("sha256", shard.sha256), ("mask_sha256", shard.mask_sha256)):
        if promised is not None and written[key] != promised:
            raise UserError(
                f"{source.directory / shard.file}: {key} is {written[key]}, but the manifest says {promised} "
                f"({place.range}): the source is damaged. Restore the file or prepare the set again; "
                "scripts/verify_data.py lists every fault"
            )
