"""One shard a source file: where one ends and the next begins, and which need not be read again."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness.errors import UserError
from harness.prepare import workplace
from harness.prepare.chunks import Chunk, stream_chunks
from harness.prepare.job import Job, preparation_settings, versions
from harness.prepare.old_set import OldSet, read_old_set
from harness.prepare.seal import storage_section
from harness.prepare.state import State
from harness.prepare.writers import Writer


@dataclass(frozen=True)
class Reuse:
    """What is taken over from a set that is to be replaced: `sources` are its records of files that have not
    changed, by the file's number."""

    sources: dict[int, dict[str, Any]] = field(default_factory=dict)
    old: OldSet | None = None


def job_chunks(job: Job, left_out: Container[int]) -> Iterator[Chunk]:
    """The chunks of all files but those of the numbers `left_out`."""
    numbers = [number for number in range(len(job.files)) if number not in left_out]
    for chunk in stream_chunks(job.config.corpus, [job.files[n] for n in numbers], apart=job.by_source):
        yield replace(chunk, file=numbers[chunk.file])


def end_sources(job: Job, state: State, writers: dict[str, Writer], reuse: Reuse, upto: int) -> None:
    """End every file before number `upto`, or take over its shards."""
    while state.file < upto:
        file, known = job.files[state.file], reuse.sources.get(state.file)
        if known is None:
            splits = {split: writer.end_source() for split, writer in writers.items()}
            state.end_source(asdict(file) | {"splits": splits})
            continue
        assert reuse.old is not None
        splits = {s: writer.adopt(known["splits"][s], reuse.old) for s, writer in writers.items()}
        state.end_source(asdict(file) | {"splits": splits, "counts": known["counts"]}, reused=True)
        state.source_bytes += file.size


def reusable(job: Job) -> Reuse:
    """The files that the set which is to be replaced was made from in the same way, if they and their shards
    are unchanged. Reads those shards."""
    if not job.by_source or workplace.manifest_path(job.directory) is None:
        return Reuse()
    try:
        old = read_old_set(job.directory)
        return Reuse(_reusable(job, old), old)
    except (UserError, KeyError, TypeError, AttributeError):  # the set or its provenance is damaged
        return Reuse()


def _reusable(job: Job, old: OldSet) -> dict[int, dict[str, Any]]:
    if not _made_alike(job, old):
        return {}
    known: dict[str, list[dict[str, Any]]] = {}
    for source in old.provenance["sources"]:
        known.setdefault(source["name"], []).append(source)
    reused = {}
    for number, file in enumerate(job.files):
        alike = known.get(file.name, [])
        alone = len(alike) == 1 and sum(other.name == file.name for other in job.files) == 1
        if not alone or (alike[0]["size"], alike[0]["mtime_ns"]) != (file.size, file.mtime_ns):
            continue
        if old.changed(_files(alike[0], old)) is None:
            reused[number] = alike[0]
    return reused


def _made_alike(job: Job, old: OldSet) -> bool:
    preparation = {k: v for k, v in old.raw.get("preparation", {}).items() if k != "corpus_sha256"}
    recorded = old.provenance.get("versions", {})
    return (
        preparation == preparation_settings(job.config)
        and old.raw["tokenizer"] == job.tokenizer.manifest_section()
        and old.raw["storage"] == storage_section(job.storage, job.row_width)
        and all(recorded.get(name) == version for name, version in versions(job.tokenizer.name).items())
    )


def _files(source: dict[str, Any], old: OldSet) -> list[str]:
    """The files of the set that hold a source's shards."""
    shards = [shard for split in source["splits"].values() for shard in _shards(split)]
    return [name for shard in shards for name in old.files_of(shard)]


def _shards(split: dict[str, Any]) -> list[str]:
    return split["shards"] if "shards" in split else [*split["pos"]["shards"], *split["neg"]["shards"]]
