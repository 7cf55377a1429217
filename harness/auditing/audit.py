"""Whether a run saw exactly the tokens that it claims: every batch made again and compared with the records.

Batches are a pure function of the data and the run's lineage, so no model is needed, and they are hashed in
any order, by all threads at once; only the chain over the hashes is in order, and costs a microsecond a step.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from harness.auditing.audit_compare import compare
from harness.auditing.audit_records import Fault, Records, read_records, unclaimed
from harness.auditing.data_chain import batch_digest
from harness.auditing.replay import RunRecord, SegmentReader, Source, source_of, tokens_a_step
from harness.errors import UserError
from harness.resuming import lineage

# Tokens hashed by a thread at a time: enough to make starting a piece cheap, little enough to be fair.
_PIECE_TOKENS = 1 << 22

# Called with the steps and the tokens done so far, and the steps there are.
Report = Callable[[int, int, int], None]


@dataclass
class Recomputed:
    """The digest of each step's batch, from step 1 on; None where it could not be read, with the reason."""

    digests: list[bytes | None]
    unreadable: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Audit:
    """What came of an audit. `faults` in order of steps, those of the data itself first.

    `unclaimed`: the steps that nothing is claimed of, so that nothing is confirmed.
    """

    run: RunRecord
    records: Records
    sources: list[Source]
    recomputed: Recomputed
    faults: list[Fault]
    unclaimed: list[int]


def audit(
    run: RunRecord,
    *,
    data_path: str | None = None,
    data_root: str | None = None,
    threads: int | None = None,
    report: Report = lambda steps, tokens, total: None,
) -> Audit:
    """Recompute the batches of all steps that the run claims, and compare everything it says of them.

    `UserError` where there is nothing to compare, or no data to compare with.
    """
    records = read_records(run)
    if not any(claim.data_chain or claim.batch_sha256 for claim in records.claims):
        raise UserError(
            f"{run.path}: no row and no checkpoint holds a data_chain or a batch_sha256, so nothing of its "
            f"{records.last} steps can be confirmed: they were trained with trainer.data_chain=false, by an "
            "older version, or none was logged yet"
        )
    sources = [source_of(run, segment, data_path, data_root) for segment in run.segments]
    readers, faults = _open(run, sources)
    recomputed = _recompute(run, readers, records.last, threads or _cpus(), report)
    faults += sorted([*records.faults, *compare(run, records.claims, readers, recomputed)])
    return Audit(run, records, sources, recomputed, faults, unclaimed(run, records))


def _open(run: RunRecord, sources: list[Source]) -> tuple[list[SegmentReader | None], list[Fault]]:
    """A reader for each segment, and what is wrong with the sets; a set that does not fit has no reader."""
    readers: list[SegmentReader | None] = []
    faults = {}
    for source in sources:
        try:
            readers.append(SegmentReader.open(source, mmap=run.config.data.mmap))
            problem = "its batches are compared all the same"
        except UserError as error:
            if source.is_as_recorded:
                raise
            readers.append(None)
            problem = f"it cannot be read as the run read it: {error}"
        if not source.is_as_recorded:
            faults[source.manifest.path] = Fault(
                0,
                f"the data is another: {source.manifest.path} has metadata_sha256 {source.found}, the run "
                f"was trained on {source.segment.metadata_sha256}; {problem}",
            )
    return readers, list(faults.values())


def _recompute(
    run: RunRecord, readers: list[SegmentReader | None], last: int, threads: int, report: Report
) -> Recomputed:
    import torch  # noqa: F401 - by the first thread that needs it, it would be part of the time

    result = Recomputed([None] * last)
    begun, lock, total = time.perf_counter(), threading.Lock(), last
    local = threading.local()

    def hash_steps(index: int, steps: range) -> tuple[range, list[bytes | str]]:
        readers_here = local.__dict__.setdefault("readers", {})
        if index not in readers_here:
            reader = readers[index]
            assert reader is not None
            with lock:
                readers_here[index] = reader.copy()
        return steps, [_digest(readers_here[index], step) for step in steps]

    pieces = iter(_pieces(run, readers, last, threads))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="audit")
    try:
        running = {pool.submit(hash_steps, *piece) for piece in itertools.islice(pieces, 2 * threads)}
        done_steps = 0
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(hash_steps, *piece) for piece in itertools.islice(pieces, len(done))}
            for future in done:
                steps, digests = future.result()
                for step, digest in zip(steps, digests, strict=True):
                    if isinstance(digest, str):
                        result.unreadable[step] = digest
                    else:
                        result.digests[step - 1] = digest
                done_steps += len(steps)
                result.tokens += len(steps) * tokens_a_step(lineage.segment_of(run.segments, steps[0]))
                report(done_steps, result.tokens, total)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    result.seconds = time.perf_counter() - begun
    return result


def _digest(reader: SegmentReader, step: int) -> bytes | str:
    """The digest of a step's batch, or why it cannot be read."""
    try:
        return batch_digest(reader.batch(step))
    except (UserError, OSError) as error:
        return str(error)


def _pieces(
    run: RunRecord, readers: list[SegmentReader | None], last: int, threads: int
) -> list[tuple[int, range]]:
    """Runs of steps inside one segment, each with the segment's number."""
    ends = [segment.step for segment in run.segments[1:]] + [last]
    pieces = []
    for index, (segment, end, reader) in enumerate(zip(run.segments, ends, readers, strict=True)):
        if reader is None:
            continue
        end = min(end, last)
        most = max(1, _PIECE_TOKENS // (reader.loader.batch_size * reader.loader.seq_len))
        size = max(1, min(most, (end - segment.step) // (4 * threads)))
        for first in range(segment.step + 1, end + 1, size):
            pieces.append((index, range(first, min(first + size, end + 1))))
    return pieces


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
