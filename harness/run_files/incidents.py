"""incidents.jsonl: the steps of a run whose numbers went wrong, a JSON object a line; absent where none did.

    kind                        nonfinite: the loss or the gradient norm is no number
                                spike: the loss jumped; with `zscore`, and `median` of the losses before it
    step, loss, grad_norm       as in metrics.jsonl, whether or not the step is logged there
    epoch, position_before, position, batch_sha256
                                the batch: its part of the epoch's order, in tokens for `sequential`, else in
                                samples; the hash as in metrics.jsonl
    action                      stop: the run ended before the step; skip: the step changed nothing;
                                none: trained as any other
    keep                        of a stop: the checkpoints from before it, and from before the skipped steps
                                that led to it; retention leaves them alone

A resume cuts the rows past its step, as in metrics.jsonl: the steps are taken again, and what goes wrong
again is written again. The rows of stops stay: a run is resumed from before its stop, and `keep` must outlive
that. A stop at the same step replaces the row before it. So the rows are in the order in which things
happened, and their steps may go back. Deleting a stop's row gives its checkpoints back to retention.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from harness.append_file import AppendFile
from harness.checkpoints import checkpoint
from harness.commandline.commands import command, override, shown
from harness.errors import UserError
from harness.tracking import jsonl

log = logging.getLogger("harness")

FILE = "incidents.jsonl"
_SAMPLES = {"sliding_window": "windows", "contrastive_rows": "pairs"}  # else rows


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Every row in order; none where there is no file. Raises `UserError` as `jsonl.read_rows` does."""
    path = run_dir / FILE
    return jsonl.read_rows(path) if path.exists() else []


def append(run_dir: Path, row: dict[str, Any]) -> None:
    """Write one row durably: a checkpoint may be saved, or kept, on the strength of it.

    Raises `OSError` where a stop cannot be written; any other row is then in the log, and the run goes on.
    """
    path = run_dir / FILE
    if row["action"] == "stop":
        jsonl.keep_rows(path, lambda old: (old.get("action"), old.get("step")) != ("stop", row["step"]))
    try:
        with contextlib.closing(AppendFile(path)) as file:
            file.append(jsonl.encode_row(row))
            file.sync()
    except OSError as error:
        if row["action"] == "stop":
            raise
        log.error("%s cannot be written (%s); it lacks %s", path, error.strerror, row)


def cut_after(run_dir: Path, step: int) -> int:
    """Drop the rows past `step`, stops apart, and a torn last line; how many rows went."""
    return jsonl.keep_rows(
        run_dir / FILE, lambda row: row.get("step", 0) <= step or row.get("action") == "stop"
    )


def kept_steps(run_dir: Path) -> set[int]:
    """The checkpoints that retention must leave alone. Raises `UserError` where that cannot be read."""
    kept: set[int] = set()
    for row in read(run_dir):
        keep = row.get("keep", [])
        if not isinstance(keep, list) or not all(type(step) is int for step in keep):
            raise UserError(
                f"{run_dir / FILE}: keep={keep!r} of step {row.get('step')} must be a list of steps: it says "
                "which checkpoints stay. Put the file back from a copy, or say keep: [] there"
            )
        kept.update(keep)
    return kept


def skips_before(run_dir: Path, step: int) -> int:
    """How many steps in a row were skipped up to and including `step`."""
    skipped = {row.get("step") for row in read(run_dir) if row.get("action") == "skip"}
    first = step
    while first in skipped:
        first -= 1
    return step - first


def numbers_in_words(row: dict[str, Any]) -> str:
    return f"the loss is {row['loss']:.4g}, the gradient norm {row['grad_norm']:.4g}"


def batch_in_words(row: dict[str, Any], cursor: dict[str, Any]) -> str:
    """Which part of the data a row's batch is; `cursor`: the state of the loader that read it."""
    place = f"[{row['position_before']}, {row['position']})"
    if "strategy" not in cursor:
        return f"tokens {place} of {cursor['split']}, epoch {row['epoch']}"
    return f"{_SAMPLES.get(cursor['strategy'], 'rows')} {place} of the order of epoch {row['epoch']}"


def look_command(run_dir: Path, row: dict[str, Any]) -> str:
    """The command that shows a row's batch."""
    return command("inspect_batch", str(shown(run_dir)), f"step={row['step']}")


def good_steps(run_dir: Path, row: dict[str, Any], skips: int) -> list[int]:
    """The checkpoints from before a stop at `row`, and from before the `skips` steps that led to it."""
    return [step for step in checkpoint.complete_steps(run_dir) if step < row["step"] - skips]


def stop_in_words(
    run_dir: Path, row: dict[str, Any], cursor: dict[str, Any], lr: float, skips: int, where: str
) -> str:
    """What a person needs to know when a run stops at `row`, after `skips` skipped steps.

    `where`: whether the row could be written.
    """
    ways = [override("optimizer.lr", float(f"{lr / 2:.3g}"))]
    if skips == 0:
        ways.insert(0, "trainer.on_nonfinite=skip")
    if good := good_steps(run_dir, row, skips):
        newest = shown(checkpoint.step_dir(run_dir, good[-1]))
        older = f", and so are {len(good) - 1} older ones, should it be spoilt already" if good[1:] else ""
        on = f"The last checkpoint from before it is {newest}; it is kept{older}. Go on:"
        source = newest if skips else shown(run_dir)  # after skipped steps it is not the newest of the run
        ways = [command("train", f"resume={source}", way) for way in ways]
    else:
        on = "There is no checkpoint from before it. Start a new run, with"
    before = f" The {skips} steps before it were skipped for the same reason." if skips else ""
    return "\n".join(
        [
            f"step {row['step']}: {numbers_in_words(row)}, at {batch_in_words(row, cursor)}.{before}",
            f"The step was not taken: such a gradient makes every weight NaN. {where}.",
            on,
            *(f"  {way}" for way in ways),
            "Look at the batch:",
            f"  {look_command(run_dir, row)}",
        ]
    )
