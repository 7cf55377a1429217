"""`scripts/audit_data.py RUN`: whether a run saw exactly the tokens it claims, step by step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commandline.script_words import parse, run_script, words_or_help
from harness.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from harness.auditing.audit import Audit
    from harness.resuming.lineage import Segment

_HELP = """\
Say whether a run saw exactly the tokens it claims: make every batch again from its data, and compare.

usage: audit_data.py RUN [key=value ...]   a run directory, also of a run that is going on, or a checkpoint

  threads=null     how many; null: one a processor
  data.path=null   where the run's set lies now, if it was moved
  data.root=null   likewise, the folder of several sets

Compared are the data chain and the batch hashes of all rows of metrics.jsonl, positions, epochs and tokens,
and the same of every checkpoint that is there; of a branch the steps that it inherited, too.
Exit code 0: all is as claimed (of a run with trainer.data_chain=false, what is claimed); 1: it is not, and
the first such step is named, or steps lack the chain that the run is to keep; 2: nothing to audit."""

_SHOWN = 10  # differences
_LINE_SECONDS = 10.0  # between lines of progress that no terminal overwrites


@dataclass
class AuditOptions:
    """Options of `scripts/audit_data.py RUN key=value ...`."""

    threads: int | None = None
    data_path: str | None = field(default=None, metadata={"word": "data.path"})
    data_root: str | None = field(default=None, metadata={"word": "data.root"})


def main() -> None:
    """Audit a run; exit code 1 where something is not as it claims."""
    words = words_or_help(_HELP)
    run_script(lambda: _main(words))


def _main(words: list[str]) -> None:
    path, options = parse(words, AuditOptions, "RUN", _HELP)
    if options.threads is not None and options.threads < 1:
        raise UserError(f"threads={options.threads} must be at least 1, or null")
    from harness.auditing.audit import audit
    from harness.auditing.replay import open_run

    run = open_run(path)
    with _Progress() as progress:
        result = audit(
            run,
            data_path=options.data_path,
            data_root=options.data_root,
            threads=options.threads,
            report=progress,
        )
    for line in report(result):
        print(line)
    raise SystemExit(EXIT_FAILED if result.faults or _lacks_chain(result) else 0)


def _lacks_chain(result: Audit) -> bool:
    """Whether steps have no chain although the run is to keep one: it may have been taken out."""
    return bool(result.unclaimed) and result.run.config.trainer.data_chain


def report(result: Audit) -> Iterator[str]:
    """The whole report."""
    from harness.commandline.commands import shown

    run, records, recomputed = result.run, result.records, result.recomputed
    yield f"run        {shown(run.path)}: {records.last:,} steps, {recomputed.tokens:,} tokens"
    for place in {source.manifest.directory: source for source in result.sources}.values():
        words = "as recorded" if place.is_as_recorded else "NOT the set of the run"
        if place.is_as_recorded and place.found != place.manifest.metadata_sha256:
            words += ", shards were added to it since"
        yield f"data       {shown(place.manifest.directory)}: {words}"
    yield from _history(run.segments, result)
    chains = sum(claim.data_chain is not None for claim in records.claims)
    hashes = sum(claim.batch_sha256 is not None for claim in records.claims)
    yield (
        f"compared   {records.rows:,} rows and the checkpoints of {records.checkpoints} steps: {chains:,} "
        f"values of the chain, {hashes:,} batch hashes"
    )
    if result.unclaimed:
        yield (
            f"unclaimed  {len(result.unclaimed):,} steps, the first is {result.unclaimed[0]}: neither chain "
            "nor batch hash says what they saw (trainer.data_chain=false, or an older version)"
        )
    speed = recomputed.tokens / recomputed.seconds / 1e6 if recomputed.seconds else 0.0
    took = f"{recomputed.seconds:.1f} s, {speed:.1f} M tokens a second"
    for fault in result.faults[:_SHOWN]:
        yield f"DIFFERS    {fault.text}"
    if len(result.faults) > _SHOWN:
        yield f"           and {len(result.faults) - _SHOWN} more differences"
    if result.faults:
        concerned = [fault.step for fault in result.faults if fault.step > 0]
        first = f"the first step concerned is {min(concerned)}" if concerned else "no step is concerned"
        yield f"not confirmed: {first} ({took})"
    else:
        claimed = records.last - len(result.unclaimed)
        words = "not confirmed as a whole, only" if _lacks_chain(result) else "confirmed:"
        yield f"{words} {claimed:,} of {records.last:,} steps saw exactly what the run claims ({took})"


def _history(segments: list[Segment], result: Audit) -> Iterator[str]:
    """What was inherited, and where the data or the order changed."""
    from harness.auditing.audit_records import own_start
    from harness.commandline.commands import shown

    own = own_start(result.run)
    for old, new in pairwise(segments):
        if old.run_id != new.run_id:
            broken = any(0 < fault.step <= new.step for fault in result.faults)
            outcome = "NOT as the chain says" if broken else "recomputed, and as the chain says"
            if new.data_chain is None:
                outcome = "without a chain, so that nothing is claimed of them"
            kind = "inherited" if new.step == own else "         "
            yield f"{kind}  steps 1 to {new.step} of {shown(Path(old.path))}: {outcome}"
        if old.metadata_sha256 != new.metadata_sha256:
            yield (
                f"accepted   after step {new.step}: metadata_sha256 {old.metadata_sha256} became "
                f"{new.metadata_sha256}"
            )
        changed = [key for key in new.loader if new.loader[key] != old.loader.get(key) and key != "prefetch"]
        for key in changed:
            before, after = old.loader.get(key), new.loader[key]
            yield f"accepted   after step {new.step}: loader.{key} {before} became {after}"


class _Progress:
    """One line on stderr that is written over on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self.tty = sys.stderr.isatty()
        self.begun = self.said = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, steps: int, tokens: int, total: int) -> None:
        now = time.monotonic()
        if now - self.said < (0.2 if self.tty else _LINE_SECONDS):
            return
        self.said = now
        speed = tokens / (now - self.begun) / 1e6
        left = (total - steps) * (now - self.begun) / max(1, steps)
        line = f"{steps:,} of {total:,} steps, {speed:.1f} M tokens/s, {left:.0f} s left"
        print(
            f"\r\033[K{line}" if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True
        )
