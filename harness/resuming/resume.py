"""What may change when a run goes on, and what may not: one table, which the checks and messages come from.

`TABLE` gives every key of a run its kind: `free` changes are listed in the log with old and new value;
`order` changes are refused unless `resume_accept=[KEY]` names them, and then start a branch (branch.py);
`data` is decided by the set's digest (resume_data.py); `fatal` ones are refused, and so is a key in no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.commandline.commands import override, shown
from harness.config import get, in_file_order, layout
from harness.config_record import differences, from_dict, to_dict
from harness.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint
    from harness.config import TrainConfig

FREE, ORDER, DATA, FATAL = "free", "order", "data", "fatal"


class Row(NamedTuple):
    """Keys of one kind, and what a change of them means; "" where there is nothing to say but the values."""

    kind: str
    keys: tuple[str, ...]
    meaning: str = ""


_REORDERED = "the order of the data changes"
_OTHER_LOSS = "the loss becomes another one, the order of the data stays"

TABLE: tuple[Row, ...] = (
    Row(
        FREE, ("trainer.max_steps", "trainer.max_tokens"),
        "the rest of the lr schedule changes with it unless schedule.total_steps is set",
    ),
    Row(
        FREE, ("optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.momentum",
               "schedule.name", "schedule.warmup_steps", "schedule.total_steps", "schedule.min_lr_ratio",
               "schedule.decay_fraction"),
        "wins over the checkpoint's from the next step on",
    ),
    Row(
        FREE, ("trainer.grad_clip", "trainer.on_nonfinite", "trainer.spike_zscore", "model.dropout"),
        "from the next step on",
    ),
    Row(
        FREE, ("trainer.micro_batch_size", "model.loss_chunk_tokens"),
        "the same step, summed in another order",
    ),
    Row(FREE, ("model.activation_checkpointing",), "the same step, in another time and memory"),
    Row(
        FREE, ("device", "precision", "compile", "deterministic", "parallel"),
        "the steps are no longer bit-equal to the run's before",
    ),
    Row(
        FREE, ("world_size",),
        "the same batches on another number of processes, summed in another order; random numbers begin anew",
    ),
    Row(
        FREE, ("evaluation.set", "evaluation.tokens"),
        "the losses are of other tokens, so the best one is looked for anew",
    ),
    Row(
        FREE, ("trainer.max_minutes", "trainer.log_interval", "trainer.log_batch_hash", "evaluation.interval",
               "evaluation.sample_tokens", "checkpoint.interval", "checkpoint.minutes",
               "checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.keep_best",
               "checkpoint.background", "checkpoint.max_failures", "loader.prefetch", "data.mmap",
               "data.verify", "data.expect_sha256", "profile"),
    ),
    Row(
        FREE, ("trainer.data_chain",),
        "the chain ends there, or there is none: it counts from the run's first step",
    ),
    Row(
        FREE, ("tracker.name", "tracker.mode", "tracker.project", "tracker.entity", "tracker.tags",
               "tracker.init_timeout", "tracker.finish_timeout"),
    ),
    Row(
        FREE, ("run.name", "sweep.name", "sweep.keys", "model.name", "resume", "resume_accept", "check"),
        "a name, or how a run is resumed",
    ),
    Row(
        ORDER, ("loader.name", "loader.batch_size", "loader.seed", "loader.stride", "loader.sampling",
                "loader.epoch_seed", "loader.window_tokens"),
        _REORDERED,
    ),
    Row(ORDER, ("seed",), f"{_REORDERED} where loader.seed follows it; alone it seeds the sampled text"),
    Row(ORDER, ("loader.seq_len",), f"{_REORDERED}, and the model loses its positions beyond the new length"),
    Row(ORDER, ("loader.mask_boundary", "trainer.dpo_beta"), _OTHER_LOSS),
    Row(
        DATA, ("data", "data.name", "data.root", "data.path", "data.chunk_tokens", "data.compression",
               "loader.row_width", "corpus.name", "corpus.path", "corpus.separator", "corpus.suffixes",
               "corpus.pair_fields", "corpus.field", "tokenizer.name", "tokenizer.path",
               "tokenizer.boundary_token", "tokenizer.vocab_size", "tokenizer.train_bytes",
               "prepare.shard_tokens", "prepare.sharding", "prepare.val_fraction",
               "prepare.max_document_tokens", "prepare.workers", "prepare.overwrite", "prepare.append",
               "prepare.max_bad_fraction"),
        "the set's digest says whether it is the checkpoint's data",
    ),
    Row(FATAL, ("model.n_layer", "model.n_head", "model.n_embd"), "the weights have another shape"),
    Row(FATAL, ("model.gelu",), "the weights are trained for another function"),
    Row(FATAL, ("vocabulary",), "the embedding has another shape"),
    Row(FATAL, ("optimizer.name",), "its state is another optimizer's"),
    Row(FATAL, ("init_from",), "a run that goes on has its weights already"),
)  # fmt: skip

_ROWS = {key: row for row in TABLE for key in row.keys}
_UNLISTED = Row(FATAL, (), "nothing says what a change of it means")
# Said by other lines of the log, or no setting of the run at all.
_SILENT = {"resume", "resume_accept", "check", "run.name", "sweep.name", "sweep.keys", "model.name"}
_BUDGET = ("trainer.max_steps", "trainer.max_tokens")
_EVALUATION = {"evaluation.set", "evaluation.tokens", "loader.seq_len", "trainer.dpo_beta"}
_LAYOUT_WORDS = {"stream": "a stream of tokens", "rows": "rows", "contrastive": "pairs of rows"}
_AT_A_RESUME = {
    FREE: "listed in the log with old and new value",
    ORDER: "refused; `resume_accept=[KEY]` goes on as a branch",
    DATA: "refused where the digest differs; `resume_accept=[data]` goes on where that is meaningful",
    FATAL: "refused",
}


def row_of(key: str) -> Row:
    """The table's row of a dotted key."""
    return _ROWS.get(key, _UNLISTED)


def table() -> str:
    """The table as Markdown, for the documentation."""
    lines = ["| kind | keys | what a change means | at a resume |", "|---|---|---|---|"]
    for row in TABLE:
        keys = ", ".join(dict.fromkeys(f"`{_word(key)}`" for key in row.keys))
        lines.append(f"| {row.kind} | {keys} | {row.meaning} | {_AT_A_RESUME[row.kind]} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Changes:
    """What may change and did.

    `lines` are for the log; `accepted` are the order-changing keys, with old and new value; `other_losses`:
    validation losses from here on are not to be compared with those before.
    """

    lines: list[str]
    accepted: dict[str, tuple[Any, Any]]
    other_losses: bool


def check_settings(checkpoint: Checkpoint, config: TrainConfig) -> Changes:
    """Compare a checkpoint's settings with those it is to go on with.

    This needs no data: a set may have to be prepared before it can be opened. Raises one `UserError` that
    names every setting that may not change, or not without `resume_accept`, with both values.
    """
    if problems := accept_problems(config):
        raise UserError("\n".join(problems))
    old = from_dict(checkpoint.config, str(checkpoint.path / "config.yaml"))
    changed = _changes(old, config)
    meanings = {key: _meaning(key, old, config) for key in changed}
    order = {key: changed[key] for key, row in meanings.items() if row.kind == ORDER}
    accepted = {_as_changed(_full(word), changed): word for word in config.resume_accept if word != DATA}
    refused = [
        key
        for key, row in meanings.items()
        if row.kind == FATAL or (row.kind == ORDER and key not in accepted)
    ]
    if refused:
        problems = [
            f"{key}: checkpoint {changed[key][0]}, now {changed[key][1]}: {meanings[key].meaning}"
            for key in refused
        ]
        fatal = [key for key in refused if key not in order]
        mend = _mend(_back(refused, changed), fatal, order, config)
        raise refusal(checkpoint, problems, mend)
    if idle := [word for key, word in accepted.items() if key not in order]:
        values = ", ".join(f"{word} is {get(config, _full(word))} in both" for word in idle)
        raise UserError(
            f"resume_accept={_list(idle)} accepts a change that {shown(checkpoint.path)} does not meet: "
            f"{values}. Drop it, or say the new value"
        )
    lines = [
        f"{'accepted' if key in order else 'changed since the checkpoint'}: {key} {before} -> {now}"
        + (f" ({meanings[key].meaning})" if meanings[key].meaning else "")
        for key, (before, now) in changed.items()
        if key not in _SILENT
        and not (key.startswith("tracker.") and "tracker.name" in changed.keys() - {key})
    ]
    return Changes(lines, order, not _EVALUATION.isdisjoint(changed))


def accept_problems(config: TrainConfig) -> list[str]:
    """What is wrong with `resume_accept`, whatever the checkpoint says."""
    if config.resume_accept and config.resume is None:
        words = _list(config.resume_accept)
        return [f"resume_accept={words} says what may change when a run goes on: it needs resume=RUN"]
    return [
        f"resume_accept={_list([word])}: {problem}"
        for word in config.resume_accept
        if (problem := _accept_problem(word)) is not None
    ]


def _accept_problem(word: str) -> str | None:
    row = _ROWS.get(_full(word))
    if word == DATA or (row is not None and row.kind == ORDER):
        return None
    if row is None:
        known = [DATA, *(_word(key) for key in _ROWS if _ROWS[key].kind == ORDER)]
        return f"there is no such change; it can be {', '.join(known)}{did_you_mean(word, known)}"
    if row.kind == FREE:
        return f"{word} is free to change, and only said in the log. Drop it"
    if row.kind == DATA:
        return f"{row.meaning}. resume_accept=[data] is the word for that"
    return f"{row.meaning}: nothing can accept that. Drop it, and the new {_word(word)}"


def refusal(checkpoint: Checkpoint, problems: list[str], mend: str) -> UserError:
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return UserError(
        f"{shown(checkpoint.path)} cannot go on like this:\n{lines}\n"
        f"{mend}, or start a new run without resume=."
    )


def _changes(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """What differs, each change once: under the name of the word that makes it."""
    changed = differences(_effective(to_dict(old)), _effective(to_dict(new)))
    if "loader.name" in changed:  # the keys that only one of the two has come and go with it
        changed = {
            key: values
            for key, values in changed.items()
            if not (key.startswith("loader.") and None in values)
        }
    if "loader.seq_len" in changed and get(old, "loader.stride") is get(new, "loader.stride") is None:
        changed.pop("loader.stride", None)  # it follows
    if "seed" in changed and changed["seed"] == changed.get("loader.seed"):
        del changed["loader.seed"]
    return changed


def _effective(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the loader's null replaced by what it means."""
    loader = dict(config["loader"])
    if loader.get("stride", 0) is None and loader["sampling"] != "uniform":
        loader["stride"] = loader["seq_len"]
    return config | {"loader": loader}


def _meaning(key: str, old: TrainConfig, new: TrainConfig) -> Row:
    """The table's row of a changed key, said more exactly where the values say more."""
    row = row_of(key)
    before, now = get(old, key), get(new, key)
    if key in _BUDGET and new.schedule.total_steps is not None:
        return row._replace(meaning="")
    if key == "loader.seq_len" and now > before:
        return Row(
            FATAL, (), f"the model knows no position beyond {before}, and init_from gives it none: only a "
            "model that was trained at that length does",
        )  # fmt: skip
    if key == "loader.name" and layout(old.loader) != layout(new.loader):
        return Row(
            FATAL, (), f"it reads {_LAYOUT_WORDS[layout(new.loader)]}, the checkpoint's data is "
            f"{_LAYOUT_WORDS[layout(old.loader)]}: a new run can start from its weights, init_from=RUN",
        )  # fmt: skip
    if key == "seed" and old.loader.seed == new.loader.seed:
        return Row(FREE, (), "seeds the sampled text only: weights and random numbers are the checkpoint's")
    if key in ("seed", "loader.seed") and all(in_file_order(config.loader) for config in (old, new)):
        return row._replace(meaning=f"a change that changes nothing: loader={new.loader.name} takes no seed")
    return row


def _back(refused: list[str], changed: dict[str, tuple[Any, Any]]) -> str:
    """The words that take refused changes back: keys that came with another group are in no command."""
    came = [key for key in refused if (group := _group_of(key)) in changed and group != key]
    drop = [_word(key) for key in refused if key not in came]
    say = [override(key, changed[key][0]) for key in came if _group_of(key) not in refused]
    if not say:
        return f"Drop {', '.join(drop)} from the command"
    values = f"Say the checkpoint's {' '.join(say)}"
    return f"{values}, and drop {', '.join(drop)} from the command" if drop else values


def _group_of(key: str) -> str:
    return f"{key.partition('.')[0]}.name"


def _mend(back: str, fatal: list[str], order: dict[str, Any], config: TrainConfig) -> str:
    if fatal:
        return back
    data = [DATA] if DATA in config.resume_accept else []
    accept = f"resume_accept={_list([*data, *map(_word, order)])}"
    return f"{back}; or go on anyway as a branch, in a run directory of its own: {accept}"


def _as_changed(key: str, changed: dict[str, Any]) -> str:
    """`seed` and the `loader.seed` that follows it are one change, under either name."""
    return "seed" if key == "loader.seed" and key not in changed and "seed" in changed else key


def _word(key: str) -> str:
    """A key as the command line names it."""
    return key.removesuffix(".name") if key not in ("run.name", "sweep.name", "model.name") else key


def _full(word: str) -> str:
    return f"{word}.name" if word in ("loader", "optimizer") else word


def _list(words: list[str]) -> str:
    return f"[{','.join(words)}]"
