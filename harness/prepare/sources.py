"""One shard a source file: where one ends and the next begins, and which need not be read again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness.errors import UserError
from harness.prepare import workplace
from harness.prepare.chunks import Chunk, stream_chunks
from harness.prepare.job import Job, versions
from harness.prepare.old_set import OldSet, read_old_set
from harness.prepare.seal import storage_section
from harness.prepare.settings import preparation_settings
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
    sources = {source["name"]: source for source in old.provenance["sources"]}
    named = Counter(source["name"] for source in old.provenance["sources"])
    wanted = Counter(file.name for file in job.files)
    reused = {}
    for number, file in enumerate(job.files):
        if (named[file.name], wanted[file.name]) != (1, 1):  # which of them it is nobody can tell
            continue
        source = sources[file.name]
        same = (source["size"], source["mtime_ns"]) == (file.size, file.mtime_ns)
        if same and old.changed(_files(source, old)) is None:
            reused[number] = source
    return reused


def _made_alike(job: Job, old: OldSet) -> bool:
    preparation = {k: v for k, v in old.raw.get("preparation", {}).items() if k != "corpus_sha256"}
    makings = [old.provenance, *old.provenance.get("grown_from", [])]
    wanted = versions(job.tokenizer.name)
    return (
        preparation == preparation_settings(job.config)
        and old.raw["tokenizer"] == job.tokenizer.manifest_section()
        and old.raw["storage"] == storage_section(job.storage, job.row_width)
        and all(wanted.items() <= making["versions"].items() for making in makings)
    )


def _files(source: dict[str, Any], old: OldSet) -> list[str]:
    """The files of the set that hold a source's shards."""
    shards = [shard for split in source["splits"].values() for shard in _shards(split)]
    return [name for shard in shards for name in old.files_of(shard)]


def _shards(split: dict[str, Any]) -> list[str]:
    return split["shards"] if "shards" in split else [*split["pos"]["shards"], *split["neg"]["shards"]]
