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

from harness.config import set_directory
from harness.config_groups import JsonlCorpusConfig, TextCorpusConfig
from harness.errors import UserError
from harness.prepare import workplace
from harness.prepare.chunks import PieceChunk, stream_chunks
from harness.prepare.corpora import changed_since_listed, list_files
from harness.prepare.documents import join_piece
from harness.prepare.existing import accept_existing, summary_of
from harness.prepare.job import Job, PrepareLike, Report, State, preparation_settings
from harness.prepare.pool import encode_all
from harness.prepare.records import write_records
from harness.prepare.seal import storage_section
from harness.prepare.summary import Progress, Summary
from harness.prepare.tokenizers import make_tokenizer
from harness.prepare.writers import Writer, make_writers

JOURNAL_SECONDS = 3.0
# A corpus that begins with so many bad documents, or with a few in so many bytes, and no good one is another
# than was meant.
EARLY_DOCUMENTS = 1000
EARLY_FEW, EARLY_BYTES = 10, 64 << 20


def prepare(config: PrepareLike, *, report: Report = print) -> Summary:
    """Prepare the set at `set_directory(config)` and return what lies there.

    An equal set that is there already is left alone. Raises `UserError` where another set or
    anything else is in the way, the corpus is missing or empty, too many documents are bad, or the
    disk is full; whatever was under the set's name before stays.
    """
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
    files, corpus = list_files(config.corpus), config.corpus
    one = len(files) == 1 and isinstance(corpus, TextCorpusConfig) and corpus.separator is None
    if one and config.prepare.val_fraction > 0:
        raise UserError(
            f"{files[0].path} is one document, and whole documents go to train or val, so one of the two "
            f"would be empty (prepare.val_fraction={config.prepare.val_fraction}). Say what stands between "
            "the documents in it, as in \"corpus.separator='\\n\\n\\n'\" (two empty lines) or "
            "\"corpus.separator='\\n<|endoftext|>\\n'\"; or split the text into several files, or set "
            "prepare.val_fraction=0"
        )
    return Job(config, directory, files, make_tokenizer(config.tokenizer), report)


def _prepare(job: Job) -> Summary:
    directory, overwrite = job.directory, job.config.prepare.overwrite
    if workplace.settled(directory) and not overwrite:  # nothing to write, so no lock: it may be read-only
        return _existing(job)
    with workplace.locked(directory, job.report):
        if workplace.heal(directory) and workplace.finished(directory, job.identity()):
            return summary_of(directory, already_there=True)
        if workplace.settled(directory) and not overwrite:
            return _existing(job)
        workplace.check_replaceable(directory)
        return _build(job)


def _existing(job: Job) -> Summary:
    def corpus_sha256() -> str:
        state, rules = State(), job.rules
        job.report(f"{job.directory}: the corpus files are not the ones recorded; comparing their documents")
        stream = stream_chunks(job.config.corpus, job.files)
        for chunk, encoded in encode_all(stream, None, rules, job.workers, job.directory):
            state.absorb(chunk, encoded, job.files)
        return state.corpus_chain

    return accept_existing(
        job.directory,
        preparation_settings(job.config),
        job.tokenizer.manifest_section(),
        storage_section(job.storage, job.row_width),
        job.fingerprint(),
        corpus_sha256,
    )


def _build(job: Job) -> Summary:
    building, identity, started = workplace.beside(job.directory, "preparing"), job.identity(), time.time()
    if workplace.finished(building, identity):
        workplace.publish(job.directory)
        return summary_of(job.directory, already_there=True)
    state, writers = _begin(job, building, identity)

    def save() -> None:
        for writer in writers.values():
            writer.sync()
        journal = {"progress": asdict(state), "splits": {s: w.state() for s, w in writers.items()}}
        workplace.write_journal(building, identity, journal)
        for writer in writers.values():
            writer.release()

    progress = Progress(sum(file.size for file in job.files), f"preparing {job.directory.name}", job.report)
    try:
        _write_tokens(job, building, state, writers, progress, save)
        save()
        _check_outcome(job, state, writers)
        splits = {split: writer.finish() for split, writer in writers.items()}
        save()
        files = {name: sha256 for writer in writers.values() for name, sha256 in writer.files.items()}
        write_records(job, building, state, splits, files, started)
    except OSError as error:
        raise _disk_error(error, job, building, state, writers) from error
    finally:
        progress.close()
        for writer in writers.values():
            writer.abandon()
    workplace.publish(job.directory)
    return summary_of(job.directory, already_there=False, seconds=progress.seconds)


def _begin(job: Job, building: Path, identity: str) -> tuple[State, dict[str, Writer]]:
    """Start anew, or where an interrupted preparation of the same thing was."""
    writers = make_writers(job, building)
    journal = workplace.read_journal(building, identity)
    if journal is not None and all(w.can_restore(journal["splits"][s]) for s, w in writers.items()):
        workplace.remove_temporaries(building)
        for split, writer in writers.items():
            writer.restore(journal["splits"][split])
        state = State(**journal["progress"])
        if state.next_chunk:
            job.report(
                f"{job.directory}: going on after {_tokens(writers):,} tokens of an interrupted preparation"
            )
    else:
        if (building / workplace.JOURNAL).exists():
            job.report(f"{job.directory}: starting anew, what was interrupted is damaged or was another set")
        workplace.start_building(building)
        state = State()
    job.tokenizer.save(building / workplace.TOKENIZER_FOLDER)
    return state, writers


def _write_tokens(
    job: Job,
    building: Path,
    state: State,
    writers: dict[str, Writer],
    progress: Progress,
    save: Callable[[], None],
) -> None:
    limit, saved = job.config.prepare.max_document_tokens, time.monotonic()
    progress.resume(state.source_bytes)
    before = _tokens(writers)
    stream = itertools.islice(stream_chunks(job.config.corpus, job.files), state.next_chunk, None)
    for chunk, encoded in encode_all(stream, job.tokenizer, job.rules, job.workers, building):
        if isinstance(chunk, PieceChunk) and encoded.parts:
            state.piece_tokens = join_piece(chunk, encoded, state.piece_tokens, job.tokenizer, limit)
        for split, part in (encoded.parts | encoded.pairs).items():
            writers[split].add(part)
        state.absorb(chunk, encoded, job.files)
        if _hopeless(state) and job.config.prepare.max_bad_fraction < 0.5:
            raise _too_many_bad(job, state)
        progress.update(chunk.source_bytes, _tokens(writers) - before - progress.tokens)
        if time.monotonic() - saved >= JOURNAL_SECONDS:
            save()
            saved = time.monotonic()


def _tokens(writers: dict[str, Writer]) -> int:
    return sum(writer.tokens for writer in writers.values())


def _check_outcome(job: Job, state: State, writers: dict[str, Writer]) -> None:
    prepare, seen = job.config.prepare, state.documents + state.bad_documents
    if state.bad_documents > prepare.max_bad_fraction * seen:
        raise _too_many_bad(job, state)
    if changed := changed_since_listed(job.files):
        raise UserError(
            f"{changed[0]} changed while it was being prepared ({len(changed)} such files): the set would be "
            "neither the old text nor the new. Run the same command again when nothing writes to the corpus"
        )
    for split, writer in writers.items():
        if writer.documents == 0 and (split == "train" or prepare.val_fraction > 0):
            raise UserError(
                f"the {split} split got none of the {state.documents:,} documents{_separated_by(job)} with "
                f"prepare.val_fraction={prepare.val_fraction}: training needs both. Use more documents, or "
                "another prepare.val_fraction" + (" (0 for no validation split)" if split == "val" else "")
            )


def _hopeless(state: State) -> bool:
    bad, good_so_far = state.bad_documents, state.documents or state.piece_tokens
    many = bad >= EARLY_DOCUMENTS or (bad >= EARLY_FEW and state.source_bytes >= EARLY_BYTES)
    return many and not good_so_far


def _too_many_bad(job: Job, state: State) -> UserError:
    seen, more = state.documents + state.bad_documents, state.bad_documents - len(state.places)
    mend = "Mend the files"
    if isinstance(job.config.corpus, JsonlCorpusConfig):
        mend = "Mend the lines, set corpus.field= to the field that holds the text"
    elif isinstance(job.config.corpus, TextCorpusConfig):
        mend = "Mend the files, keep other files out with corpus.suffixes="
    return UserError(
        f"{state.bad_documents:,} of {seen:,} documents are bad, more than "
        f"prepare.max_bad_fraction={job.config.prepare.max_bad_fraction}:\n  "
        + "\n  ".join(state.places + ([f"and {more:,} more"] if more else []))
        + f"\nThey would be left out. {mend}, or allow them with a larger prepare.max_bad_fraction"
    )


def _separated_by(job: Job) -> str:
    separator = preparation_settings(job.config).get("separator")
    return "" if separator is None else f" that corpus.separator='{separator}' makes"


def _disk_error(
    error: OSError, job: Job, building: Path, state: State, writers: dict[str, Writer]
) -> OSError:
    if error.errno not in workplace.FULL:
        return error
    total = sum(file.size for file in job.files)
    written = _tokens(writers) * job.tokenizer.dtype.itemsize
    done = state.source_bytes
    needed = written * total // done if done else total * job.tokenizer.dtype.itemsize
    free = workplace.free_bytes(building)
    raise UserError(
        f"{building}: no room ({error.strerror}): about {needed:,} bytes are needed, {written:,} are written "
        f"and {free:,} are free. What is written stays: make room and run the same command again, or set "
        "data.root= to a larger disk"
    ) from error
