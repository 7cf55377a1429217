"""Text to a prepared set: the one function that turns a corpus and a tokenizer into shards and a manifest.

A set is built in `SET.preparing`, with a journal of how far it is, and renamed when it is whole; so
under its own name it is either complete or absent, and a killed preparation goes on where it was.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.config import PrepareScriptConfig, set_directory
from harness.config_checks import validate
from harness.config_groups import BpeTokenizerConfig
from harness.errors import UserError
from harness.prepare import workplace
from harness.prepare.append import begin_growth, growing_job
from harness.prepare.chunks import PieceChunk
from harness.prepare.corpora import list_files
from harness.prepare.documents import join_piece
from harness.prepare.existing import accept_existing, summary_of
from harness.prepare.faults import (
    check_hope,
    check_outcome,
    check_outside_corpus,
    check_several_documents,
    disk_error,
)
from harness.prepare.job import Job, Report
from harness.prepare.pool import encode_all
from harness.prepare.records import recorded_counts, write_records
from harness.prepare.settings import PrepareLike
from harness.prepare.sources import Reuse, end_sources, job_chunks, reusable
from harness.prepare.state import Counts, State
from harness.prepare.summary import Progress, Summary
from harness.prepare.writers import Writer, make_writers

JOURNAL_SECONDS = 3.0
_SOURCES_A_JOURNAL = 1000  # a journal names every source file that has ended, so with many it is rarer


def prepare(config: PrepareLike, *, report: Report = print) -> Summary:
    """Prepare the set at `set_directory(config)` and return what lies there.

    An equal set that is there already is left alone. Raises `UserError` where a setting is out of its
    range, another set or anything else is in the way, the corpus is missing or empty, too many documents
    are bad, or the disk is full; whatever was under the set's name before stays.
    """
    if isinstance(config, PrepareScriptConfig):
        validate(config)
    directory = Path(os.path.realpath(set_directory(config)))
    try:
        return _prepare(_job(config, directory, report))
    except OSError as error:
        place = error.filename or workplace.beside(directory, "preparing")
        raise UserError(
            f"preparing {directory} stopped: {place}: {error.strerror or error}. What was there before "
            "stays. Check that the folder can be written and the corpus read, then run the same command again"
        ) from error


def _job(config: PrepareLike, directory: Path, report: Report) -> Job:
    check_outside_corpus(config, directory)
    files = list_files(config.corpus)
    check_several_documents(config, [file.path for file in files])
    job = Job(config, directory, files, report)
    if not isinstance(config.tokenizer, BpeTokenizerConfig):
        assert job.tokenizer  # made now, so that a missing file is said before anything is written
    return job


def _prepare(job: Job) -> Summary:
    directory, replace = job.directory, job.config.prepare.overwrite or job.config.prepare.append
    if workplace.settled(directory) and not replace:  # nothing to write, so no lock: it may be read-only
        return _existing(job)
    with workplace.locked(directory, job.report):
        if workplace.heal(directory) and workplace.finished(directory, job.identity()):
            return summary_of(directory, already_there=True)
        if workplace.settled(directory) and not replace:
            return _existing(job)
        if job.config.prepare.append:
            return _grow(job)
        workplace.check_replaceable(directory)
        return _build(job)


def _existing(job: Job) -> Summary:
    def corpus_sha256() -> str:
        state, rules = State(by_source=job.by_source), job.rules
        job.report(f"{job.directory}: the corpus files are not the ones recorded; comparing their documents")
        for chunk, encoded in encode_all(job_chunks(job, {}), None, rules, job.workers, job.directory):
            state.end_sources_unwritten(chunk.file)
            state.absorb(chunk, encoded, job.files)
        state.end_sources_unwritten(len(job.files))
        return state.total.chain

    return accept_existing(job, corpus_sha256)


def _grow(job: Job) -> Summary:
    growing = growing_job(job)
    if growing is None:
        job.report(f"{job.directory}: nothing to add, the set has all {len(job.files):,} files of the corpus")
        return summary_of(job.directory, already_there=True)
    workplace.check_replaceable(job.directory)
    job.report(f"{job.directory}: adding {len(growing.files):,} of {len(job.files):,} files of the corpus")
    return _build(growing)


def _build(job: Job) -> Summary:
    building, identity, started = workplace.beside(job.directory, "preparing"), job.identity(), time.time()
    if workplace.finished(building, identity):
        workplace.publish(job.directory)
        return summary_of(job.directory, already_there=True)
    reuse = reusable(job) if job.grown is None else Reuse()
    state, writers = _begin(job, building, identity, reuse)

    def save() -> None:
        for writer in writers.values():
            writer.sync()
        splits = {split: writer.state() for split, writer in writers.items()}
        journal = {"progress": asdict(state), "splits": splits, "reused": sorted(reuse.sources)}
        workplace.write_journal(building, identity, journal)
        for writer in writers.values():
            writer.release()

    progress = Progress(sum(file.size for file in job.files), f"preparing {job.directory.name}", job.report)
    try:
        _write_tokens(job, building, state, writers, reuse, progress, save)
        save()
        check_outcome(job, state, recorded_counts(job.grown) if job.grown else Counts(), writers)
        splits = {split: writer.finish() for split, writer in writers.items()}
        save()
        files = {name: sha256 for writer in writers.values() for name, sha256 in writer.files.items()}
        write_records(job, building, state, splits, files, started)
    except OSError as error:
        raise disk_error(error, job, building, state) from error
    finally:
        progress.close()
        for writer in writers.values():
            writer.abandon()
    workplace.publish(job.directory)
    return summary_of(job.directory, already_there=False, seconds=progress.seconds)


def _begin(job: Job, building: Path, identity: str, reuse: Reuse) -> tuple[State, dict[str, Writer]]:
    """Start anew, or where an interrupted preparation of the same thing was."""
    writers = make_writers(job, building)
    journal = workplace.read_journal(building, identity)
    if journal is not None and _can_go_on(journal, writers, reuse):
        workplace.remove_temporaries(building)
        for split, writer in writers.items():
            writer.restore(journal["splits"][split])
        state = State.from_json(journal["progress"])
        if state.next_chunk:
            job.report(
                f"{job.directory}: going on after {_tokens(writers):,} tokens of an interrupted preparation"
            )
    else:
        if (building / workplace.JOURNAL).exists():
            job.report(f"{job.directory}: starting anew, what was interrupted is damaged or was another set")
        workplace.start_building(building)
        state = State(by_source=job.by_source)
        if job.grown is not None:
            state = begin_growth(job.grown, job.by_source, building, writers)
    if reuse.sources:
        job.report(
            f"{job.directory}: {len(reuse.sources):,} of {len(job.files):,} source files are unchanged, "
            "their shards are kept"
        )
    job.tokenizer.save(building / workplace.TOKENIZER_FOLDER)
    return state, writers


def _can_go_on(journal: dict[str, Any], writers: dict[str, Writer], reuse: Reuse) -> bool:
    if journal["reused"] != sorted(reuse.sources):
        return False
    return all(writer.can_restore(journal["splits"][split]) for split, writer in writers.items())


def _write_tokens(
    job: Job,
    building: Path,
    state: State,
    writers: dict[str, Writer],
    reuse: Reuse,
    progress: Progress,
    save: Callable[[], None],
) -> None:
    limit, saved, before = job.config.prepare.max_document_tokens, time.monotonic(), _tokens(writers)
    progress.resume(state.source_bytes)
    stream = itertools.islice(job_chunks(job, reuse.sources), state.next_chunk, None)
    for chunk, encoded in encode_all(stream, job.tokenizer, job.rules, job.workers, building):
        if job.by_source:
            end_sources(job, state, writers, reuse, chunk.file)
        if isinstance(chunk, PieceChunk) and encoded.parts:
            state.piece_tokens = join_piece(chunk, encoded, state.piece_tokens, job.tokenizer, limit)
        for split, part in (encoded.parts | encoded.pairs).items():
            writers[split].add(part)
        state.absorb(chunk, encoded, job.files)
        check_hope(job, state)
        progress.update(state.source_bytes, _tokens(writers) - before)
        if time.monotonic() - saved >= JOURNAL_SECONDS * (1 + len(state.sources) // _SOURCES_A_JOURNAL):
            save()
            saved = time.monotonic()
    if job.by_source:
        end_sources(job, state, writers, reuse, len(job.files))


def _tokens(writers: dict[str, Writer]) -> int:
    return sum(writer.tokens for writer in writers.values())
