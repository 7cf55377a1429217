"""Why a preparation ends without a set: what is wrong with the corpus, or with the disk."""

from __future__ import annotations

from pathlib import Path

from harness.config import layout
from harness.config_groups import JsonlCorpusConfig, TextCorpusConfig
from harness.errors import UserError
from harness.prepare import workplace
from harness.prepare.corpora import changed_since_listed
from harness.prepare.job import Job
from harness.prepare.settings import PrepareLike, preparation_settings
from harness.prepare.state import Counts, State
from harness.prepare.writers import Writer

# A corpus that begins with so many bad documents, or with a few in so many bytes, and no good one is another
# than was meant.
EARLY_DOCUMENTS = 1000
EARLY_FEW, EARLY_BYTES = 10, 64 << 20
_SET_FILES = (
    "metadata.json",
    "shards.json",
    "train_00000.npy",
    "train_00000.h5",
    "tokenizer/vocab.bpe",
    "SET.lock",
)


def check_several_documents(config: PrepareLike, paths: list[str]) -> None:
    """Refuse a corpus of one text file that is one document, which cannot fill two splits."""
    one = len(paths) == 1 and isinstance(config.corpus, TextCorpusConfig) and config.corpus.separator is None
    if one and config.prepare.val_fraction > 0 and not config.prepare.append:
        raise UserError(
            f"{paths[0]} is one document, and whole documents go to train or val, so one of the two "
            f"would be empty (prepare.val_fraction={config.prepare.val_fraction}). Say what stands between "
            "the documents in it, as in \"corpus.separator='\\n\\n\\n'\" (two empty lines) or "
            "\"corpus.separator='\\n<|endoftext|>\\n'\"; or split the text into several files, or set "
            "prepare.val_fraction=0"
        )


def check_outside_corpus(config: PrepareLike, directory: Path) -> None:
    """Refuse a set inside of its own corpus: the next time its files would be read as text."""
    corpus = config.corpus
    if not isinstance(corpus, TextCorpusConfig):  # the others read files of their own kinds only
        return
    if corpus.suffixes and not any(name.endswith(tuple(corpus.suffixes)) for name in _SET_FILES):
        return
    for path in [corpus.path] if isinstance(corpus.path, str) else corpus.path:
        root = Path(path).resolve()
        inside = directory.is_relative_to(root) and directory.relative_to(root).parts
        if inside is not False and not any(part.startswith(".") for part in inside):
            raise UserError(
                f"{directory} lies in the corpus that it is made from (corpus.path={path}): the next time "
                "its shards would be read as text. Set data.root= (or data.path=) to a folder outside, or "
                "keep other files out of the corpus with corpus.suffixes=, as in corpus.suffixes=[.txt]"
            )


def check_hope(job: Job, state: State) -> None:
    """End early where a corpus begins with nothing but bad documents."""
    bad, good_so_far = state.total.bad, state.total.documents or state.piece_tokens
    many = bad >= EARLY_DOCUMENTS or (bad >= EARLY_FEW and state.source_bytes >= EARLY_BYTES)
    if many and not good_so_far and job.config.prepare.max_bad_fraction < 0.5:
        raise _too_many_bad(job, bad, bad, state.total.places)


def check_outcome(job: Job, state: State, before: Counts, writers: dict[str, Writer]) -> None:
    """Refuse what no set should be made of; `before` counts what a set that is grown held already."""
    prepare, total = job.config.prepare, state.total
    bad = total.bad - before.bad
    seen = bad + total.documents - before.documents
    if bad > prepare.max_bad_fraction * seen:
        raise _too_many_bad(job, bad, seen, total.places[len(before.places) :])
    if changed := changed_since_listed(job.files):
        raise UserError(
            f"{changed[0]} changed while it was being prepared ({len(changed)} such files): the set would be "
            "neither the old text nor the new. Run the same command again when nothing writes to the corpus"
        )
    for split, writer in writers.items():
        if writer.documents == 0 and (split == "train" or prepare.val_fraction > 0):
            raise UserError(
                f"the {split} split got none of the {total.documents:,} documents{_separated_by(job)} with "
                f"prepare.val_fraction={prepare.val_fraction}{_unpaired(total)}: training needs both. Use "
                "more documents, or another prepare.val_fraction"
                + (" (0 for no validation split)" if split == "val" else "")
            )


def _unpaired(total: Counts) -> str:
    if not total.skipped_windows:
        return ""
    return (
        f", {total.skipped_windows:,} windows or pairs being left out (a window's false continuation is from "
        "another document of its split, near it in the corpus, or in its file with prepare.sharding=source)"
    )


def disk_error(error: OSError, job: Job, building: Path, state: State) -> OSError:
    """`error` itself, or a `UserError` with the bytes needed and free where the disk is full."""
    if error.errno not in workplace.FULL:
        return error
    total, done = sum(file.size for file in job.files), state.source_bytes
    written = workplace.own_bytes(building)
    needed = written * total // done if done else total * job.tokenizer.dtype.itemsize
    free = workplace.free_bytes(building)
    raise UserError(
        f"{building}: no room ({error.strerror}): about {needed:,} bytes are needed, {written:,} are written "
        f"and {free:,} are free. What is written stays: make room and run the same command again, or set "
        "data.root= to a larger disk"
    ) from error


def _too_many_bad(job: Job, bad: int, seen: int, places: list[str]) -> UserError:
    more = bad - len(places)
    mend = "Mend the files"
    if isinstance(job.config.corpus, JsonlCorpusConfig) and layout(job.config.loader) == "contrastive":
        mend = "Mend the lines, set corpus.pair_fields= to the fields of prompt, chosen and rejected text"
    elif isinstance(job.config.corpus, JsonlCorpusConfig):
        mend = "Mend the lines, set corpus.field= to the field that holds the text"
    elif isinstance(job.config.corpus, TextCorpusConfig):
        mend = "Mend the files, keep other files out with corpus.suffixes="
    return UserError(
        f"{bad:,} of {seen:,} documents are bad, more than "
        f"prepare.max_bad_fraction={job.config.prepare.max_bad_fraction}:\n  "
        + "\n  ".join(places + ([f"and {more:,} more"] if more else []))
        + f"\nThey would be left out. {mend}, or allow them with a larger prepare.max_bad_fraction"
    )


def _separated_by(job: Job) -> str:
    separator = preparation_settings(job.config).get("separator")
    return "" if separator is None else f" that corpus.separator='{separator}' makes"
