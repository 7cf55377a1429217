"""What a run came to, in one small file: `summary.json`, written as it ends or stops, and by nothing else.

step, tokens            of its last checkpoint; tokens as in its rows
epochs                  whole ones and the share of the last, by the loader's cursor
val_loss, best_val_loss the last validation loss and the lowest, nats; val_bits_per_byte and
                        best_val_bits_per_byte the same in bits a byte
unique_tokens           the distinct tokens that were targets, and mean_coverage how often each, on average
                        (coverage.py); null where counting them failed or would take too long
tokens_per_s            over the time in training steps, and data_wait_share the share of it spent waiting for
                        data; evaluations, samples and saves left out
peak_memory_mb          the largest of all starts (peak_memory.py); wall_s all seconds in the loop
metadata_sha256         the set that it read last

Figures are of the whole run, over all its starts, of a branch with what it inherited; null where there is
none. A run that was killed leaves none, or that of an earlier stop: `read` compares its step with the run's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.auditing.coverage import Coverage, Limits, coverage_of
from harness.auditing.replay import RunRecord
from harness.commandline.commands import shown
from harness.files import write_json
from harness.run_files import run_dir

if TYPE_CHECKING:
    from harness.resuming.lineage import Segment
    from harness.storage import Store
    from harness.training.run import Run

log = logging.getLogger("harness")

FILE = "summary.json"
# What counting may cost, where who stops the run waits for it: below a second for the samples, and this many
# bytes of masks. At the end of a run: about five seconds and 1 GB; of masks a hundredth of the training time,
# if they are read at 100 MB/s.
_STOPPED = Limits(samples=1 << 22, read_bytes=1 << 26)
_SAMPLES = 1 << 25
_READ_BYTES_A_SECOND = 1_000_000


def write(run: Run, segments: list[Segment], train: Store, *, finished: bool) -> dict[str, Any]:
    """Write the summary of a run that has just been saved, and return it.

    `train`: its split; `finished`: it got to the end of its budget. What fails is one line in the log.
    """
    values = _values(run, _coverage(run, segments, train, finished))
    try:
        write_json(run.path / FILE, values)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): metrics.jsonl and the checkpoints have every step",
            shown(run.path / FILE), error.strerror or error,
        )  # fmt: skip
    return values


def read(path: Path) -> dict[str, Any] | None:
    """The summary of the run in `path`; None where there is none that is of its last step and can be read."""
    values = _read(path)
    if values is None or values["step"] != run_dir.read_status(path).get("step"):
        return None
    return values


def cut_after(path: Path, step: int) -> None:
    """Remove the summary of a run that goes on from `step`, where it tells of later steps or is damaged."""
    values = _read(path)
    if values is None or values["step"] > step:
        with contextlib.suppress(OSError):  # what is no file is no summary either
            (path / FILE).unlink()


def for_tracker(run: Run, values: dict[str, Any], chain: dict[str, str]) -> dict[str, Any]:
    """What a tracker keeps of the whole run: figures of its summary, and the data `chain`."""
    names = ("best_val_loss", "unique_tokens", "mean_coverage", "peak_memory_mb")
    figures = {name: values[name] for name in names} | {"best_step": run.progress.best_step, **chain}
    return {name: value for name, value in figures.items() if value is not None}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads((path / FILE).read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and type(values.get("step")) is int else None


def _coverage(run: Run, segments: list[Segment], train: Store, finished: bool) -> Coverage | None:
    read_bytes = max(_STOPPED.read_bytes, round(run.progress.train_s * _READ_BYTES_A_SECOND))
    limits = Limits(_SAMPLES, read_bytes) if finished else _STOPPED
    record = RunRecord(run.path, run.config, segments)
    try:
        return coverage_of(record, run.progress.step, lambda: train, limits)
    except Exception as error:  # it only looks back at the run, which is whole
        log.warning(
            "%s has no unique_tokens and no mean_coverage: %s. "
            "harness.auditing.coverage.coverage(%r) counts them",
            FILE, " ".join(f"{error}".split()) or type(error).__name__, str(run.path),
        )  # fmt: skip
        return None


def _values(run: Run, coverage: Coverage | None) -> dict[str, Any]:
    progress = run.progress
    values: dict[str, Any] = {
        "step": progress.step,
        "tokens": progress.tokens,
        "epochs": round(_epochs(run), 6),
        "val_loss": progress.val_loss,
        "best_val_loss": progress.best_val_loss,
        "val_bits_per_byte": _bits(run, progress.val_loss),
        "best_val_bits_per_byte": _bits(run, progress.best_val_loss),
        "unique_tokens": None if coverage is None else coverage.unique_tokens,
        "mean_coverage": None if coverage is None else coverage.mean_coverage,
        "tokens_per_s": _share(progress.timed_tokens, progress.train_s, 1),
        "data_wait_share": _share(progress.waited_s, progress.train_s, 6),
        "peak_memory_mb": progress.peak_memory_mb,
        "wall_s": round(progress.elapsed_s, 3),
        "metadata_sha256": run.identity["metadata_sha256"],
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _epochs(run: Run) -> float:
    """A cursor counts tokens of a sequential loader, samples of every other."""
    loader = run.config.loader
    step = loader.batch_size * (loader.seq_len if loader.name == "sequential" else 1)
    share: float = run.cursor["position"] / (run.loader.batches_per_epoch * step)
    return run.progress.epoch + min(1.0, share)


def _bits(run: Run, loss: float | None) -> float | None:
    from harness.training.evaluation import bits_per_byte

    return None if loss is None else bits_per_byte(loss, run.validation)


def _share(amount: float, seconds: float, digits: int) -> float | None:
    return round(amount / seconds, digits) if seconds > 0 else None
