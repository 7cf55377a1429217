"""The records of a run against the batches that its data gives: which step is the first that differs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from harness.auditing.audit_records import Claim, Fault
from harness.auditing.data_chain import link
from harness.resuming.lineage import tokens_at

if TYPE_CHECKING:
    from harness.auditing.audit import Recomputed
    from harness.auditing.replay import RunRecord, SegmentReader
    from harness.resuming.lineage import Segment


def compare(
    run: RunRecord, claims: list[Claim], readers: list[SegmentReader | None], recomputed: Recomputed
) -> list[Fault]:
    """Every claim that the data does not bear out. `claims` are in order of their steps."""
    faults = list(_places(run, claims, readers))
    faults += _token_counts(run.segments, claims)
    faults += _first_values(run.segments)
    return faults + list(_Hashes(run, claims, recomputed).faults())


def _places(run: RunRecord, claims: list[Claim], readers: list[SegmentReader | None]) -> Iterator[Fault]:
    """Positions and epochs, which follow from the lineage alone."""
    starts = {segment.step: segment for segment in run.segments}
    read_by = list(zip(run.segments, readers, strict=True))
    for claim in claims:
        if claim.epoch is None or claim.position is None:
            continue
        places = []
        if (reader := next((r for s, r in reversed(read_by) if s.step < claim.step), None)) is not None:
            place = reader.place(claim.step)
            places.append((place.epoch, place.end))
        if (segment := starts.get(claim.step)) is not None:  # said before the first step of a segment
            places.append((segment.epoch, segment.cursor["position"]))
        if places and (claim.epoch, claim.position) not in places:
            yield Fault(
                claim.step,
                f"{claim.source} says epoch {claim.epoch}, position {claim.position} after step "
                f"{claim.step}; it is epoch {places[0][0]}, position {places[0][1]}",
            )


def _token_counts(segments: list[Segment], claims: list[Claim]) -> Iterator[Fault]:
    """Tokens trained, which are so many a step; of a run whose first steps are not known, nothing."""
    for claim in claims if segments[0].step == 0 else []:
        tokens = tokens_at(segments, claim.step)
        if claim.tokens not in (None, tokens):
            text = f"{claim.source} says {claim.tokens} tokens after step {claim.step}; it is {tokens}"
            yield Fault(claim.step, text)


def _first_values(segments: list[Segment]) -> list[Fault]:
    first = segments[0]
    if first.step or first.data_chain in (None, first.metadata_sha256):
        return []
    said = f"the chain begins with {first.data_chain}, not with metadata_sha256 {first.metadata_sha256}"
    return [Fault(0, f"lineage.json: {said}")]


class _Known(NamedTuple):
    """The chain after `step`, with the link of data that was accepted there."""

    step: int
    value: bytes


class _Hashes:
    """Batch hashes and the chain, from each value of the chain that is claimed to the next.

    After a difference the claimed value is believed, so that each later one is a difference of its own.
    """

    def __init__(self, run: RunRecord, claims: list[Claim], recomputed: Recomputed) -> None:
        self.digests, self.unreadable = recomputed.digests, recomputed.unreadable
        self.links = {
            new.step: bytes.fromhex(new.metadata_sha256)
            for old, new in pairwise(run.segments)
            if new.metadata_sha256 != old.metadata_sha256
        }
        self.hashed: dict[int, list[Claim]] = {}
        for claim in claims:
            if claim.batch_sha256 is not None:
                self.hashed.setdefault(claim.step, []).append(claim)
        first = run.segments[0]
        self.known = None if first.data_chain is None else _Known(first.step, bytes.fromhex(first.data_chain))
        begun = [
            Claim(segment.step, "the lineage, where a new part of the run began,", segment.data_chain)
            for segment in run.segments[1:]
        ]
        chained = sorted((c for c in [*claims, *begun] if c.data_chain is not None), key=lambda c: c.step)
        self.points = [(step, list(group)) for step, group in groupby(chained, key=lambda c: c.step)]

    def faults(self) -> Iterator[Fault]:
        """All differences, in order of the stretches between claimed values."""
        last = 0
        for index, (step, claims) in enumerate(self.points):
            yield from self._stretch(last, step, claims, self.points[index + 1 :][:1])
            last = step
        yield from self._other_batches(last, len(self.digests))

    def _stretch(
        self, start: int, step: int, claims: list[Claim], following: list[tuple[int, list[Claim]]]
    ) -> Iterator[Fault]:
        """The steps after `start` up to `step`, of whose chain `claims` say what it is."""
        if self.known is None:
            yield Fault(
                step,
                f"{claims[0].source} has a data_chain, but lineage.json says that the run began without one: "
                "a chain cannot begin later",
            )
        value = None if self.known is None else self._carried(self.known, step)
        if value is not None:
            fitting = {value, self._linked(value, step)}
            right = [claim for claim in claims if bytes.fromhex(str(claim.data_chain)) in fitting]
            if right:
                yield from (_changed(claim, value) for claim in claims if claim not in right)
                yield from self._other_rows(start, step)
                self.known = _Known(step, self._linked(value, step))
                return
        other = list(self._other_batches(start, step))
        yield from other
        if value is not None and not other:
            if self._is_changed(start, step, following):
                yield _changed(claims[0], value)
                self.known = _Known(step, self._linked(value, step))
                return
            yield _unlike(start, claims[0], value, alone=not following)
        self.known = _Known(step, self._linked(bytes.fromhex(str(claims[0].data_chain)), step))

    def _is_changed(self, start: int, step: int, following: list[tuple[int, list[Claim]]]) -> bool:
        """Whether it is the claim that is wrong, and not the data: every batch is as it was logged, or the
        next claim is what the data gives without this one."""
        if all(k in self.hashed for k in range(start + 1, step + 1)):
            return True
        assert self.known is not None
        for later, claims in following:
            value = self._carried(self.known, later)
            if value is not None and any(claim.data_chain == value.hex() for claim in claims):
                return True
        return False

    def _carried(self, known: _Known, step: int) -> bytes | None:
        """The chain after `step`, without a link there; None where a batch could not be read."""
        value = known.value
        for number in range(known.step + 1, step + 1):
            digest = self.digests[number - 1]
            if digest is None:
                return None
            value = link(value, digest)
            if number < step:
                value = self._linked(value, number)
        return value

    def _linked(self, value: bytes, step: int) -> bytes:
        return link(value, self.links[step]) if step in self.links else value

    def _other_batches(self, start: int, end: int) -> Iterator[Fault]:
        """The steps after `start` up to `end` whose own hash shows that they saw other tokens."""
        for step in range(start + 1, end + 1):
            if step in self.unreadable:
                yield Fault(step, f"the batch of step {step} cannot be read: {self.unreadable[step]}")
            for claim, digest in self._differing(step):
                yield Fault(
                    step,
                    f"step {step} saw other tokens than the data holds now: batch_sha256 "
                    f"{claim.batch_sha256} in {claim.source}, the data gives {digest}",
                )

    def _other_rows(self, start: int, end: int) -> Iterator[Fault]:
        """Batch hashes that differ where the chain is right: they were changed afterwards."""
        for step in range(start + 1, end + 1):
            for claim, digest in self._differing(step):
                yield Fault(
                    step,
                    f"{claim.source} was changed: batch_sha256 {claim.batch_sha256} of step {step}; data and "
                    f"chain give {digest}",
                )

    def _differing(self, step: int) -> Iterator[tuple[Claim, str]]:
        digest = self.digests[step - 1]
        for claim in self.hashed.get(step, []):
            if digest is not None and claim.batch_sha256 != digest.hex():
                yield claim, digest.hex()


def _changed(claim: Claim, value: bytes) -> Fault:
    return Fault(
        claim.step,
        f"{claim.source} was changed: data_chain {claim.data_chain} of step {claim.step}; what is around it "
        f"gives {value.hex()}",
    )


def _unlike(start: int, claim: Claim, value: bytes, *, alone: bool) -> Fault:
    exact = claim.step == start + 1
    which = f"step {claim.step}" if exact else f"one of the steps {start + 1} to {claim.step}"
    or_else = f", or {claim.source} was changed" if alone else ""
    return Fault(
        start + 1,
        f"{which} saw other tokens than the data holds now{or_else}: data_chain {claim.data_chain} in "
        f"{claim.source}, the data gives {value.hex()}",
    )
