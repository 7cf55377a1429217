"""Whether runs can be compared at all, and what a reader has to know where they are unlike."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.errors import UserError
from harness.sweep.figures import evaluation_at
from harness.sweep.records import Record

if TYPE_CHECKING:
    from harness.storage.manifest import Manifest

LOSS, BITS = "val_loss", "val_bits_per_byte"
_SHOWN = 3  # values in a note


class Likeness(NamedTuple):
    """`metric`: what these runs can be compared by; `comparable`: whether one can be called better at all."""

    metric: str
    comparable: bool
    notes: list[str]


def likeness(records: Sequence[Record]) -> Likeness:
    """What tells the results of these runs apart, other than how good they are."""
    tokenizers = _differing(records, _tokenizer, "different tokenizers", "nats a token are of other tokens")
    unlike = [
        _differing(records, _objective, "different objectives", "their losses are other quantities"),
        _differing(
            records,
            _evaluated_text if tokenizers else _evaluated,
            "different validation data",
            "evaluation.set=PATH evaluation.tokens=N, the same for all, makes them comparable",
        ),
    ]
    notes = [f"{note}. Nothing is called best" for note in unlike if note]
    if tokenizers:
        notes.append(f"{tokenizers}: they are compared by {BITS}")
        if any(_is_partial(record) for record in records):
            notes.append(
                "evaluation.tokens counts each tokenizer's own tokens, so it ends at other places of the "
                "text: a count that is at least the whole split's makes the validated text one"
            )
    others = [
        _differing(records, _trained_on, "different training data", "that may be what is seen here"),
        _differing(records, _code, "different code", "what changed in it may be what is seen here"),
        _differing(records, _hardware, "different hardware", "their speed and memory do not compare"),
    ]
    notes += [note for note in others if note]
    return Likeness(BITS if tokenizers else LOSS, not any(unlike), notes)


def uneven(records: Sequence[Record], tokens: int | None) -> list[str]:
    """What is uneven about a comparison after `tokens` tokens: evaluations apart, unfinished schedules."""
    if tokens is None:
        return []
    notes = _branches(records)
    apart = [
        (record, found.tokens)
        for record in records
        if (found := evaluation_at(record, tokens)) and tokens - found.tokens >= record.tokens_per_step
    ]
    if apart:
        record, at = max(apart, key=lambda pair: tokens - pair[1])
        notes.append(
            f"evaluations lie apart: {len(apart)} of {len(records)} runs have none close to {tokens:,} "
            f"tokens, {record.path.name} only one after {at:,}. A smaller evaluation.interval brings them "
            "together"
        )
    longer = [r for r in records if r.metrics.tokens - tokens >= r.tokens_per_step]
    if longer:
        longest = max(longer, key=lambda record: record.metrics.tokens)
        notes.append(
            f"{len(longer)} of {len(records)} runs were trained beyond {tokens:,} tokens "
            f"({longest.path.name} to {longest.metrics.tokens:,}), and are compared in the middle of "
            "their schedule: a learning rate that was still high makes their loss look worse than at the "
            "end of a run of equal budget"
        )
    bare = [record for record in records if record.summary.get("step") != record.status.get("step")]
    if bare and len(bare) < len(records):
        notes.append(
            f"{len(bare)} of {len(records)} runs have no summary.json of their end ({bare[0].path.name}): "
            "their tokens_per_s is that of their rows, a little higher without the time that logging takes"
        )
    return notes


def _branches(records: Sequence[Record]) -> list[str]:
    """The settings that a report shows are those of a branch's own steps."""
    parents = [(record, record.status.get("parent")) for record in records]
    branches = [(record, parent) for record, parent in parents if isinstance(parent, dict)]
    if not branches:
        return []
    record, parent = branches[0]
    return [
        f"{len(branches)} of {len(records)} runs began as a branch of another ({record.path.name} at step "
        f"{parent.get('step')}): the steps before count, and were trained with that run's settings"
    ]


def _differing(
    records: Sequence[Record], of: Callable[[Record], str | None], what: str, why: str
) -> str | None:
    """The note that runs differ in `of`: each value with the runs that have it; None where they do not.

    A run of which it is not known, None, is taken to be like any other.
    """
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if (value := of(record)) is not None:
            found[value].append(record)
    if len(found) < 2:
        return None
    parts = [f"{value} ({_named(those)})" for value, those in found.items()]
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return f"{what}: {', '.join(parts[:_SHOWN])}{more}: {why}"


def _named(records: list[Record]) -> str:
    return records[0].path.name if len(records) == 1 else f"{len(records)} runs"


def _objective(record: Record) -> str | None:
    if "loader.name" not in record.config:
        return None
    if record.config["loader.name"] != "contrastive_rows":
        return "next-token prediction"
    beta = record.config.get("trainer.dpo_beta")  # it scales what the loss is taken of
    return f"preferences (DPO, trainer.dpo_beta={beta})"


def _tokenizer(record: Record) -> str | None:
    if record.manifest is None:
        return None
    tokenizer = record.manifest.tokenizer
    name = tokenizer.name if tokenizer.sha256 is None else f"tokenizer {tokenizer.sha256[:12]}"
    return f"{name} of {tokenizer.vocab_size:,} ids"


def _trained_on(record: Record) -> str | None:
    return None if record.manifest is None else _text_of(record.manifest)


def _code(record: Record) -> str | None:
    git = record.start.get("git")
    if not isinstance(git, dict):
        return None
    return f"commit {str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"


def _hardware(record: Record) -> str | None:
    gpus = record.start.get("gpus")
    if gpus and isinstance(gpus, list) and record.config.get("device") != "cpu":
        return str(gpus[0])
    return f"{record.start['cpus']} CPUs" if "cpus" in record.start else None


def _evaluated(record: Record) -> str | None:
    """The evaluated tokens, as far as they are known."""
    text, manifest = _evaluated_text(record), _validated_set(record)
    if text is None or manifest is None:
        return text
    return f"{min(_evaluation_tokens(record), _val_tokens(manifest)):,} tokens of {text}"


def _evaluated_text(record: Record) -> str | None:
    """Which text, and whether it is read as a stream or in rows, which give a token less before it."""
    manifest = _validated_set(record)
    if manifest is None:
        return record.config.get("evaluation.set")
    widths = [split.row_width or 0 for name, split in manifest.splits.items() if name.startswith("val")]
    seq_len, cut = record.config.get("loader.seq_len"), ""
    if isinstance(seq_len, int) and seq_len < max(widths) - 1:
        cut = f", cut to {seq_len} targets"
    return f"val as {manifest.storage.layout}, {_text_of(manifest)}{cut}"


def _is_partial(record: Record) -> bool:
    manifest = _validated_set(record)
    return manifest is not None and _evaluation_tokens(record) < _val_tokens(manifest) - 1


def _evaluation_tokens(record: Record) -> int:
    tokens = record.config.get("evaluation.tokens")
    return tokens if isinstance(tokens, int) else 0


def _val_tokens(manifest: Manifest) -> int:
    return sum(split.total_tokens for name, split in manifest.splits.items() if name.startswith("val"))


def _text_of(manifest: Manifest) -> str:
    """The text of a set: the same however it was cut into tokens, rows and shards, where the set says it."""
    made = manifest.preparation
    if "corpus_sha256" in made:
        parts = [made["corpus_sha256"], made.get("val_fraction"), made.get("max_document_tokens")]
        return f"text {hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"
    return f"tokens {(manifest.content_sha256 or manifest.metadata_sha256)[:12]}"


def _validated_set(record: Record) -> Manifest | None:
    place = record.config.get("evaluation.set")
    return record.manifest if place is None else _manifest_at(str(place))


@functools.lru_cache(maxsize=64)
def _manifest_at(place: str) -> Manifest | None:
    """The manifest of another set as it is on disk now; None where it is gone."""
    from harness.storage.manifest import load_manifest

    try:
        return load_manifest(place)
    except UserError:
        return None
